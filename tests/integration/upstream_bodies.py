"""What workers of tests of upstream logs do, beside training."""

from __future__ import annotations

import torch.distributed as dist

from megatron.pretraining.engine.step import sum_losses
from moc.logs.log import Direction
from moc.store.shard_file import tensor_bytes
from tests.integration import bodies


def replay_alone(flags: dict, iterations: int) -> dict:
    """Trains, computes one more iteration with all stages, and the same again with one stage at a time.

    Returns:
        ``together`` and ``alone``, each with a digest of all gradients, and the sums of losses; ``messages`` between
        workers while this stage computes; ``same``, whether it has logged again what it had logged; ``bytes`` of a log.
    """

    def use(run) -> dict:
        for _ in range(iterations):
            record = run.stepper.step(run.position.iteration, _batches(run))
            run.stepper.gather_weights()
            run.session.completed(record, 0.0)
        told = {"together": _compute(run)}
        upstream, iteration = run.stepper.boundaries, run.position.iteration + 1
        before = _logged(run, iteration)
        for stage in range(run.world.pipeline_size):
            dist.barrier()
            if stage == run.world.pipeline_rank:
                _scramble(run)
                with upstream.replaying([stage]), bodies._noting_collectives(messages := []):
                    told |= {"alone": _compute(run, record.tokens), "messages": messages}
            else:
                upstream._log.wait()  # it may be writing what it has logged again
                upstream.serve(iteration, [stage])
        return told | {"same": _logged(run, iteration) == before, "bytes": upstream._log.log_bytes}

    return bodies.with_run(flags, use)


def _compute(run, tokens: int | None = None) -> dict:
    reports = run.stepper.reduced_gradients(run.position.iteration, _batches(run), tokens)
    losses = {name: value.item() for name, value in sum_losses(reports, run.world).items()}
    return {"gradients": bodies._gradients(run), **losses}


def _logged(run, iteration: int) -> list[bytes]:
    upstream = run.stepper.boundaries
    upstream._log.wait()
    reader, stage = upstream._reader(), run.world.pipeline_rank
    sent = (one for direction in Direction for one in upstream._pipeline.sent_by(stage, direction))
    return [bytes(tensor_bytes(reader.read(iteration, one.key))) for one in sent]


def _scramble(run) -> None:
    """What the iteration left behind is of no use to the next one."""
    for chunk in run.stepper.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(float("nan"))


def _batches(run):
    return run.batches("train", run.position.consumed_samples)
