"""Determines the run of a job's snapshots, and the claim under which the job commits them."""

from __future__ import annotations

import os
from pathlib import Path

from moc.errors import with_code
from moc.runtime import environment
from moc.runtime.collectives import first_reported, gather, run_on_all, run_on_rank0
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.resume.survivors import LocalRemains
from moc.session.settings import Settings
from moc.session.tiers import Tiers
from moc.store.errors import CheckpointError
from moc.store.host_memory import DEFAULT_LEASE_S, Leftover, leftover, memory_paths_of_other_runs, record_lease
from moc.store.object_storage import storage_at
from moc.store.ownership import Claim
from moc.store.runs import Run, begin_run, record_run
from moc.store.storage import LocalStorage, Storage


def claimed(settings: Settings, world: World, remains: LocalRemains, log: Listener) -> Claim:
    """Returns the claim under which this generation commits snapshots; a collective call.

    A job reads the run from storage when it starts.  Later the survivors know it, and storage is not accessed.

    Raises:
        CheckpointError: on all workers: storage cannot be used.
    """
    run = next((told for told in gather(remains.run) if told), None)
    if run is None:
        place = storage_at(settings.directory)
        run = run_on_rank0(lambda: begin_run(place, settings.directory).run, f"cannot use {place.name} for snapshots")
        log.message(f"run {run}: its snapshots are in {place.name}")
    remains.run = run
    return Claim(world.job.id, world.job.term, run)


_FILES = 1 << 15
"""Bytes for the files of a claim, a run and a lease."""


def make_room_for_files(place: Storage) -> None:
    """Releases spare memory of an earlier generation for the ownership files, if the file system is full."""
    if isinstance(place, LocalStorage) and place.free_bytes() < _FILES:
        place.reserve.release(_FILES)


def take_places(settings: Settings, tiers: Tiers, world: World, trained: bool, log: Listener) -> bool:
    """Takes ownership of the tiers for the term of this generation; a collective call.

    A job takes storage when it starts, so that it ends before training if it cannot.  Later, the first read or commit
    there takes it (:meth:`moc.store.store.Store.take`): a job that can resume from memory does not wait for storage.

    Returns:
        Whether storage must still be taken and cleaned up, in the background, before anything is written there.

    Raises:
        CheckpointError: on all workers: another job, or a newer generation of this one, owns a tier.
    """
    begins, problem = not any(gather(trained)), None

    def take() -> None:
        nonlocal problem
        if world.rank == 0 and begins:
            problem = _take_storage(tiers, settings.directory)
        if tiers.memory is not None and tiers.leads_node:
            make_room_for_files(tiers.memory.storage)
            tiers.memory.take()
            record_run(tiers.memory.storage, Run(tiers.memory.storage.run, settings.directory, 0.0))
            record_lease(tiers.memory.storage, float(os.environ.get(environment.SILENCE_TIMEOUT, DEFAULT_LEASE_S)))

    used = settings.directory if tiers.memory is None else tiers.memory.storage.name
    run_on_all(take, f"cannot use {used} for snapshots")
    if problem := first_reported(problem):
        log.message(f"WARNING: snapshots are only in memory until storage works: {problem}")
    if begins and tiers.memory is not None:
        _tell_of_other_runs(settings, tiers, log)
    return tiers.memory is not None and (not begins or problem is not None)


def _take_storage(tiers: Tiers, address: str) -> str | None:
    """Takes storage; if it cannot be used, returns the reason, or raises it if there is no memory tier."""
    try:
        tiers.storage.take()
        record_run(tiers.storage.storage, Run(tiers.storage.storage.run, address, 0.0))
    except OSError as error:
        why = error.strerror or error
        problem = CheckpointError(
            f"{tiers.storage.storage.name} cannot be used for snapshots ({why}). Fix: correct its permissions, make "
            "room or repair it",
            code="storage-unwritable",
        )
        if tiers.memory is None:
            raise problem from None
        return with_code(problem)
    return None


def _tell_of_other_runs(settings: Settings, tiers: Tiers, log: Listener) -> None:
    found: list[Leftover] = []
    if tiers.memory is not None and tiers.leads_node:
        run = tiers.memory.storage.run
        paths: list[Path] = memory_paths_of_other_runs(settings.memory_dir, settings.directory, run)
        found = [one for one in map(leftover, paths) if one.bytes and not one.used_by]
    told = {path: nbytes for node in gather([(str(one.path), one.bytes) for one in found]) for path, nbytes in node}
    for path, nbytes in told.items():
        log.message(
            f"WARNING: {path} has {nbytes / 1e9:.3g} GB of another run whose snapshots were in {settings.directory}: "
            "they are not used; if that run is not to be started again, remove them with "
            f"tools/clean_memory.py --remove {path}"
        )
