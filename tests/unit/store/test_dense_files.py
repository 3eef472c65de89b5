"""Directories of checkpoints: whole or not there, wherever a kill cuts a save in two."""

import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from moc.errors import codes_in
from moc.files.safe_directory import SafeDirectory
from moc.store import dense_files as files
from moc.store.errors import SupersededError
from moc.store.ownership import Claim, Fence
from tests.cases import each_row
from tests.errors import raises
from tests.unit.store.turns import Actor


@pytest.fixture
def memory():
    """A directory in memory where possible: hundreds of saves are synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory)


def save(root, iteration, content, **options):
    staging = files.begin_save(root, iteration)
    (staging / "optimizer").mkdir()
    (staging / "optimizer" / "a").write_text(content)
    entries = {"optimizer/a": files.describe_file(staging / "optimizer" / "a")}
    return files.publish_save(root, iteration, entries, **options)


def newest(root):
    """Iteration and content of the newest checkpoint, verified."""
    iteration = files.latest_iteration(root)
    directory = files.checkpoint_path(root, iteration)
    assert files.find_damage(directory, files.read_manifest(directory)["files"]) is None
    return iteration, (directory / "optimizer" / "a").read_text()


def test_saved_checkpoint_is_found_complete(tmp_path):
    assert files.latest_iteration(tmp_path) is None
    assert save(tmp_path, 3, "three").name == "iter_0000003"
    save(tmp_path, 12, "twelve")
    assert newest(tmp_path) == (12, "twelve")
    assert files.list_iterations(tmp_path) == [3, 12]
    files.remove_checkpoint(tmp_path, 3)
    assert files.list_iterations(tmp_path) == [12]


def not_removable(path):
    """Makes a directory with more levels than are deleted."""
    path.joinpath(*["level"] * 40).mkdir(parents=True)


def test_saves_do_not_depend_on_removals(tmp_path, capsys):
    save(tmp_path, 1, "one")
    not_removable(tmp_path / "iter_0000001")
    not_removable(tmp_path / ".iter_0000007.killed-0-1.incomplete")
    for iteration in (2, 3):
        save(tmp_path, iteration, f"state {iteration}", retain_interval=10)
        assert newest(tmp_path) == (iteration, f"state {iteration}") and files.list_iterations(tmp_path) == [iteration]
    assert set(codes_in(capsys.readouterr().err)) == {"storage-unwritable"}
    not_removable(files.staging_path(tmp_path, 4))
    with pytest.raises(OSError, match="levels"):
        save(tmp_path, 4, "four")


def test_each_directory_is_synced_once(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    staging = files.begin_save(tmp_path, 1)
    (staging / "a" / "b").mkdir(parents=True)
    entries = {}
    for number in range(20):
        (staging / "a" / "b" / str(number)).write_text("x")
        entries[f"a/b/{number}"] = files.describe_file(staging / "a" / "b" / str(number))
    synced.clear()
    final = files.publish_save(tmp_path, 1, entries)
    assert {synced.count(path.stat().st_ino) for path in (final / "a", final / "a" / "b")} == {1}
    assert synced.count(final.stat().st_ino) == 2  # for the manifest, and for the others


def test_later_saves_do_not_list_files_of_checkpoints(tmp_path, monkeypatch):
    listed, list_names = [], SafeDirectory.list_names

    def list_and_record(directory, path=""):
        listed.append(path)
        return list_names(directory, path)

    monkeypatch.setattr(SafeDirectory, "list_names", list_and_record)
    fence = Fence(tmp_path, OLD)
    for iteration in (1, 2, 3):
        files.begin_save(tmp_path, iteration, fence)
        files.publish_save(tmp_path, iteration, {}, fence)
    assert not [path for path in listed if path]
    Fence(tmp_path, NEW).take()
    assert [path for path in listed if path] == ["iter_0000001", "iter_0000002", "iter_0000003"]
    with raises("directory-taken-over", "generation 0.4"):
        files.begin_save(tmp_path, 4, fence)


@each_row("target", ["nothing", "iter_0000003", "../outside"])
def test_link_named_like_checkpoint_does_not_prevent_save(tmp_path, target):
    root = tmp_path / "checkpoints"
    (tmp_path / "outside").mkdir()
    (root / ".iter_0000003.replaced").mkdir(parents=True)
    (root / "iter_0000003").symlink_to(target)
    save(root, 3, "three")
    assert newest(root) == (3, "three") and not (root / "iter_0000003").is_symlink()
    assert files.list_iterations(root) == [3] and not list((tmp_path / "outside").iterdir())


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours sees it."""


def die_at(monkeypatch, step):
    """Lets the step-th change of the file system be the last one."""
    count = itertools.count()

    def mortal(function):
        def call(*args, **kwargs):
            if next(count) >= step:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"), (os, "mkdir")):
        monkeypatch.setattr(module, name, mortal(getattr(module, name)))


@each_row("again", [False, True], ids=["a new iteration", "the same iteration again"])
def test_kill_at_any_step_of_save_keeps_valid_checkpoint(again, memory):
    killed = completed = 0
    for step in range(40):
        root = memory / f"{again}, {step}"
        save(root, 1, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            die_at(monkeypatch, step)
            try:
                save(root, 1 if again else 2, "new")
                completed += 1
            except Killed:
                killed += 1
        files.restore_replaced(root)  # as the next start does
        assert newest(root) in ((1, "old"), (1, "new") if again else (2, "new"))
        save(root, 3, "later")
        assert newest(root) == (3, "later")
        assert not list(root.glob(".iter_*"))
    assert killed > 5 and completed > 5


def test_damage_is_named(tmp_path):
    directory = save(tmp_path, 1, "content")
    listed, path = files.read_manifest(directory)["files"], directory / "optimizer" / "a"
    path.write_text("cOntent")
    assert "optimizer/a" in files.find_damage(directory, listed)
    path.write_text("cont")
    assert re.search(r"optimizer/a .*\b4\b.*\b7\b", files.find_damage(directory, listed))
    path.unlink()
    assert "missing" in files.find_damage(directory, listed)


@each_row(
    ("text", "code"),
    [
        ("", "checkpoint-damaged"),
        ("{", "checkpoint-damaged"),
        ("[]", "checkpoint-damaged"),
        ("{}", "checkpoint-format-unknown"),
        ('{"format": "something else"}', "checkpoint-format-unknown"),
    ],
)
def test_damaged_manifest_is_refused(text, code, tmp_path):
    directory = save(tmp_path, 1, "content")
    (directory / "manifest.json").write_text(text)
    with raises(code, "manifest.json"):
        files.read_manifest(directory)


def test_damaged_tracker_is_refused(tmp_path):
    (tmp_path / files.TRACKER_FILE).write_text("latest")
    with raises("tracker-invalid", files.TRACKER_FILE, "'latest'"):
        files.latest_iteration(tmp_path)


def test_release_has_no_iteration(tmp_path):
    (tmp_path / files.TRACKER_FILE).write_text("release\n")
    assert files.latest_iteration(tmp_path) is None


OLD, NEW = (Claim("launch", (0, generation)) for generation in (3, 4))


def saves(root, claim, iteration, content):
    """What the first worker of a generation does, as one action."""
    fence = Fence(root, claim)

    def action():
        staging = files.begin_save(root, iteration, fence)
        (staging / "optimizer").mkdir()
        (staging / "optimizer" / "a").write_text(content)
        entries = {"optimizer/a": files.describe_file(staging / "optimizer" / "a")}
        return files.publish_save(root, iteration, entries, fence)

    return action


@each_row("iteration", [1, 2], ids=["the same iteration again", "a new iteration"])
def test_superseded_generation_commits_nothing(iteration, memory):
    done = refused = 0
    for step in itertools.count():
        root = memory / f"{iteration}, {step}"
        saves(root, OLD, 1, "first")()
        old, begins = Actor(saves(root, OLD, iteration, "old")), Fence(root, NEW)
        old.step(step)
        over = old.over
        begins.take()
        files.restore_replaced(root)  # as the next start does
        before = newest(root)
        old.step(None)
        files.restore_replaced(root)
        assert newest(root) == before
        if old.error is None:
            done += 1
        else:
            assert isinstance(old.error, (SupersededError, FileNotFoundError)), old.error
            refused += 1
        saves(root, NEW, iteration, "new")()
        assert newest(root) == (iteration, "new")
        assert not list(root.glob(".iter_*"))
        with raises("directory-taken-over", "generation 0.4"):
            saves(root, OLD, 5, "old")()
        assert json.loads((files.checkpoint_path(root, iteration) / files.MANIFEST).read_text())["term"] == [0, 4]
        if over:
            break
    assert refused > 10 and done > 0
