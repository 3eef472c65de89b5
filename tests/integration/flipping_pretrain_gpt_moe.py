"""The program, in which one bit of one worker's state changes; it ends as ``held_pretrain_gpt_moe.py`` does.

``TEST_FLIP`` has the worker, the iteration and the moment: ``saved``, before the snapshot of this iteration is copied,
or ``kept``, afterwards.  The digest of the iteration is computed before either.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pretrain_gpt_moe as program
from pretrain_gpt_moe import warm_up
from tests.integration.held_pretrain_gpt_moe import hold


def flip_a_bit(worker: int, iteration: int, moment: str) -> None:
    """Changes one bit of the state, once in a job."""
    import torch

    from moc.session.session import Session
    from moc.state.operators import Detail

    flipped = Path(os.environ["TEST_MAY_END"]).parent / "flipped"

    def flip(session: Session) -> None:
        engine = session._engine
        if engine.world.rank == worker and session.position.iteration == iteration and not flipped.exists():
            session._running[0].digests.wait()
            chunks = list(engine.state.fragments(engine.state.operators(), Detail.FULL))
            chunk = random.Random(worker).choice(chunks)
            data = chunk.view.view(-1).view(torch.uint8)
            data[random.Random(iteration).randrange(len(data))] ^= 4
            flipped.write_text(chunk.operator)

    if moment == "saved":
        take = Session.take
        Session.take = lambda self: (flip(self), take(self))[1]
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
    worker, iteration, moment = os.environ["TEST_FLIP"].split()
    flip_a_bit(int(worker), int(iteration), moment)
    hold(Path(os.environ["TEST_MAY_END"]))
    sys.exit(program.main())
