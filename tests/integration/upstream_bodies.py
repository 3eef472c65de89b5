"""What workers of tests of upstream logs do, beside training."""

from __future__ import annotations

import dataclasses
from unittest import mock

import torch.distributed as dist

from megatron.training import loop
from megatron.training.stage_replay import Comparison, StageReplay
from megatron.training.step import sum_losses
from moc.logs.crossings import Direction, needed
from moc.logs.files import LogReader
from tests.integration import bodies


def replay_alone(flags: dict, iterations: int) -> dict:
    """Trains, computes one more iteration with all stages, and the same again with one stage at a time.

    Returns:
        ``together`` and ``alone``, each with a digest of all gradients, and the sums of losses; ``messages`` between
        workers while one stage computes; ``different``, what it would have sent that is not what it had sent;
        ``compared``, how many tensors that were; ``received``, how many entries of which stages' logs it needed;
        ``bytes`` of a log, and ``shape`` and ``itemsize`` of its tensors.
    """

    def use(run) -> dict:
        for _ in range(iterations):
            record = run.stepper.step(run.position.iteration, _batches(run))
            run.position = run.position.after(record)
        told = {"together": _compute(run, run.stepper)}
        upstream = run.stepper.boundaries
        upstream._writer.wait()
        own, others = _logs(upstream), {}
        dist.barrier()
        for stage in range(run.world.pipeline_size):
            if stage == run.world.pipeline_rank:
                _scramble(run)
                told |= _alone(run, own, lambda s: others.setdefault(s, LogReader(_beside(upstream, s))), record.tokens)
            dist.barrier()  # the others are here meanwhile, and take part in nothing
        told["bytes"] = upstream._writer.slot_bytes
        return told

    return bodies.with_run(flags, use)


def _alone(run, own, reader, tokens: int) -> dict:
    stage, messages, needs = run.world.pipeline_rank, [], {}
    pipeline, iteration = run.stepper.boundaries._pipeline, run.position.iteration + 1
    for one in needed(pipeline, [stage], [iteration]):
        needs[one.crossing] = one.stage
    comparison, given = Comparison(own.read), {}

    def source(which, crossing):
        sender = needs.pop(crossing)
        given[sender] = given.get(sender, 0) + 1
        return reader(sender).read(which, crossing)

    core = run.stepper.chunks[0].config
    micro_batches = len({i for i, _ in pipeline.turns})
    stepper = dataclasses.replace(run.stepper, boundaries=StageReplay(core, micro_batches, source, comparison))
    with bodies._noting_collectives(messages), mock.patch.object(dist, "P2POp", side_effect=AssertionError):
        alone = _compute(run, stepper, tokens)
    assert not needs, "not all that was logged is needed"
    return {
        "alone": alone,
        "messages": messages,
        "different": [str(one) for one in comparison.different],
        "compared": comparison.compared,
        "sent": sum(len(pipeline.sent(stage, direction)) for direction in Direction),
        "received": given,
    }


def _compute(run, stepper, tokens: int | None = None) -> dict:
    reports = stepper.reduced_gradients(run.position.iteration, _batches(run), tokens)
    losses = {name: value.item() for name, value in sum_losses(reports, run.world).items()}
    return {"gradients": bodies._gradients(run), **losses}


def _scramble(run) -> None:
    """What the iteration left behind is of no use to the next one."""
    for chunk in run.stepper.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(float("nan"))


def _batches(run):
    return run.batches("train", run.position.consumed_samples)


def _logs(upstream) -> LogReader:
    return LogReader(upstream._writer._directory)


def _beside(upstream, stage: int):
    """The logs of another stage, where each has one rank."""
    return upstream._writer._directory.parent / f"rank_{stage:05d}"
