"""A checkpoint directory from a stranger can neither delete nor overwrite files elsewhere."""

import contextlib
import json
import os
import shutil

import pytest

from moc.cli_output import refused
from moc.files.safe_directory import SafeDirectory
from moc.recovery.inventory import list_checkpoints
from moc.store import dense_files
from moc.store.errors import CheckpointError
from moc.store.ownership import NAME as FENCE
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import RUN_FILE as RUN
from moc.store.store import Store, begin_run, find_run
from tests.cases import each_row
from tests.unit.store.test_store import saved


@pytest.fixture
def place(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("precious")
    return LocalStorage(tmp_path / "place")


@each_row("run", ["x/../../../../elsewhere", "..", "/etc", "0123456789ABCDEF", "0" * 15, "", 7, None])
def test_run_record_with_path_is_ignored(place, run):
    place.write(RUN, [json.dumps({"run": run, "address": "/data", "made": 1.0}).encode()])
    assert find_run(place) is None


def test_changed_run_name_is_refused(place):
    run = begin_run(place, "/data")
    text = place.read(RUN)
    place.write(RUN, [text.replace(run.run.encode(), b"0123456789abcdef")])
    assert find_run(place) is None


def test_run_of_earlier_version_is_read(place):
    place.write(RUN, [b'{"run": "0123456789abcdef", "address": "/data", "made": 1.5}'])
    assert find_run(place).run == "0123456789abcdef"


def test_linked_checkpoint_is_ignored_and_kept(place):
    store = Store(place)
    saved(store, 10)
    os.symlink("../victim", place.root / "iter_0000100")
    store.remove_unpublished()
    summaries, problems = list_checkpoints(store)
    assert [one.iteration for one in summaries] == [10] and len(problems) == 1
    store.remove(10)
    with pytest.raises(OSError):
        saved(store, 100)
    assert (place.root.parent / "victim" / "precious").read_text() == "precious"
    assert sorted(os.listdir(place.root.parent / "victim")) == ["precious"]


def test_link_in_checkpoint_is_removed_without_its_target(place):
    store = Store(place)
    place.write("iter_0000100/rank_00000.safetensors", [b"x"])
    os.symlink("../../victim", place.root / "iter_0000100" / "more")
    store.remove_unpublished()
    assert place.list_names() == [] and (place.root.parent / "victim" / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", [RUN, FENCE, "iter_0000010/manifest.json"])
def test_special_file_does_not_block_reader(place, name):
    store = Store(place)
    saved(store, 10)
    (place.root / name).unlink(missing_ok=True)
    os.mkfifo(place.root / name)
    assert find_run(place) is None
    assert list_checkpoints(store)[1] or name != "iter_0000010/manifest.json"


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("../victim/precious"), os.mkfifo, os.mkdir])
def test_non_regular_tracker_file_is_refused(place, make):
    place.root.mkdir()
    make(place.root / dense_files.TRACKER_FILE)
    with pytest.raises(CheckpointError):
        dense_files.latest_iteration(place.root)


def test_concurrent_removal_leaves_nothing(place, monkeypatch):
    store = Store(place)
    saved(store, 10)

    opened = SafeDirectory.directory

    @contextlib.contextmanager
    def removed_elsewhere(self, path="", **how):
        with opened(self, path, **how) as descriptor:
            if path == "iter_0000010" and not how:  # the directory to remove, and not one to write into
                shutil.rmtree(place.root / path)
            yield descriptor

    monkeypatch.setattr(SafeDirectory, "directory", removed_elsewhere)
    store.remove(10)
    monkeypatch.undo()
    assert place.list_names() == []


def test_link_to_missing_directory_is_named(place):
    os.symlink("nowhere", place.root)
    with pytest.raises(NotADirectoryError, match="place"):
        LocalStorage(place.root, claim=Claim("job")).lock()


def test_unfinished_file_of_older_epoch_is_swept(place):
    place.write("iter_0000010/part", [b"x"])
    names = [".manifest.json.job-0-1.0123456789abcdef.tmp", ".iter_0000020.job-0-1.incomplete.given-up"]
    (place.root / "iter_0000010" / names[0]).write_bytes(b"")
    (place.root / names[1]).mkdir()
    LocalStorage(place.root, claim=Claim("job", (0, 2))).lock()
    assert place.list_names("iter_0000010") == ["part"] and names[1] not in place.list_names()


def test_error_message_contains_no_terminal_commands(capsys):
    assert refused("program", CheckpointError("\x1b[2J\x9b31m is damaged")) == 1
    assert "\x1b" not in (said := capsys.readouterr().err) and "\x9b" not in said
