"""What a run has left on a node is given back as a whole; nothing of others goes, and nothing that is in use."""

import os
import shutil

import pytest

from moc.store.buffers import Buffer
from moc.store.claims import Claim
from moc.store.leftovers import Leftover, give_back, leftover, leftovers, remove_leftover
from moc.store.runs import Run, record_run
from moc.store.storage import LocalPlace
from moc.store.store import Store
from moc.store.tiers import SOCKETS, memory_home, memory_of_run, memory_place
from tests.errors import raises
from tests.unit.store.test_store import saved

JOB = "/data/ckpt"


@pytest.fixture
def places(tmp_path):
    """Memory of two nodes for one run, and of one of them for another run; with all that jobs leave there."""
    made = {}
    for run, node in (
        ("aaaaaaaaaaaaaaaa", "1"),
        ("aaaaaaaaaaaaaaaa", "10"),
        ("bbbbbbbbbbbbbbbb", "1"),
        ("aaaaaaaaaaaaaaaa", None),
    ):
        place = memory_place(tmp_path, JOB, run, node)
        saved(Store(LocalPlace(place.root, claim=Claim("ended", (0, 3)))), 10, 20)
        saved(Store(LocalPlace(place.root / "of_0")), 20)  # the copy that it keeps of another node's
        record_run(place, Run(run, JOB, 0.0))
        made[run, node] = place.root
    return made


def test_a_node_gives_back_what_a_run_has_left_there(places, tmp_path):
    give_back(memory_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")
    assert [key for key, root in places.items() if root.exists()] == [
        ("aaaaaaaaaaaaaaaa", "10"),
        ("bbbbbbbbbbbbbbbb", "1"),
    ]
    give_back(memory_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")  # nothing is there


def test_what_is_in_use_stays(places, tmp_path):
    owner = LocalPlace(places["aaaaaaaaaaaaaaaa", "1"], claim=Claim("next", (0, 0), "aaaaaaaaaaaaaaaa"))
    owner.lock()
    give_back(memory_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")
    assert Store(owner).iterations() == [10, 20]


def test_nothing_else_is_removed(places, tmp_path):
    for other in (tmp_path / "others", memory_home(tmp_path), tmp_path):
        other.mkdir(exist_ok=True)
        with raises("memory-of-no-run", str(other)):
            give_back(other, "1")
        assert other.exists()


def test_what_jobs_have_left_is_listed(places, tmp_path):
    (memory_home(tmp_path) / "notes").write_text("no directory")
    (memory_home(tmp_path) / SOCKETS / "of a job").mkdir(parents=True)
    found = {one.path: one for one in leftovers(tmp_path)}
    assert list(found) == sorted(places.values())
    for (run, _), path in places.items():
        assert (found[path].run, found[path].address, found[path].newest, found[path].used_by) == (run, JOB, 20, ())
    (memory_home(tmp_path) / "empty").mkdir()
    assert leftover(memory_home(tmp_path) / "empty") == Leftover(
        memory_home(tmp_path) / "empty", None, None, None, 0, ()
    )


def test_a_file_with_several_names_counts_once(tmp_path):
    (tmp_path / "slot").write_bytes(bytes(10_000))
    taken = (tmp_path / "slot").stat().st_blocks * 512
    os.link(tmp_path / "slot", tmp_path / "rank_00000.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "slot")
    assert leftover(tmp_path).bytes == taken >= 10_000


def test_what_a_process_uses_is_not_removed(places):
    path = places["aaaaaaaaaaaaaaaa", "1"]
    owner = LocalPlace(path, claim=Claim("next", (0, 0), "aaaaaaaaaaaaaaaa"))
    owner.lock()
    assert leftover(path).used_by == (os.getpid(),)
    with raises("memory-in-use", str(path), str(os.getpid())):
        remove_leftover(leftover(path))
    other = places["aaaaaaaaaaaaaaaa", "10"]
    buffer = Buffer(4096, other / "slots" / "rank_00000.0")
    assert leftover(other).used_by == (os.getpid(),)  # nobody has the place, but somebody its memory
    buffer.close()
    remove_leftover(leftover(other), ended=True)
    assert not other.exists() and path.exists()


def test_where_there_is_no_memory_none_is_made(tmp_path):
    run = memory_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa")
    shutil.rmtree(run.parent)
    give_back(run, "1")
    assert not run.parent.exists()
