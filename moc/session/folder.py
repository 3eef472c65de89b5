"""Runs a node's background optimizer: a process that applies saved gradients to experts in its memory.

The node's leading worker starts it, and sends it orders (:mod:`moc.runtime.helper_process`).  It runs at the lowest
priority, on one core that training does not need.  It dies with the worker, possibly in the middle of an order.
Therefore it writes nothing in memory that another generation uses.
"""

from __future__ import annotations

import os
from pathlib import Path

from moc.runtime import child_processes
from moc.runtime.helper_process import answer_calls

_LOWEST = 19


def main() -> None:
    """Executes orders until the worker ends."""
    child_processes.attach_in_background()
    os.nice(_LOWEST)
    import torch  # takes seconds, and the worker may end meanwhile

    from moc.recovery.gradient_chains import Chain
    from moc.recovery.gradient_folding import carry_out
    from moc.store.storage import LocalStorage
    from moc.store.store import Store

    def answer(order: dict) -> dict:
        store = Store(LocalStorage(Path(order["memory"]), in_memory=True), allows_slack=True)
        chains = ([Chain(*chain) for chain in order[what]] for what in ("compare", "fold"))
        return carry_out(store, *chains)._asdict()

    torch.set_num_threads(1)
    answer_calls(answer)


if __name__ == "__main__":
    main()
