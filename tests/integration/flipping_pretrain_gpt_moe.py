"""The program, in which one bit of one worker's state changes; it ends as ``held_pretrain_gpt_moe.py`` does.

``TEST_FLIP`` has worker, iteration, moment, and a seed, which draws tensor and bit.  Moments: ``saved``, before
the snapshot of this iteration is copied; ``kept``, afterwards; ``weights`` and ``schedule``, afterwards in the weights
that the model computes with, and in the schedule of learning rates.  The digest of the iteration is computed before.
With ``TEST_LOSES``, the program also does what ``losing_pretrain_gpt_moe.py`` does.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold
from tests.integration.losing_pretrain_gpt_moe import lose_whole_nodes, tell_state


def flip_a_bit(worker: int, iteration: int, moment: str, seed: int = 0) -> None:
    """Changes one bit of the state, once in a job."""
    import torch

    from moc.session.session import Session
    from moc.state.operators import Detail

    flipped = Path(os.environ["TEST_MAY_END"]).parent / "flipped"

    def flip(session: Session) -> None:
        engine = session._engine
        if engine.world.rank == worker and session.position.iteration == iteration and not flipped.exists():
            session._running[0].digests.wait()
            if moment == "schedule":
                engine._stepper.scheduler.num_steps ^= 4
                flipped.write_text("scheduler")
                return
            detail, chance = Detail.COMPUTE if moment == "weights" else Detail.FULL, random.Random(seed)
            chunk = chance.choice(list(engine.state.fragments(engine.state.operators(), detail)))
            data = chunk.view.view(-1).view(torch.uint8)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            flipped.write_text(chunk.operator)

    if moment == "saved":
        take = Session.take

        def flip_and_take(self) -> None:
            flip(self)
            take(self)
            if self.position.iteration in (iteration - 1, iteration):
                self.finish()  # however slow the machine is, the changed snapshot and the one before are complete

        Session.take = flip_and_take
    else:
        contribution = Session.contribution

        def contribute(self) -> dict:
            if self._running is not None:
                for taken in self._running[1]._stages.copying.queue:
                    taken.snapshot.capture.wait()
            flip(self)
            return contribution(self)

        Session.contribution = contribute


if __name__ == "__main__":
    warm_up()
    worker, iteration, moment, *seed = os.environ["TEST_FLIP"].split()
    flip_a_bit(int(worker), int(iteration), moment, *map(int, seed))
    if "TEST_LOSES" in os.environ:
        lose_whole_nodes()
        tell_state(Path(os.environ["TEST_MAY_END"]).parent)
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
