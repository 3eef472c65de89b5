"""Runs a node's process that carries experts from older snapshots in its memory.

For each snapshot, it reads and writes about ten headers and manifests.  A thread of the worker would hold the GIL
meanwhile, and training would wait.  The node's leading worker starts this process, and sends it calls of
:class:`~moc.recovery.expert_versions.Carrier` (:mod:`moc.runtime.helper_process`).  The process imports no torch, runs
at low priority and dies with the worker.  It then leaves the same files as a worker killed while carrying.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moc.errors import with_code
from moc.recovery.expert_versions import Carrier
from moc.recovery.sources import MEMORY, AvailableCheckpoint
from moc.runtime import child_processes
from moc.runtime.helper_process import answer_calls
from moc.state.operators import Operator
from moc.store.errors import CheckpointError
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store

_LOW = 10
"""Niceness: the process takes no core from training, but does not starve, because snapshots may wait for it."""


def main() -> None:
    """Executes calls until the worker ends."""
    child_processes.attach_in_background()
    os.nice(_LOW)
    carriers: dict[str, Carrier] = {}
    answer_calls(lambda call: _answer(carriers, call))


def _answer(carriers: dict[str, Carrier], call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _carry_out(carriers, **call)}
    except (CheckpointError, OSError) as error:
        return {"error": with_code(error)}


def _carry_out(carriers: dict[str, Carrier], memory: str, compares: bool, does: str, given: Mapping[str, Any]) -> Any:
    if does == "open":
        carriers[memory] = _open(memory, **given)
        return None
    carrier = carriers[memory]
    carrier.compares = compares
    if does == "carry":
        iteration, operators = given["coming"]
        coming = AvailableCheckpoint(iteration, MEMORY, operators)
        return carrier.carry(coming if operators else None, given["copied"], frozenset(given["compared"]))
    return getattr(carrier, does)(**given)


def _open(memory: str, claim: Mapping[str, Any] | None, experts: list[Mapping[str, Any]]) -> Carrier:
    place = LocalStorage(memory, in_memory=True)
    if claim is not None:
        place = LocalStorage(memory, in_memory=True, claim=Claim(claim["job"], tuple(claim["term"]), claim["run"]))
        place.is_locked = True  # the worker has taken it, and this process writes on its behalf
    return Carrier(Store(place, allows_slack=True), [Operator(**one) for one in experts])


if __name__ == "__main__":
    main()
