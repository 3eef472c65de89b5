"""Runs this repository's trainer and times its iterations; the peers save its model and optimizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def begin(flags: Sequence[str]) -> tuple[Any, Any, Any]:
    """Builds model, optimizer and data from flags as ``pretrain_gpt_moe.py`` does; a collective call.

    Returns:
        The :class:`megatron.pretraining.parts.TrainingRun`, its ``StopRequests``, and the ``Phases`` of the start.
    """
    import_module("moc.megatron")  # before the first import of megatron-core
    from megatron.pretraining.entry import gpt
    from megatron.pretraining.entry.pretrain import prepared
    from megatron.pretraining.process.phases import Phases
    from megatron.pretraining.process.stopping import StopRequests
    from megatron.pretraining.setup import start
    from moc.runtime.job import Job

    sys.argv = ["pretrain_gpt_moe.py", *flags]
    config, program = prepared(gpt.program_of(gpt.configured()))
    phases, stop = Phases(), StopRequests(config)
    phases.done("import")
    world = program.connect(config, Job())
    phases.done("join")
    return start(program.build(config, world, stop, phases), stop, phases), stop, phases


def measured_peer(own, flags: Sequence[str], saver_of) -> dict:
    """Returns :func:`benchmarks.save_peers.rounds.measure`'s result for a peer that saves this trainer's state.

    Args:
        own: the peer's flags.
        flags: flags of ``pretrain_gpt_moe.py``.
        saver_of: ``(model chunks, optimizer, mode) -> Saver``.
    """
    from benchmarks.save_peers.rounds import Clock, gather, measure

    run, stop, _ = begin([*flags, "--train-iters", "100000"])
    from megatron.pretraining.engine.state import optimizer_fragments
    from megatron.pretraining.loop import iterate, prepare

    prepare(run)
    chunks, optimizer = run.stepper.chunks, run.stepper.optimizer.core
    masters = (f for f in optimizer_fragments(chunks, optimizer) if f.slot == "master" and f.first_copy)
    parameters = sum(gather(sum(f.view.numel() for f in masters)))
    saver = saver_of(chunks, optimizer, own.mode)
    measured = measure(saver, Clock(), lambda: iterate(run, stop), own)
    return measured | {"parameters": parameters, "copied_bytes": sum(gather(saver.copied_bytes()))}
