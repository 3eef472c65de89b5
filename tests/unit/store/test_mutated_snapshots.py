"""Whatever a signed file in a checkpoint directory holds, a job starts from a valid snapshot, at worst an older one."""

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from moc.inspect import summary, verify
from moc.recovery.inventory import list_checkpoints
from moc.state.operators import Region
from moc.store.errors import CheckpointError
from moc.store.host_memory import leftover
from moc.store.ownership import Claim
from moc.store.shard_file import MissingTensorError, ShardReader
from moc.store.storage import LocalStorage, lease_remaining_s, record_lease
from moc.store.store import Run, Store, begin_run, record_run
from tests.cases import each_row
from tests.mutated_snapshots import OF_DIRECTORY, OF_SNAPSHOT, mutate
from tests.shared import ALL
from tests.unit.store.test_store import WORLD, saved, tensor_of

MUTATIONS = 10_000 if ALL else 200
OLDER, NEWER = 10, 20
NAMED = "0123456789abcdef"
TOOLS_EVERY = 100 if ALL else 20  # changes


@pytest.fixture(scope="module")
def pristine():
    """A directory with two snapshots and the records of a job that has ended."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        place = LocalStorage(Path(directory) / "pristine", claim=Claim("ended", run=NAMED))
        saved(Store(place), OLDER, NEWER)
        place.lock()
        record_run(place, Run(NAMED, "/data", 0.0))
        record_lease(place, 1.0)
        yield place.root


def started(root, job):
    """The snapshots that a job of another launch finds, and the one that it reads."""
    run = begin_run(LocalStorage(root), "/data")
    place = LocalStorage(root, lock_timeout_s=0.0, claim=Claim(job, run=run.run))
    lease_remaining_s(root)
    store = Store(place)
    store.take()
    record_run(place, run)
    record_lease(place, 1.0)
    found = sorted((one.iteration for one in list_checkpoints(store)[0]), reverse=True)
    return found, next(iteration for iteration in found if is_read(store, iteration))


def is_read(store, iteration):
    tensor = tensor_of(iteration, 0)
    rows, columns = tensor.global_shape
    try:
        reader = ShardReader(
            [store.open_verified(iteration, *file) for file in store.read_manifest(iteration).files.items()], True
        )
        read = reader.read_region(tensor.name, tensor.slot, Region((0, 0), (rows, columns)))
    except (CheckpointError, MissingTensorError):
        return False
    if iteration == OLDER:
        assert torch.equal(read, torch.cat([tensor_of(iteration, rank).values for rank in range(WORLD)]))
    return True


@each_row("what", [*OF_SNAPSHOT, *OF_DIRECTORY])
def test_job_starts_from_valid_snapshot(pristine, what, capsys):
    rng, starts, root = random.Random(f"signed {what}"), Counter(), pristine.parent / "ckpt"
    for number in range(MUTATIONS):
        shutil.copytree(pristine, root)
        content = mutate(rng, root, what)
        try:
            if number % TOOLS_EVERY == 0:
                assert summary.main([str(root), "--json"]) in (0, 1)
                assert verify.main([str(root), "--all", "--json"]) in (0, 1)
                leftover(root)
            found, iteration = started(root, f"job{number}")
        except Exception as error:
            raise AssertionError(f"{number}: {content[:2000]!r}") from error
        assert OLDER in found and iteration in (OLDER, NEWER), (number, content[:2000])
        assert what in OF_SNAPSHOT or iteration == NEWER, (number, content[:2000])
        starts[iteration] += 1
        shutil.rmtree(root)
        capsys.readouterr()
    print(what, dict(starts))
    assert starts[NEWER] and (starts[OLDER] or what in OF_DIRECTORY)
