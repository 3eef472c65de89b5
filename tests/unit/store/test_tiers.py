"""Memory of this node: in a directory that nobody else can read or plant."""

import itertools
import os
import re
import shutil

import pytest

from moc.store.errors import CheckpointError
from moc.store.runs import begin_run, run_of
from moc.store.storage import LocalPlace
from moc.store.tiers import memory_found, memory_home, memory_homes, memory_of_other_runs, memory_place
from tests.unit.store.turns import in_turns


def home(tmp_path):
    return tmp_path / f"moc-{os.geteuid()}"


def test_jobs_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = "/a/ckpt", "/b/ckpt", "s3://a/ckpt", "s3://b/ckpt"
    roots = {job: memory_place(tmp_path, job, "run").root for job in jobs}
    assert len(set(roots.values())) == 4
    assert all(root.parent == home(tmp_path) and root.name.startswith("ckpt-") for root in roots.values())
    assert home(tmp_path).stat().st_mode & 0o777 == 0o700
    for same in ("/a/ckpt/", "/a/x/../ckpt"):
        assert memory_place(tmp_path, same, "run").root == roots["/a/ckpt"]
    assert memory_place(tmp_path, "ckpt", "run").root == memory_place(tmp_path, str(tmp_path / "ckpt"), "run").root


def test_runs_at_one_address_have_directories_of_their_own(tmp_path):
    storage = LocalPlace(tmp_path / "ckpt")
    first = begin_run(storage, "/data/ckpt")
    assert begin_run(storage, "/mnt/ckpt") == run_of(storage) == first  # as long as it is not removed
    shutil.rmtree(storage.root)
    second = begin_run(storage, "/data/ckpt")
    roots = [
        memory_place(tmp_path, "/data/ckpt", run.run, node).root for run in (first, second) for node in (None, "1")
    ]
    assert len(set(roots)) == 4
    for root in roots:
        root.mkdir()
    memory_place(tmp_path, "/other/ckpt", first.run).root.mkdir()
    assert memory_of_other_runs(tmp_path, "/data/ckpt", second.run) == roots[:2]
    assert memory_found(tmp_path, str(storage.root)).root.name.endswith(second.run)


def test_of_two_that_begin_a_run_at_once_one_does(tmp_path):
    actions = [lambda: begin_run(LocalPlace(tmp_path / "ckpt"), "ckpt")] * 2
    orders = itertools.product([0, 1], repeat=6)
    for order in orders:
        one, other = in_turns(actions, order)
        assert one.result == other.result == run_of(LocalPlace(tmp_path / "ckpt")) is not None
        assert os.listdir(tmp_path / "ckpt") == [".run.json"]
        shutil.rmtree(tmp_path / "ckpt")


def refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(home(tmp_path)))} .*--ckpt-memory-dir"):
        memory_place(tmp_path, "job", "run")


def with_mode(mode):
    def make(path):
        path.mkdir()
        path.chmod(mode)

    return make


def of_another_user(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def link(path):
    (path.parent / "theirs").mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(path.parent / "theirs")


UNUSABLE = {f"mode {mode:o}": with_mode(mode) for mode in (0o770, 0o707, 0o710, 0o701, 0o755)} | {
    "a link": link,
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a file": lambda path: path.touch(mode=0o600),
    "of another user": pytest.param(
        of_another_user,
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a directory"),
    ),
}


@pytest.mark.parametrize("make", UNUSABLE.values(), ids=UNUSABLE)
def test_another_name_is_used_and_printed_where_the_first_cannot_be(tmp_path, make, capsys):
    make(home(tmp_path))
    before = home(tmp_path).lstat()
    chosen = memory_place(tmp_path, "job", "run").root.parent
    assert chosen == tmp_path / f"{home(tmp_path).name}-1" and chosen.stat().st_mode & 0o777 == 0o700
    assert str(chosen) in capsys.readouterr().err
    assert home(tmp_path).lstat() == before
    assert memory_place(tmp_path, "job", "run").root.parent == chosen
    assert capsys.readouterr().err == ""  # once is enough


def test_one_worker_of_a_node_prints_the_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    home(tmp_path).touch()
    memory_home(tmp_path)
    assert capsys.readouterr().err == ""


def test_the_directory_that_has_the_snapshots_is_kept_when_the_first_name_becomes_free(tmp_path):
    home(tmp_path).touch()
    root = memory_place(tmp_path, "job", "run").root
    home(tmp_path).unlink()
    assert memory_place(tmp_path, "job", "run").root == root and not home(tmp_path).exists()


def test_of_several_own_directories_the_first_is_used_and_all_are_searched(tmp_path):
    names = [tmp_path / f"{home(tmp_path).name}{end}" for end in ("", "-1", "-2")]
    names[1].touch()
    for own in (names[0], names[2]):
        own.mkdir(mode=0o700)
    assert memory_home(tmp_path) == names[0] and memory_homes(tmp_path) == [names[0], names[2]]
    other = memory_place(tmp_path, "job", "other").root
    (names[2] / other.name).mkdir()
    assert memory_of_other_runs(tmp_path, "job", "run") == [names[2] / other.name]


def test_a_job_is_refused_once_all_names_are_taken(tmp_path):
    for number in range(100):
        (tmp_path / f"{home(tmp_path).name}{f'-{number}' if number else ''}").touch()
    refused(tmp_path)
    (tmp_path / f"{home(tmp_path).name}-99").unlink()
    assert memory_home(tmp_path).name == f"{home(tmp_path).name}-99"


def test_of_processes_that_begin_at_once_all_find_the_same(tmp_path):
    home(tmp_path).touch()
    orders = itertools.product([0, 1], repeat=6)
    for order in orders:
        one, other = in_turns([lambda: memory_home(tmp_path)] * 2, order)
        assert one.result == other.result
        assert sorted(os.listdir(tmp_path)) == [home(tmp_path).name, f"{home(tmp_path).name}-1"]
        one.result.rmdir()


def test_a_memory_file_system_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "missing")
