"""Checks of snapshots in files and memory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.live.job import Events
from moc.events import problems
from moc.store.errors import CheckpointError
from moc.store.shard_file import MissingTensorError, ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.host_memory import find_memory_storage
from tests.integration.tiny import FLAGS, LAYOUTS, Trained
from tests.worlds import World, start_world

EVERY = dict(ckpt_policy="full", snapshot_interval="1")


def start(layout: str, flags: dict, body: str = "bodies:train", **arguments) -> World:
    """Starts a world of the tiny model in a layout."""
    size, parallel = LAYOUTS[layout]
    return start_world(size, f"tests.integration.{body}", flags=FLAGS | parallel | flags, **arguments)


def told(world: World) -> Trained:
    """Returns the results of a world that ended without errors."""
    results = world.wait()
    assert all(result.value is not None for result in results), results[0].output[-2000:]
    return Trained([result.value for result in results])


def train(layout: str, flags: dict, body: str = "bodies:train", **arguments) -> Trained:
    """Trains the tiny model in a layout."""
    return told(start(layout, flags, body, **arguments))


@contextlib.contextmanager
def node_memory() -> Iterator[str]:
    """A directory for snapshots in this machine's memory."""
    directory = tempfile.mkdtemp(prefix="moc-test-", dir="/dev/shm")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def stores(flags: dict) -> dict[str, Store]:
    """The places of a run's snapshots, by tier."""
    found = {"storage": Store(LocalStorage(flags["ckpt_dir"]))}
    if flags.get("ckpt_tier") == "memory":
        with contextlib.suppress(CheckpointError):  # no run has begun yet
            found["memory"] = Store(find_memory_storage(flags["ckpt_memory_dir"], flags["ckpt_dir"]), allows_slack=True)
    return found


def damage(store: Store, iteration: int) -> str | None:
    """Returns the problems of a committed snapshot, from a check of every byte."""
    try:
        manifest = store.read_manifest(iteration)
        for name, entry in manifest.files.items():
            if wrong := store.find_header_damage(iteration, name, entry):
                return wrong
        files = (store.storage.open_blob(f"{checkpoint_name(iteration)}/{name}") for name in manifest.files)
        return next(filter(None, (source.find_damage() for source in ShardReader(files).sources())), None)
    except (CheckpointError, MissingTensorError) as error:
        return str(error)


def contents(store: Store, iteration: int) -> dict[str, str]:
    """The hash of each box that a snapshot holds, by tensor, slot and box."""
    files = [
        store.storage.open_blob(f"{checkpoint_name(iteration)}/{name}") for name in store.read_manifest(iteration).files
    ]
    sources = ShardReader(files).sources()
    return {f"{source.box.name} {source.box.slot} {source.box.region}": source.digest for source in sources}


def whole(flags: dict) -> dict[str, list[int]]:
    """Iterations of the snapshots that are there, by tier; fails if one of them is not whole."""
    found = {tier: store.iterations() for tier, store in stores(flags).items()}
    for tier, iterations in found.items():
        for iteration in iterations:
            assert (wrong := damage(stores(flags)[tier], iteration)) is None, (tier, iteration, wrong)
    return found


def newest_whole(flags: dict) -> int:
    """Iteration of the newest snapshot in any tier, after a kill; 0 if there is none.

    All that storage has must be whole, and the newest one that memory has.  An older one may still have its name there,
    which one worker takes away, while another has begun to write to its buffer.
    """
    found = {tier: store.iterations() for tier, store in stores(flags).items()}
    for tier, iterations in found.items():
        for iteration in iterations if tier == "storage" else iterations[-1:]:
            assert (wrong := damage(stores(flags)[tier], iteration)) is None, (tier, iteration, wrong)
    return max((max(iterations, default=0) for iterations in found.values()), default=0)


def events(flags: dict, kind: str) -> list[dict]:
    """Returns the events in a run's ``--log-dir``; all must match the schema."""
    log = Events(Path(flags["log_dir"]) / "events.jsonl")
    assert [(event, wrong) for event in log.all() if (wrong := problems(event))] == []
    return log.of(kind)
