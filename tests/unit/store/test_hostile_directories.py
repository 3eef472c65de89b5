"""Whatever is in a checkpoint directory: no operation uses a path outside of it and of the run's memory."""

import contextlib
import functools
import os
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from moc.events import EventLog
from moc.files.event_log import read_events
from moc.inspect import summary, verify
from moc.recovery.inventory import list_checkpoints
from moc.store import dense_files
from moc.store.errors import CheckpointError
from moc.store.host_memory import leftovers, memory_storage, remove_leftover, user_directory
from moc.store.ownership import Claim, Fence
from moc.store.storage import LocalStorage, record_lease, renew_lease
from moc.store.store import Run, Store, begin_run, record_run
from tests.hostile import Uses, add_victims, make_hostile, outside, state_of
from tests.shared import ALL
from tests.unit.inspect import checkpoints
from tests.unit.store.test_store import saved

BATCHES, DIRECTORIES = 50 if ALL else 1, 200  # in each
SEED = 46
RUN = "0123456789abcdef"
ROOT = Path(__file__).parents[3]
BESIDE = (Path(sys.prefix), Path(sys.base_prefix), ROOT, Path("/proc"))  # modules, and what the kernel says
TAKES = Claim("job", (0, 1), RUN)
EXPECTED = (CheckpointError, OSError)


def looks(ckpt, memory):
    store = Store(LocalStorage(ckpt))
    store.describe_refused()
    list_checkpoints(store)
    dense_files.list_iterations(ckpt)
    dense_files.latest_iteration(ckpt)


def takes(ckpt, memory):
    run = begin_run(LocalStorage(ckpt), str(ckpt))
    place = LocalStorage(ckpt, lock_timeout_s=0.0, claim=TAKES)
    place.lock()
    record_run(place, run)


def publishes(ckpt, memory):
    store = Store(LocalStorage(ckpt, lock_timeout_s=0.0, claim=TAKES))
    store.take()
    store.remove_unpublished()
    saved(store, 500)


def retains(ckpt, memory):
    store = Store(LocalStorage(ckpt, lock_timeout_s=0.0, claim=TAKES))
    for iteration in store.iterations()[:-1]:
        each(lambda iteration=iteration: store.remove(iteration))
    each(lambda: store.hide(max(store.iterations(), default=0)))


def saves_densely(ckpt, memory):
    fence = Fence(ckpt, TAKES, 0.0)
    for iteration in (100, 500):
        staging = dense_files.begin_save(ckpt, iteration, fence)
        (staging / "part").write_text("x")
        dense_files.publish_save(ckpt, iteration, {"part": dense_files.describe_file(staging / "part")}, fence)
    for iteration in dense_files.list_iterations(ckpt)[:-1]:
        each(lambda iteration=iteration: dense_files.remove_checkpoint(ckpt, iteration))


def uses_memory(ckpt, memory):
    place = memory_storage(memory, str(ckpt), RUN, claim=TAKES)
    store = Store(place, allows_slack=True)
    list_checkpoints(store)
    store.take()
    record_run(place, Run(RUN, str(ckpt), 0.0))
    record_lease(place, 1.0)
    store.remove_unpublished()
    saved(store, 500)
    store.remove_all()


def cleans(ckpt, memory):
    for one in leftovers(memory):
        each(functools.partial(remove_leftover, one))


def inspects(ckpt, memory):
    for named in ([], ["--iteration", "10"], ["--iteration", "100"]):
        each(lambda named=named: summary.main([str(ckpt), "--json", *named]))


def verifies(ckpt, memory):
    verify.main([str(ckpt), "--all", "--json"])


def logs(ckpt, memory):
    log = EventLog(ckpt)
    log.newest("iteration")
    log.write("start", iteration=0)
    log.close()
    with contextlib.suppress(ValueError):  # it is no log of events, as programs report
        each(lambda: read_events(ckpt))


def renews(ckpt, memory):
    for run in memory.glob("moc-*/*"):
        each(functools.partial(renew_lease, run))


# what a run removes from a directory changes what the next operation finds, so the order is part of the case
OPERATIONS = [
    looks,
    logs,
    renews,
    inspects,
    verifies,
    takes,
    publishes,
    retains,
    uses_memory,
    saves_densely,
    cleans,
    looks,
]


def each(action):
    """Does one of several things, of which any may be refused."""
    try:
        action()
    except (*EXPECTED, SystemExit):
        pass


@pytest.fixture(scope="module")
def pristine():
    """A world with valid checkpoints of both kinds, and a run's memory."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as directory:
        world = Path(directory) / "pristine"
        ckpt = Path(directory) / "world" / "ckpt"  # the memory's name depends on its path
        for place in (LocalStorage(ckpt, claim=TAKES), memory_storage(directory, str(ckpt), RUN, claim=TAKES)):
            saved(Store(place, allows_slack=True), 10, 20)
            record_run(place, Run(RUN, str(ckpt), 0.0))
            record_lease(place, 1.0)
        checkpoints.save(ckpt, 100)
        ckpt.rename(world_of(world))
        (world / "memory").mkdir()
        user_directory(directory).rename(world / "memory" / user_directory(world / "memory").name)
        shutil.rmtree(Path(directory) / "world")
        add_victims(world)
        yield world


def world_of(world):
    world.mkdir()
    return world / "ckpt"


@contextlib.contextmanager
def copy_of(pristine):
    world = pristine.parent / "world"
    shutil.copytree(pristine, world)
    try:
        yield world, world / "ckpt", next(path for path in (world / "memory").glob("moc-*/*"))
    finally:
        shutil.rmtree(world)


def used(operation, world):
    """What an operation uses, and the traceback of an error that is not expected."""
    uses, problem = Uses(), ""
    with uses.recorded():
        try:
            operation(world / "ckpt", world / "memory")
        except (*EXPECTED, SystemExit):
            pass
        except Exception:
            problem = traceback.format_exc()
    return uses.found, problem


@pytest.fixture(scope="module")
def known(pristine):
    """By operation, what it uses with valid directories."""
    found = {}
    for _ in range(2):  # the first imports modules
        with copy_of(pristine) as (world, *_):
            for operation in OPERATIONS:
                found.setdefault(operation, set()).update(used(operation, world)[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_operation_leaves_directory(pristine, known, batch, capsys):
    problems = []
    for number in range(batch * DIRECTORIES, (batch + 1) * DIRECTORIES):
        rng = random.Random(SEED * 1_000_003 + number)
        with copy_of(pristine) as (world, ckpt, run):
            told = make_hostile(rng, world, (ckpt, run))
            before = state_of(world, ("ckpt", "memory"))
            for operation in OPERATIONS:
                found, problem = used(operation, world)
                left = outside(found, (ckpt, run, *BESIDE), known[operation])
                if left or problem:
                    problems.append(f"{number} {told} {operation.__name__}: {left} {problem}")
            if state_of(world, ("ckpt", "memory")) != before:
                problems.append(f"{number} {told}: files outside have changed")
        capsys.readouterr()
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problem[:2000] for problem in problems[:20])


def test_record_finds_uses_outside(tmp_path):
    """The fuzzer itself: a use of each kind outside is found."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "victims").mkdir()
    (tmp_path / "ckpt" / "link").symlink_to("../victims")
    uses = Uses()
    with uses.recorded():
        (tmp_path / "ckpt" / "link" / "new").write_text("x")
        descriptor = os.open(tmp_path / "ckpt" / "link", os.O_RDONLY)
        os.mkdir("made", dir_fd=descriptor)
        os.rename("made", "moved", src_dir_fd=descriptor, dst_dir_fd=descriptor)
        os.rmdir("moved", dir_fd=descriptor)
        os.link("new", "linked", src_dir_fd=descriptor, dst_dir_fd=descriptor)
        os.symlink("new", "soft", dir_fd=descriptor)
        os.unlink("soft", dir_fd=descriptor)
        os.close(descriptor)
        shutil.rmtree(tmp_path / "victims")
        (tmp_path / "ckpt" / "inside").write_text("x")
    kinds = {one.partition(" ")[0] for one in outside(uses.found, (tmp_path / "ckpt",), set())}
    assert kinds == {"read", "write", "mkdir", "rename", "rmdir", "link", "symlink", "unlink"}
