"""Memory of this node: in a directory that nobody else can read or plant."""

import itertools
import os
import re
import shutil

import pytest

from moc.store.buffers import HostBuffer
from moc.store.errors import CheckpointError
from moc.store.host_memory import (
    SOCKETS_DIRECTORY,
    Leftover,
    give_back,
    leftover,
    leftovers,
    memory_path_of_run,
    memory_paths_of_other_runs,
    memory_storage,
    remove_leftover,
    user_directories,
    user_directory,
)
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Run, Store, begin_run, find_run, record_run
from tests.cases import each_row
from tests.errors import raises
from tests.host_memory import find_memory_storage
from tests.unit.store.test_store import saved
from tests.unit.store.turns import in_turns


def home(tmp_path):
    return tmp_path / f"moc-{os.geteuid()}"


def test_jobs_have_separate_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = "/a/ckpt", "/b/ckpt", "s3://a/ckpt", "s3://b/ckpt"
    roots = {job: memory_storage(tmp_path, job, "run").root for job in jobs}
    assert len(set(roots.values())) == 4
    assert all(root.parent == home(tmp_path) and root.name.startswith("ckpt-") for root in roots.values())
    assert home(tmp_path).stat().st_mode & 0o777 == 0o700
    for same in ("/a/ckpt/", "/a/x/../ckpt"):
        assert memory_storage(tmp_path, same, "run").root == roots["/a/ckpt"]
    assert memory_storage(tmp_path, "ckpt", "run").root == memory_storage(tmp_path, str(tmp_path / "ckpt"), "run").root


def test_runs_at_one_address_have_separate_directories(tmp_path):
    storage = LocalStorage(tmp_path / "ckpt")
    first = begin_run(storage, "/data/ckpt")
    assert begin_run(storage, "/mnt/ckpt") == find_run(storage) == first  # as long as it is not removed
    shutil.rmtree(storage.root)
    second = begin_run(storage, "/data/ckpt")
    roots = [
        memory_storage(tmp_path, "/data/ckpt", run.run, node).root for run in (first, second) for node in (None, "1")
    ]
    assert len(set(roots)) == 4
    for root in roots:
        root.mkdir()
    memory_storage(tmp_path, "/other/ckpt", first.run).root.mkdir()
    assert memory_paths_of_other_runs(tmp_path, "/data/ckpt", second.run) == roots[:2]
    assert find_memory_storage(tmp_path, str(storage.root)).root.name.endswith(second.run)


def test_concurrent_run_starts_create_one_run(tmp_path):
    actions = [lambda: begin_run(LocalStorage(tmp_path / "ckpt"), "ckpt")] * 2
    orders = itertools.product([0, 1], repeat=6)
    for order in orders:
        one, other = in_turns(actions, order)
        assert one.result == other.result == find_run(LocalStorage(tmp_path / "ckpt")) is not None
        assert os.listdir(tmp_path / "ckpt") == [".run.json"]
        shutil.rmtree(tmp_path / "ckpt")


def refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(home(tmp_path)))} .*--ckpt-memory-dir"):
        memory_storage(tmp_path, "job", "run")


def with_mode(mode):
    def make(path):
        path.mkdir()
        path.chmod(mode)

    return make


def of_another_user(path):
    if os.geteuid():
        pytest.skip("only root can change the owner of a directory")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def link(path):
    (path.parent / "theirs").mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(path.parent / "theirs")


UNUSABLE = {f"mode {mode:o}": with_mode(mode) for mode in (0o770, 0o707, 0o710, 0o701, 0o755)} | {
    "a link": link,
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a file": lambda path: path.touch(mode=0o600),
    "of another user": of_another_user,
}


@each_row("make", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_name_is_replaced_and_printed(tmp_path, make, capsys):
    make(home(tmp_path))
    before = home(tmp_path).lstat()
    chosen = memory_storage(tmp_path, "job", "run").root.parent
    assert chosen == tmp_path / f"{home(tmp_path).name}-1" and chosen.stat().st_mode & 0o777 == 0o700
    assert str(chosen) in capsys.readouterr().err
    assert home(tmp_path).lstat() == before
    assert memory_storage(tmp_path, "job", "run").root.parent == chosen
    assert capsys.readouterr().err == ""  # once is enough


def test_only_first_local_rank_prints_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    home(tmp_path).touch()
    user_directory(tmp_path)
    assert capsys.readouterr().err == ""


def test_memory_directory_is_kept_when_first_name_is_free(tmp_path):
    home(tmp_path).touch()
    root = memory_storage(tmp_path, "job", "run").root
    home(tmp_path).unlink()
    assert memory_storage(tmp_path, "job", "run").root == root and not home(tmp_path).exists()


def test_first_own_directory_is_used_and_all_are_searched(tmp_path):
    names = [tmp_path / f"{home(tmp_path).name}{end}" for end in ("", "-1", "-2")]
    names[1].touch()
    for own in (names[0], names[2]):
        own.mkdir(mode=0o700)
    assert user_directory(tmp_path) == names[0] and user_directories(tmp_path) == [names[0], names[2]]
    other = memory_storage(tmp_path, "job", "other").root
    (names[2] / other.name).mkdir()
    assert memory_paths_of_other_runs(tmp_path, "job", "run") == [names[2] / other.name]


def test_job_is_refused_if_all_names_are_taken(tmp_path):
    for number in range(100):
        (tmp_path / f"{home(tmp_path).name}{f'-{number}' if number else ''}").touch()
    refused(tmp_path)
    (tmp_path / f"{home(tmp_path).name}-99").unlink()
    assert user_directory(tmp_path).name == f"{home(tmp_path).name}-99"


def test_concurrent_processes_find_same_directory(tmp_path):
    home(tmp_path).touch()
    orders = itertools.product([0, 1], repeat=6)
    for order in orders:
        one, other = in_turns([lambda: user_directory(tmp_path)] * 2, order)
        assert one.result == other.result
        assert sorted(os.listdir(tmp_path)) == [home(tmp_path).name, f"{home(tmp_path).name}-1"]
        one.result.rmdir()


def test_missing_memory_file_system_is_named(tmp_path):
    refused(tmp_path / "missing")


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
        place = memory_storage(tmp_path, JOB, run, node)
        saved(Store(LocalStorage(place.root, claim=Claim("ended", (0, 3)))), 10, 20)
        saved(Store(LocalStorage(place.root / "of_0")), 20)  # the copy that it keeps of another node's
        record_run(place, Run(run, JOB, 0.0))
        made[run, node] = place.root
    return made


def test_node_releases_memory_of_its_run(places, tmp_path):
    give_back(memory_path_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")
    assert [key for key, root in places.items() if root.exists()] == [
        ("aaaaaaaaaaaaaaaa", "10"),
        ("bbbbbbbbbbbbbbbb", "1"),
    ]
    give_back(memory_path_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")  # nothing is there


def test_memory_in_use_is_kept(places, tmp_path):
    owner = LocalStorage(places["aaaaaaaaaaaaaaaa", "1"], claim=Claim("next", (0, 0), "aaaaaaaaaaaaaaaa"))
    owner.lock()
    give_back(memory_path_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa"), "1")
    assert Store(owner).iterations() == [10, 20]


def test_other_directories_are_not_removed(places, tmp_path):
    for other in (tmp_path / "others", user_directory(tmp_path), tmp_path):
        other.mkdir(exist_ok=True)
        with raises("memory-of-no-run", str(other)):
            give_back(other, "1")
        assert other.exists()


def test_leftovers_of_jobs_are_listed(places, tmp_path):
    (user_directory(tmp_path) / "notes").write_text("no directory")
    (user_directory(tmp_path) / SOCKETS_DIRECTORY / "of a job").mkdir(parents=True)
    found = {one.path: one for one in leftovers(tmp_path)}
    assert list(found) == sorted(places.values())
    for (run, _), path in places.items():
        assert (found[path].run, found[path].address, found[path].newest, found[path].used_by) == (run, JOB, 20, ())
    (user_directory(tmp_path) / "empty").mkdir()
    assert leftover(user_directory(tmp_path) / "empty") == Leftover(
        user_directory(tmp_path) / "empty", None, None, None, 0, ()
    )


def test_file_with_several_names_counts_once(tmp_path):
    (tmp_path / "slot").write_bytes(bytes(10_000))
    taken = (tmp_path / "slot").stat().st_blocks * 512
    os.link(tmp_path / "slot", tmp_path / "rank_00000.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "slot")
    assert leftover(tmp_path).bytes == taken >= 10_000


def test_memory_used_by_process_is_not_removed(places):
    path = places["aaaaaaaaaaaaaaaa", "1"]
    owner = LocalStorage(path, claim=Claim("next", (0, 0), "aaaaaaaaaaaaaaaa"))
    owner.lock()
    assert leftover(path).used_by == (os.getpid(),)
    with raises("memory-in-use", str(path), str(os.getpid())):
        remove_leftover(leftover(path))
    other = places["aaaaaaaaaaaaaaaa", "10"]
    buffer = HostBuffer(4096, other / "slots" / "rank_00000.0")
    assert leftover(other).used_by == (os.getpid(),)  # nobody has the place, but somebody its memory
    buffer.close()
    remove_leftover(leftover(other), ended=True)
    assert not other.exists() and path.exists()


def test_releasing_missing_memory_creates_nothing(tmp_path):
    run = memory_path_of_run(tmp_path, JOB, "aaaaaaaaaaaaaaaa")
    shutil.rmtree(run.parent)
    give_back(run, "1")
    assert not run.parent.exists()
