"""``pretrain_gpt_moe.py``, which sleeps before each micro batch as if a device computed it, ``DEVICE_TIME_S`` seconds.

Ghosts of ``--elastic`` take no time: a device computes their dense part at most, meanwhile others a real micro batch.
"""

from __future__ import annotations

import os
import sys
import time


def take_as_long(seconds: float) -> None:
    """Has each micro batch of training that is no ghost take so much longer."""
    from megatron.pretraining.elastic.turns import ElasticTurns
    from megatron.pretraining.engine.schedule import Turns

    take, take_elastic = Turns.take, ElasticTurns.take

    def slept(self, compute):
        time.sleep(seconds)
        return take(self, compute)

    def slept_unless_ghost(self, compute):
        if not self._topology.is_ghost(self._turn):
            time.sleep(seconds)
        return take_elastic(self, compute)

    Turns.take, ElasticTurns.take = slept, slept_unless_ghost


if __name__ == "__main__":
    import pretrain_gpt_moe as program

    program.warm_up()
    take_as_long(float(os.environ["DEVICE_TIME_S"]))
    sys.exit(program.main())
