"""The folder of a node: folds chains of gradients in its memory, as a process of its own.

The worker that leads the node starts it, and sends it orders (:mod:`moc.runtime.helper`).  It runs at the lowest
priority, on one core that training does not need, and dies with the worker, in the middle of an order if need be: so it
writes nothing in memory that another generation uses.
"""

from __future__ import annotations

import os
from pathlib import Path

from moc.runtime import children
from moc.runtime.helper import serve

_LOWEST = 19


def main() -> None:
    """Carries out orders until the worker ends."""
    children.belong_beside()
    os.nice(_LOWEST)
    import torch  # takes seconds, in which the worker may end

    from moc.recovery.chains import Chain
    from moc.recovery.folds import carry_out
    from moc.store.storage import LocalPlace
    from moc.store.store import Store

    def answer(order: dict) -> dict:
        store = Store(LocalPlace(Path(order["memory"]), in_memory=True), slack=True)
        chains = ([Chain(*chain) for chain in order[what]] for what in ("compare", "fold"))
        return carry_out(store, *chains)._asdict()

    torch.set_num_threads(1)
    serve(answer)


if __name__ == "__main__":
    main()
