"""Memory of a run, for tests outside of its job."""

from pathlib import Path

from moc.store.errors import CheckpointError
from moc.store.host_memory import memory_storage
from moc.store.storage import LocalStorage
from moc.store.store import find_run, storage_at


def find_memory_storage(memory_dir: str | Path, job: str, node: str | None = None) -> LocalStorage:
    """The memory of the run at a checkpoint address; raises CheckpointError if no run has begun there."""
    run = find_run(storage_at(job))
    if run is None:
        raise CheckpointError(f"no run has begun in {job}")
    return memory_storage(memory_dir, job, run.run, node)
