"""A checkpoint directory from a stranger can neither delete nor overwrite files elsewhere."""

import json
import os

import pytest

from moc.recovery.inventory import look
from moc.store.errors import CheckpointError
from moc.store.fence import NAME as FENCE
from moc.store.runs import NAME as RUN
from moc.store.runs import begin_run, run_of
from moc.store.storage import LocalPlace
from moc.store.store import Store
from tests.unit.store.test_store import saved


@pytest.fixture
def place(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("precious")
    return LocalPlace(tmp_path / "place")


@pytest.mark.parametrize("run", ["x/../../../../elsewhere", "..", "/etc", "0123456789ABCDEF", "0" * 15, "", 7, None])
def test_a_run_cannot_name_a_path(place, run):
    place.write(RUN, [json.dumps({"run": run, "address": "/data", "made": 1.0}).encode()])
    with pytest.raises(CheckpointError):
        run_of(place)


def test_a_changed_name_of_a_run_is_refused(place):
    run = begin_run(place, "/data")
    text = place.read(RUN)
    place.write(RUN, [text.replace(run.run.encode(), b"0123456789abcdef")])
    with pytest.raises(CheckpointError):
        run_of(place)


def test_a_run_of_an_earlier_version_is_read(place):
    place.write(RUN, [b'{"run": "0123456789abcdef", "address": "/data", "made": 1.5}'])
    assert run_of(place).run == "0123456789abcdef"


def test_a_checkpoint_that_is_a_link_is_ignored_and_kept(place):
    store = Store(place)
    saved(store, 10)
    os.symlink("../victim", place.root / "iter_0000100")
    store.clear_unpublished()
    summaries, problems = look(store)
    assert [one.iteration for one in summaries] == [10] and len(problems) == 1
    store.remove(10)
    with pytest.raises(OSError):
        saved(store, 100)
    assert (place.root.parent / "victim" / "precious").read_text() == "precious"
    assert sorted(os.listdir(place.root.parent / "victim")) == ["precious"]


def test_a_link_in_a_checkpoint_is_removed_and_its_target_is_not(place):
    store = Store(place)
    place.write("iter_0000100/rank_00000.safetensors", [b"x"])
    os.symlink("../../victim", place.root / "iter_0000100" / "more")
    store.clear_unpublished()
    assert place.names() == [] and (place.root.parent / "victim" / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", [RUN, FENCE, "iter_0000010/manifest.json"])
def test_a_special_file_does_not_stop_a_reader(place, name):
    store = Store(place)
    saved(store, 10)
    (place.root / name).unlink(missing_ok=True)
    os.mkfifo(place.root / name)
    if name == RUN:
        with pytest.raises(CheckpointError):
            run_of(place)
    else:
        assert look(store)[1] or name == FENCE
