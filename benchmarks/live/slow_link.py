"""``pretrain_gpt_moe.py`` on a simulated device: micro batches take time, and its memory is behind a slow link.

``DEVICE_TIME_S`` is the time of a micro batch, and ``LINK_RATE`` the bytes per second of all copies to host memory,
which pass one after the other.  Copies within the device's memory are not delayed, as on a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from benchmarks.live.device_time import take_as_long


def link_copies(rate: float) -> None:
    """Delays all copies of snapshots to host memory, as if they shared a link of ``rate`` bytes per second."""
    from moc.snapshot import device_copy

    copy_all, link = device_copy._copy_all, threading.Lock()

    def copy_over_link(copies, **how):
        with link:
            begun = time.perf_counter()
            copy_all(copies, **how)
            time.sleep(max(0.0, device_copy.nbytes(copies) / rate - (time.perf_counter() - begun)))

    device_copy._copy_all = copy_over_link


if __name__ == "__main__":
    import pretrain_gpt_moe as program

    program.warm_up()
    take_as_long(float(os.environ["DEVICE_TIME_S"]))
    link_copies(float(os.environ["LINK_RATE"]))
    sys.exit(program.main())
