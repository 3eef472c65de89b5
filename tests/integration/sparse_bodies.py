"""What workers of tests of sparse checkpoints do, beside training."""

from __future__ import annotations

from megatron.training import loop
from moc.state.detail import Detail
from moc.state.training_state import TrainingState
from tests.integration import bodies, pec_bodies


def train(flags: dict) -> dict:
    """As ``bodies.train``; also ``state``, a digest of each fragment at the end, and ``steps``."""
    told, run_loop = {}, loop.train

    def watched(run, stop):
        code = run_loop(run, stop)
        state = TrainingState(run.stepper.chunks, run.stepper.optimizer.core)
        for detail in (Detail.FULL, Detail.COMPUTE):
            for f in state.fragments(state.operators(), detail):
                told[f"{f.name} {f.slot} {f.region.offset} {f.region.shape}"] = bodies.digest(f.view)
        return code

    loop.train = watched
    return bodies.train(flags) | {"state": told}


die_after = pec_bodies.die_after
