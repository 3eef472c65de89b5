"""``pretrain_gpt_moe.py`` that sleeps ``DEVICE_TIME_S`` seconds before each micro batch, as if a device computed it.

Dummy micro batches of ``--elastic`` take no time: a device computes at most their dense part, while other devices
compute a real micro batch.
"""

from __future__ import annotations

import os
import sys
import time


def take_as_long(seconds: float) -> None:
    """Delays each training micro batch, except dummy micro batches, by ``seconds``."""
    from megatron.pretraining.elastic.moe_layer import ElasticTurns
    from megatron.pretraining.engine.schedule import Turns

    take, take_elastic = Turns.take, ElasticTurns.take

    def slept(self, compute):
        time.sleep(seconds)
        return take(self, compute)

    def slept_unless_ghost(self, compute):
        if not self._topology.is_dummy(self._turn):
            time.sleep(seconds)
        return take_elastic(self, compute)

    Turns.take, ElasticTurns.take = slept, slept_unless_ghost


if __name__ == "__main__":
    import pretrain_gpt_moe as program

    program.warm_up()
    take_as_long(float(os.environ["DEVICE_TIME_S"]))
    sys.exit(program.main())
