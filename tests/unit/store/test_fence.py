"""Who was superseded publishes and removes nothing, wherever it stood still meanwhile."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moc.store import ownership as fences
from moc.store.errors import CheckpointError, SupersededError
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.cases import each_row
from tests.errors import raises
from tests.shared import ALL
from tests.unit.store.test_store import assert_whole, file_parts, publish, saved, written
from tests.unit.store.turns import Actor, in_turns

ROOT = Path(__file__).parents[3]
OLD, NEW, NEWEST = (Claim("launch", term) for term in ((0, 7), (0, 8), (1, 0)))


def store_of(root, claim, lock_timeout_s=10.0):
    return Store(LocalStorage(root, lock_timeout_s, claim=claim))


@pytest.fixture(scope="module")
def pristine():
    """A place that the old term has, with two checkpoints, and the files of a third one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        root = Path(directory) / "pristine"
        store = store_of(root, OLD)
        saved(store, 10, 20)
        written(store, 30)
        yield root


@contextlib.contextmanager
def copy_of(pristine):
    """A copy that may be changed."""
    root = Path(tempfile.mkdtemp(dir=pristine.parent))
    try:
        shutil.copytree(pristine, root / "place")
        yield root / "place"
    finally:
        shutil.rmtree(root)


def old_term(root, what, begun=False):
    """What a worker of the old term has under way; the first of it, or when the term has begun."""
    store = store_of(root, OLD)
    if begun:
        store.take()
    actions = {
        "publishes": lambda: publish(store, 30),
        "saves": lambda: (written(store, 30), publish(store, 30)),
        "writes over": lambda: written(store, 30),
        "removes": lambda: store.remove(20),
        "sets aside": lambda: store.hide(20),
        "tidies up": lambda: (store.hide(20), store.remove_unpublished()),
    }
    return actions[what]


def new_term(root, claim=NEW):
    """Begins, looks at what is there, and takes anew all that is not."""

    def action():
        store = store_of(root, claim)
        store.take()
        seen = store.iterations()
        store.remove_unpublished()
        for iteration in {10, 20, 30} - set(seen):
            saved(store, iteration)
        return seen

    return action


def assert_kept(root, old, new):
    """Nothing has changed since the new term looked, but by itself; and what it saved is whole."""
    assert new.error is None, new.error
    assert old.error is None or isinstance(old.error, (CheckpointError, FileNotFoundError)), old.error
    store = store_of(root, None)
    assert store.iterations() == [10, 20, 30]
    for iteration in (10, 20, 30):
        assert_whole(store, iteration)
        assert store.read_manifest(iteration).term == ((0, 7) if iteration in new.result else (0, 8))


WHAT = ["publishes", "saves", "writes over", "removes", "sets aside", "tidies up"]


def steps_of(pristine, *actions):
    """How many steps each takes, one after the other."""
    with copy_of(pristine) as root:
        actors = in_turns([action(root) for action in actions], [])
        return [actor.steps for actor in actors]


@each_row("what", WHAT)
def test_old_generation_paused_anywhere_keeps_consistent_state(pristine, what):
    many = steps_of(pristine, lambda root: old_term(root, what))[0]
    ends = set()
    for done in range(many + 1):
        with copy_of(pristine) as root:
            old, new = Actor(old_term(root, what)), Actor(new_term(root))
            old.step(done)
            new.step(None)
            old.step(None)
            assert_kept(root, old, new)
            ends.add(type(old.error))
    assert ends >= {type(None), SupersededError}


@each_row("what", ["publishes", "removes"])
def test_both_generations_paused_anywhere_keep_consistency(pristine, what):
    old_steps, begins = steps_of(
        pristine, lambda root: old_term(root, what, begun=True), lambda root: store_of(root, NEW).take
    )
    for done, meanwhile in itertools.product(range(old_steps), range(begins)):
        if not ALL and (done + meanwhile) % 3:
            continue
        with copy_of(pristine) as root:
            old, new = Actor(old_term(root, what, begun=True)), Actor(new_term(root))
            old.step(done)
            new.step(meanwhile)
            old.step(None)
            new.step(None)
            assert_kept(root, old, new)


@given(what=st.sampled_from(WHAT), order=st.lists(st.sampled_from([0, 1, 1]), max_size=80))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_interleaving_of_generations_keeps_consistent_state(pristine, what, order):
    with copy_of(pristine) as root:
        old, new = in_turns([old_term(root, what), new_term(root)], order)
        assert_kept(root, old, new)


@given(order=st.lists(st.sampled_from([0, 1, 2]), max_size=120))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_newest_of_three_concurrent_epochs_owns(pristine, order):
    def begins(root, claim):
        return lambda: (store := store_of(root, claim), store.take(), saved(store, 30))

    with copy_of(pristine) as root:
        actions = [lambda: publish(store_of(root, OLD), 30), begins(root, NEW), begins(root, NEWEST)]
        old, new, newest = in_turns(actions, order)
        assert newest.error is None
        assert all(isinstance(one.error, (SupersededError, type(None))) for one in (old, new))
        assert fences.Fence(root, NEWEST).read().claim == NEWEST
        assert store_of(root, None).read_manifest(30).term == (1, 0)
        with raises("directory-taken-over", "generation 1.0", "generation 0.8"):
            publish(store_of(root, NEW), 30)


def test_file_overwritten_before_epoch_is_not_committed(pristine):
    with copy_of(pristine) as root:
        new = store_of(root, NEW)
        written(new, 30)  # by workers that do not wait for the one who begins the term
        parts, _ = file_parts(33, 1)
        store_of(root, OLD).write_file(30, 1, parts)
        with raises("part-overwritten", "iter_0000030/rank_00001.safetensors"):
            publish(new, 30)


STALLS = """
import os, signal, sys
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.unit.store.test_store import publish
rename = os.rename
def stopped(source, target, **directories):
    if target == "manifest.json":
        os.kill(os.getpid(), signal.SIGSTOP)
    rename(source, target, **directories)
os.rename = stopped
publish(Store(LocalStorage(sys.argv[1], claim=Claim("launch", (0, 7)))), 30)
"""


def test_process_stopped_before_rename_commits_nothing(pristine):
    with copy_of(pristine) as root:
        command = [sys.executable, "-c", STALLS, str(root)]
        old = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            _, status = os.waitpid(old.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            new = store_of(root, NEW, lock_timeout_s=0.0)
            new.take()  # at once, although the process that has the place lives
            assert new.iterations() == [10, 20]
            os.kill(old.pid, signal.SIGCONT)
            _, told = old.communicate()
            assert old.returncode == 1 and "SupersededError: generation 0.8" in told
        finally:
            old.kill()
            old.wait()
        assert new.iterations() == [10, 20]
        assert not [path for path in root.rglob("*.tmp")]
        publish_anew = store_of(root, NEW)
        saved(publish_anew, 30)
        assert_whole(publish_anew, 30)


LIVES = """
import sys, time
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
place = LocalStorage(sys.argv[1], claim=Claim(sys.argv[2], (0, int(sys.argv[3]))))
place.lock()
print("has it", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def lives(tmp_path):
    """Starts a process that has a place for a launch."""
    started = []

    def start(job, generation=0):
        command = [sys.executable, "-c", LIVES, str(tmp_path / "place"), job, str(generation)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "has it\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(process):
    process.kill()
    process.wait()


def test_other_launch_is_refused_while_owner_lives(tmp_path, lives):
    root, first = tmp_path / "place", lives("first", 3)
    with raises("directory-in-use", str(root), str(first.pid), "--ckpt-dir"):
        LocalStorage(root, lock_timeout_s=0.0, claim=Claim("second", (0, 9))).lock()
    os.kill(first.pid, signal.SIGSTOP)  # on a machine that was cut off, say: its lock stays
    newer = LocalStorage(root, lock_timeout_s=0.0, claim=Claim("first", (0, 4)))
    newer.lock()
    with raises("directory-taken-over", "generation 0.3"):
        LocalStorage(root, lock_timeout_s=0.0, claim=Claim("first", (0, 3))).lock()
    newer.check_owner()


def test_directory_of_live_owner_is_refused_without_change(tmp_path, lives):
    root, first = tmp_path / "place", lives("first")
    files = sorted(path.name for path in root.iterdir())
    with raises("directory-in-use", str(root), str(first.pid), "--ckpt-dir"):
        fences.refuse_owned(root, 0.0)
    threading.Timer(0.2, end, [first]).start()
    fences.refuse_owned(root, 600.0)  # the owner exits meanwhile
    assert sorted(path.name for path in root.iterdir()) == files
    fences.refuse_owned(tmp_path / "missing", 0.0)
    assert not (tmp_path / "missing").exists()


def test_superseded_launch_does_not_retake_ownership(tmp_path, lives):
    root, first = tmp_path / "place", lives("first")
    end(first)
    end(lives("second"))
    stale = LocalStorage(root, lock_timeout_s=0.0, claim=Claim("first", (0, 0)))
    with raises("directory-taken-over", str(root), "--ckpt-dir"):
        stale.write("iter_0000001/manifest.json", [b"{}"])
    with raises("directory-taken-over", "--ckpt-dir"):
        LocalStorage(root, lock_timeout_s=0.0, claim=Claim("first", (0, 1))).lock()
    LocalStorage(root, lock_timeout_s=0.0, claim=Claim("third")).lock()
    assert stale.list_names() == [".fence", f".lock.{Claim('third').tag}", "iter_0000001"]
    assert stale.list_names("iter_0000001") == []


def test_planted_link_creates_no_file_elsewhere(tmp_path):
    root = tmp_path / "place"
    root.mkdir()
    (root / f".lock.{OLD.tag}").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=OLD.tag):
        LocalStorage(root, lock_timeout_s=0.0, claim=OLD).lock()
    assert not (tmp_path / "outside").exists()


def test_manifest_names_run_job_and_generation(tmp_path):
    store = Store(LocalStorage(tmp_path, claim=Claim("a-launch", (2, 5), "the-run")))
    saved(store, 10)
    manifest = store.read_manifest(10)
    assert (manifest.run, manifest.job, manifest.term) == ("the-run", "a-launch", (2, 5))
    assert json.loads((tmp_path / ".fence").read_text())["job"] == "a-launch"
    plain = Store(LocalStorage(tmp_path / "plain"))
    saved(plain, 10)
    text = (tmp_path / "plain" / checkpoint_name(10) / "manifest.json").read_text()
    assert not {"run", "job", "term"} & set(json.loads(text))  # as it always was, and is read
    assert (plain.read_manifest(10).run, plain.read_manifest(10).job, plain.read_manifest(10).term) == ("", "", (0, 0))


def test_files_of_two_launches_never_form_one_checkpoint(tmp_path):
    first, second = (store_of(tmp_path, Claim(job)) for job in ("first", "second"))
    second.take()
    for rank in (0, 1):
        parts, part = file_parts(30, rank)
        second.write_file(30, rank, parts)
        if rank == 1:
            second.store_report(30, rank, part)
    (tmp_path / checkpoint_name(30) / f".rank_00000.{Claim('first').tag}.json").write_text(
        file_parts(30, 0)[1].to_json()
    )
    assert not second.is_publishable(30, [0, 1]) and not first.is_publishable(30, [0, 1])
    with raises("report-unreadable", ".rank_00000.second-0-0.json"):
        second.read_reports(30, [0, 1])


def test_report_cached_by_writer_is_not_read_again(tmp_path):
    store = store_of(tmp_path, Claim("job"))
    store.take()
    parts, part = file_parts(30, 0)
    store.write_file(30, 0, parts)
    part = store.store_report(30, 0, part)
    assert store.read_reports(30, [0]) == [part] and part.job == "job"
    (tmp_path / checkpoint_name(30) / f".rank_00000.{Claim('job').tag}.json").write_text("?")
    assert store.read_reports(30, [0], {0: part}) == [part]
