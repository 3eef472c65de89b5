"""Functions of a test's workers that use the training state."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.state import MegatronState
from megatron.pretraining.entry.stock import get_args, replaced
from moc.state.interface import FreezingError
from moc.state.operators import Detail
from tests.integration.bodies import digest, with_run
from tests.integration.state_files import boxes, first_copies, label, load, save_split, write


def save_and_reload(flags: dict, directory: str, seed: int) -> dict:
    """Trains two steps, saves a random split of the state, and loads it into fresh objects.

    Returns:
        ``boxes`` of the first copies by detail; digests of all fragments ``before`` and ``after``, those of the
        ``fresh`` objects in between, and the steps with each.
    """

    def use(run) -> dict:
        state = _state(run)
        _steps(run, 2)
        save_split(state, Path(directory), random.Random(seed))
        fresh = _fresh_state(run)
        told = {"boxes": boxes(state), "before": _told(state), "fresh": _told(fresh)}
        load(fresh, Path(directory))
        return told | {"after": _told(fresh)}

    return with_run(flags, use)


def load_and_save(flags: dict, source: str, target: str) -> None:
    """Loads what another layout saved, and saves it again."""

    def use(run) -> None:
        state = _state(run)
        load(state, Path(source))
        write(Path(target), run.world.rank, [f for d in (Detail.FULL, Detail.COMPUTE) for f in first_copies(state, d)])

    with_run(flags, use)


def load_compute(flags: dict) -> dict:
    """Sets weights by ``COMPUTE`` while the masters are stale.

    Returns:
        Digests of the whole weights as ``expected``, as ``loaded`` and ``after`` an update of frozen operators; of all
        state ``before_stock_step`` and after one that megatron-core takes by itself; and how what does not fit is
        ``refused``.
    """

    def use(run) -> dict:
        state = _state(run)
        operators = state.operators()
        weights = [parameter for chunk in run.stepper.chunks for parameter in chunk.parameters()]
        for fragment in state.fragments(operators, Detail.COMPUTE):
            state.load(fragment, _ramp(fragment.view, fragment.start))
        state.gather_weights()
        expected, loaded = [digest(_ramp(w.view(-1), 0)) for w in weights], [digest(w) for w in weights]
        state.freeze(operators)
        _steps(run, 1)
        fragment = next(state.fragments(operators, Detail.COMPUTE))
        refused = []
        for values in (fragment.view[1:], fragment.view.double()):
            try:
                state.load(fragment, values)
            except ValueError as error:
                refused.append(str(error))
        told = {"expected": expected, "loaded": loaded, "after": [digest(w) for w in weights], "refused": refused}
        told["before_stock_step"] = _told(state)
        run.stepper.optimizer.core.step()
        return told | {"after_stock_step": _told(state)}

    return with_run(flags, use)


def freeze_and_activate(flags: dict, pattern: str) -> dict:
    """From one state, two steps in three ways: with nothing frozen, with some operators frozen, and after these were
    activated.

    Returns:
        ``frozen``: the operators; ``start``: digests and steps before; ``never``, ``while``, ``again``: after each
        way, with the ``gradients`` and the ``record`` of its first step, and norm and zeros ``recounted`` from them.
    """

    def use(run) -> dict:
        state = _state(run)
        _steps(run, 1)
        frozen = [name for name in state.operators() if re.fullmatch(pattern, name)]
        position, kept, steps = run.position, _copies(state), state.steps()
        told = {"frozen": frozen, "start": _told(state), "never": _two_steps(run, state)}
        for way, change in (("while", state.freeze), ("again", state.activate)):
            run.session.position = position
            for fragment in state.fragments(state.operators(), Detail.FULL):
                state.load(fragment, kept[label(fragment)])
            state.gather_weights()
            state.set_steps(steps)
            change(frozen)
            told[way] = _two_steps(run, state)
        return told

    return with_run(flags, use)


def count_flops(flags: dict, patterns: list[str]) -> list[dict]:
    """Floating-point operations of forward and backward with each set of operators frozen; and their matrices' size."""

    def use(run) -> list[dict]:
        state, told = _state(run), []
        for pattern in patterns:
            frozen = [name for name in state.operators() if re.fullmatch(pattern, name)]
            state.freeze(frozen)
            run.stepper.optimizer.zero_grad()
            with FlopCounterMode(display=False) as counter:
                run.stepper.schedule.forward_backward(0, run.batches("train", 0))
            state.activate(frozen)
            matrices = [f for f in state.fragments(frozen, Detail.COMPUTE) if len(f.global_shape) > 1]
            elements = sum(fragment.region.numel for fragment in matrices)
            told.append({"flops": counter.get_total_flops(), "matrices": elements})
        return told

    return with_run(flags, use)


def count_flops_of_replay(flags: dict, learning: list[str]) -> dict[str, int]:
    """Floating-point operations of an iteration that is computed again: with nothing ``frozen``, and with all operators
    but some."""

    def use(run) -> dict[str, int]:
        state, batch = _state(run), run.stepper.topology.global_batch_size
        record = _steps(run, 1)[0]
        told = {}
        for what, frozen in (("nothing", []), ("most", sorted(set(state.operators()) - set(learning)))):
            state.freeze(frozen)
            with FlopCounterMode(display=False) as counter:
                run.stepper.repeat(record, run.batches("train", run.position.consumed_samples - batch))
            state.activate(frozen)
            told[what] = counter.get_total_flops()
        return told

    return with_run(flags, use)


def freeze_refused(flags: dict) -> str | None:
    """What freezing says, if it refuses; nothing has changed then."""

    def use(run) -> str | None:
        state = _state(run)
        try:
            state.freeze(["output"])
        except FreezingError as error:
            assert not state.frozen and all(p.requires_grad for c in run.stepper.chunks for p in c.parameters())
            return str(error)
        return None

    return with_run(flags, use)


def _ramp(like: torch.Tensor, start: int) -> torch.Tensor:
    """Returns values that identify their position in a parameter."""
    return (0.25 + torch.arange(start, start + len(like), device="cpu") % 7 / 64).to(like.dtype)


def _state(run) -> MegatronState:
    return MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)


def _fresh_state(run) -> MegatronState:
    config = run.config.replace("rng", seed=run.config.rng.seed + 1)
    with replaced(get_args(), seed=config.rng.seed):
        chunks, optimizer, _ = run.program._set_up(config, None)
    return MegatronState(chunks, optimizer, ModuleState(chunks))


def _steps(run, count: int) -> list:
    records = []
    for _ in range(count):
        batches = run.batches("train", run.position.consumed_samples)
        records.append(run.stepper.step(run.position.iteration, batches))
        run.stepper.gather_weights()
        run.session.completed(records[-1], 0.0)
        run.stepper.auxiliary.drop()  # the log does it
    return records


def _two_steps(run, state: MegatronState) -> dict:
    record = _steps(run, 1)[0]
    gradients = _digests(state, state.operators(), Detail.GRAD)
    recounted = _recounted(state, record.loss_scale)
    _steps(run, 1)
    first = {"gradients": gradients, "record": dataclasses.asdict(record), "recounted": recounted}
    return _told(state) | first


def _recounted(state: MegatronState, loss_scale: float) -> list[float]:
    active = set(state.operators()) - state.frozen
    views = [f.view.double() for f in state.fragments(active, Detail.GRAD) if f.first_copy]
    sums = torch.stack([sum((v.square().sum() for v in views), torch.zeros(())).double(),
                        sum(((v == 0).sum() for v in views), torch.zeros(())).double()])  # fmt: skip
    dist.all_reduce(sums)
    return [sums[0].sqrt().item() / loss_scale, sums[1].item()]


def _told(state: MegatronState) -> dict:
    operators = state.operators()
    state_digests = _digests(state, operators, Detail.FULL) | _digests(state, operators, Detail.COMPUTE)
    return {"digests": state_digests, "steps": state.steps()}


def _digests(state: MegatronState, operators, detail: Detail) -> dict[str, str]:
    return {f"{f.operator} {label(f)}": digest(f.view) for f in state.fragments(operators, detail)}


def _copies(state: MegatronState) -> dict[str, torch.Tensor]:
    return {label(f): f.view.clone() for f in state.fragments(state.operators(), Detail.FULL)}
