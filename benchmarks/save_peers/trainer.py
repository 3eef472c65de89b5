"""The trainer of this repository, as the model and optimizer that the peers save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.save_peers.rounds import gather


@dataclass(frozen=True)
class Trainer:
    """A worker that trains.

    Attributes:
        chunks: its model chunks, wrapped for data parallelism.
        optimizer: megatron-core's optimizer of them.
        iterate: trains one iteration.
        parameters: of the whole model.
    """

    chunks: list
    optimizer: object
    iterate: Callable[[], object]
    parameters: int


def build(flags: list[str]) -> Trainer:
    """Builds model, optimizer and data from the flags of ``pretrain_gpt_moe.py``; a collective call."""
    from megatron.pretraining.arguments import parse_config

    config = parse_config([*flags, "--train-iters", "100000"])

    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.loop import collect_garbage_by_hand, iterate
    from megatron.pretraining.process.initialize import initialize
    from megatron.pretraining.process.phases import Phases
    from megatron.pretraining.process.stopping import StopRequests
    from megatron.pretraining.setup import set_up
    from pretrain_gpt_moe import providers

    stop, world = StopRequests(config), initialize(config)
    run = set_up(config, world, providers(), stop, Phases())
    collect_garbage_by_hand(run)
    chunks, optimizer = run.stepper.chunks, run.stepper.optimizer.core
    return Trainer(chunks, optimizer, lambda: iterate(run, stop), _parameters(chunks, optimizer))


def _parameters(chunks, optimizer) -> int:
    from megatron.pretraining.engine.state import optimizer_fragments

    masters = (f for f in optimizer_fragments(chunks, optimizer) if f.slot == "master" and f.first_copy)
    return sum(gather(sum(f.view.numel() for f in masters)))
