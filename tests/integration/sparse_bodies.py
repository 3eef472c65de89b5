"""What workers of tests of sparse checkpoints do, beside training."""

from __future__ import annotations

import errno
import itertools
import os

from megatron.pretraining import loop
from megatron.pretraining.engine.state import MegatronState
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.model.parameters import unpartitioned_parameters, unwrap
from moc.state.operators import Detail, operator_of
from tests.integration import bodies, pec_bodies

die_after = pec_bodies.die_after


def train(flags: dict) -> dict:
    """As ``bodies.train``.

    Returns:
        Also ``state``, a digest of each fragment at the end; and ``learned``, the operators that needed gradients, for
        each iteration that was computed again, and at the end.
    """
    state, learned, run_loop, repeat = {}, [], loop.train, Stepper.repeat

    def watched(run, stop):
        learned.append(_learning(run.stepper.chunks))
        code = run_loop(run, stop)
        training = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)
        for detail in (Detail.FULL, Detail.COMPUTE):
            for f in training.fragments(training.operators(), detail):
                state[f"{f.name} {f.slot} {f.region.offset} {f.region.shape}"] = bodies.digest(f.view)
        return code

    def watched_repeat(stepper, record, *others):
        learned.append(_learning(stepper.chunks))
        return repeat(stepper, record, *others)

    loop.train, Stepper.repeat = watched, watched_repeat
    return bodies.train(flags) | {"state": state, "learned": learned}


def train_with_little_memory(flags: dict, buffers: int) -> dict:
    """As ``bodies.train``; on the second worker there is memory for so many buffers."""
    allocate, made = os.posix_fallocate, itertools.count(1)

    def scarce(*args) -> None:
        if os.environ["RANK"] == "1" and next(made) > buffers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*args)

    os.posix_fallocate = scarce
    return bodies.train(flags)


def _learning(chunks) -> list[str]:
    names = set()
    for model in map(unwrap, chunks):
        described = unpartitioned_parameters(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                names |= {operator_of(piece.name) for piece in described[name]}
    return sorted(names)
