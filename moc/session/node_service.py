"""Runs a worker's background process, which hashes snapshots, retains experts, or applies gradients.

The worker starts one process per kind, and calls it (:mod:`moc.runtime.helper_process`).  It dies with the worker,
possibly in the middle of a call, and leaves the same files as a worker killed at that moment.

* ``hash`` hashes the entries of snapshots in memory.  A snapshot has hundreds of entries: a thread of the worker would
  acquire and release the GIL for each of them, while training needs it continuously.
* ``carry`` retains experts of older snapshots (:mod:`moc.recovery.expert_versions`).  For each snapshot,
  it reads and writes about ten headers and manifests; a thread of the worker would hold the GIL meanwhile.
* ``fold`` applies saved gradients to experts in memory, on one core that training does not need.

Only ``fold`` imports torch.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moc.files.safe_directory import SafeDirectory
from moc.runtime import child_processes
from moc.runtime.helper_process import answer_calls
from moc.store.manifest import compute_digest
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store

MODULE = "moc.session.node_service"
HASH, CARRY, FOLD = "hash", "carry", "fold"

_NICENESS = {HASH: 0, CARRY: 10, FOLD: 19}
"""By kind; with 10, a process takes no core from training, but does not starve, because snapshots may wait for it."""


def main(kind: str) -> None:
    """Answers calls until the worker ends."""
    child_processes.attach_in_background()
    os.nice(_NICENESS[kind])
    answer_calls({HASH: lambda: _hash, CARRY: _retention, FOLD: _optimizer}[kind]())


def _hash(call: list) -> list[str] | str:
    try:
        return digests(*call)
    except (OSError, ValueError) as error:  # the worker then hashes
        return str(error)


def digests(path: str, nbytes: int, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Returns the hashes of spans of a file in memory, each of bytes [start, stop).

    Raises:
        OSError, ValueError: the file cannot be mapped, or is another file, of another size.
    """
    opened = SafeDirectory(Path(path).parent).open(Path(path).name)
    with open(opened, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        if len(mapped) != nbytes:
            raise ValueError(f"{path} has {len(mapped):,} bytes, not {nbytes:,}")
        with memoryview(mapped) as memory:
            hashes = []
            for start, stop in spans:
                with memory[start:stop] as entry:
                    hashes.append(compute_digest(entry))
            return hashes


def _memory(path: str, claim: Claim | None = None) -> Store:
    storage = LocalStorage(Path(path), in_memory=True, claim=claim)
    storage.is_locked = claim is not None  # the worker has taken it, and this process writes on its behalf
    return Store(storage, allows_slack=True)


def _retention() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from moc.errors import with_code
    from moc.recovery.expert_versions import ExpertVersions
    from moc.recovery.sources import MEMORY, AvailableCheckpoint
    from moc.state.operators import Operator
    from moc.store.errors import CheckpointError

    versions_of: dict[str, ExpertVersions] = {}

    def open_versions(memory: str, claim: Mapping[str, Any] | None, experts: list[Mapping[str, Any]]) -> None:
        store = _memory(memory, Claim(claim["job"], tuple(claim["term"]), claim["run"]) if claim else None)
        versions_of[memory] = ExpertVersions(store, [Operator(**operator) for operator in experts])

    def call(memory: str, is_comparing: bool, method: str, arguments: Mapping[str, Any]) -> Any:
        if method == "open":
            return open_versions(memory, **arguments)
        versions = versions_of[memory]
        versions.is_comparing = is_comparing
        if method == "retain":
            iteration, operators = arguments["coming"]
            snapshot = AvailableCheckpoint(iteration, MEMORY, operators) if operators else None
            return versions.retain(snapshot, arguments["copied"], frozenset(arguments["compared"]))
        return getattr(versions, method)(**arguments)

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": call(order["memory"], order["compares"], order["does"], order["given"])}
        except (CheckpointError, OSError) as error:
            return {"error": with_code(error)}

    return answer


def _optimizer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    import torch  # takes seconds, and the worker may end meanwhile

    from moc.recovery.gradient_chains import Chain
    from moc.recovery.gradient_folding import execute_order

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        chains = ([Chain(*chain) for chain in order[key]] for key in ("compare", "fold"))
        return execute_order(_memory(order["memory"]), *chains)._asdict()

    torch.set_num_threads(1)
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
