"""What workers of tests of the DeepSpeed engine do, beside training."""

from __future__ import annotations

from megatron.pretraining.engine.schedule import drop_unfinished_iteration
from megatron.pretraining.engine.zero.optimizer import ZeroOptimizer
from moc.state.operators import Detail
from tests.integration.bodies import _noting_collectives, _watch, weights_of, with_run
from tests.integration.state_bodies import _state


def step_with_cuts(flags: dict, cuts: list[int]) -> dict:
    """Computes the iterations one by one; each is begun several times, and given up in the middle.

    Args:
        flags: the flags.
        cuts: micro batches after whose forward pass it is given up.

    Returns:
        ``weights`` at the end, the ``records``, the collectives while updates are applied, whether the memory of
        gradients stayed the same, and the devices of optimizer state.
    """

    def use(run) -> dict:
        stepper, schedule = run.stepper, run.stepper.schedule
        optimizer, forward = stepper.optimizer, schedule._forward_step
        seen: list = []
        told = {"records": [], "collectives": [], "gradients": set(), "devices": set()}

        def cut_off(batches, model):
            if len(seen) == cuts[0]:
                raise ConnectionError
            seen.append(1)
            return forward(batches, model)

        apply = optimizer.apply

        def watched_apply(norm):
            with _noting_collectives(told["collectives"]):
                apply(norm)

        optimizer.apply = watched_apply
        waiting = list(cuts)
        for _ in range(run.train_iters):
            for cuts[:] in [[cut] for cut in waiting]:
                seen.clear()
                schedule._forward_step = cut_off
                try:
                    stepper.step(run.position.iteration, run.batches("train", run.position.consumed_samples))
                except ConnectionError:
                    drop_unfinished_iteration(stepper.chunks, stepper.modules)
                schedule._forward_step = forward
            record = stepper.step(run.position.iteration, run.batches("train", run.position.consumed_samples))
            run.session.completed(record, 0.0)
            stepper.gather_weights()
            told["records"].append([record.loss, record.grad_norm])
            fragments = list(_state(run).fragments(run.session._engine.state.operators(), Detail.GRAD))
            told["gradients"].add(tuple(fragment.view.data_ptr() for fragment in fragments))
        assert isinstance(optimizer.core, ZeroOptimizer)
        for master, state in optimizer.core.optimizer.state.items():
            told["devices"] |= {str(master.device), *(str(value.device) for value in state.values())}
        told["same"] = len(told.pop("gradients")) == 1
        return told | {"weights": weights_of(stepper.chunks), "devices": sorted(told["devices"])}

    return with_run(flags, use)


def train_by_recipe(words: list[str]) -> dict:
    """Trains by flags as a user gives them; its exit code, losses and bytes of snapshots."""
    from megatron.pretraining import errors, loop
    from tests.integration.own_program import program_of_words

    told: dict = {"start": None, "records": []}
    _watch(told)
    with errors.reported():
        code = loop.pretrain(*program_of_words(words))
    return {"code": code, "losses": [record["loss"] for record in told["records"]]}
