"""What jobs have left in memory is listed and removed; what a process uses is neither removed nor touched."""

import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from moc.inspect import memory
from moc.store.host_memory import leftovers, memory_storage
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage, lease_remaining_s, record_lease, renew_lease
from moc.store.store import Run, Store, begin_run, record_run
from tests.errors import only_code
from tests.unit.conftest import REPOSITORY
from tests.unit.store.test_store import files, saved

USES = {
    "has the place": """
import sys, time
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
place = LocalStorage(sys.argv[1], claim=Claim("job", (0, 0), "run"))
place.lock()
print("uses it", flush=True)
time.sleep(1000)
""",
    "has a buffer there": """
import sys, time
from pathlib import Path
from moc.store.buffers import HostBuffer
buffer = HostBuffer(4096, Path(sys.argv[1]) / "slots" / "rank_00001.0")
print("uses it", flush=True)
time.sleep(1000)
""",
}


@pytest.fixture
def left(tmp_path):
    """Memory of two runs, one of which has snapshots."""
    places = [memory_storage(tmp_path, "/data/ckpt", run) for run in ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb")]
    saved(Store(LocalStorage(places[0].root, claim=Claim("ended", (0, 3)))), 10, 20)
    for place, run in zip(places, ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"), strict=True):
        record_run(place, Run(run, "/data/ckpt", 0.0))
    os.link(places[0].root / "iter_0000010" / "rank_00000.safetensors", places[0].root / "a second name")
    return places


@pytest.fixture(params=list(USES))
def user(request, left):
    """A process that uses the first one's memory, as a worker does."""
    command = [sys.executable, "-c", USES[request.param], left[0].name]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "uses it\n"
    yield process
    process.kill()
    process.wait()


def clean(capsys, tmp_path, *argv):
    """Exit code, and what was said on both streams."""
    code = memory.main(["--memory-dir", str(tmp_path), *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def alive(place, seconds_ago, lease_s=30.0):
    """Records the lease of a job that was alive so many seconds ago."""
    record_lease(place, lease_s)
    for path in (place.root, *place.root.rglob("*")):
        os.utime(path, (time.time() - seconds_ago,) * 2, follow_symlinks=False)


@pytest.fixture
def ended(left):
    """The same memory, of jobs that ended long ago."""
    for place in left:
        alive(place, 3600)
    return left


def test_leftovers_are_listed_and_removed(ended, capsys, tmp_path):
    taken = sum({f.stat().st_ino: f.stat().st_blocks * 512 for f in ended[0].root.rglob("*") if f.is_file()}.values())
    assert [(one.run, one.newest, one.bytes > 0, one.used_by) for one in leftovers(tmp_path)] == [
        ("aaaaaaaaaaaaaaaa", 20, True, ()),
        ("bbbbbbbbbbbbbbbb", None, True, ()),
    ]
    assert leftovers(tmp_path)[0].bytes == taken  # a file with two names counts once
    code, out, _ = clean(capsys, tmp_path)
    assert code == 0 and re.search(r"\b20  run a{16} in /data/ckpt\n", out) and "run bbbbbbbbbbbbbbbb" in out
    code, out, _ = clean(capsys, tmp_path, ended[0].root, "--remove")
    assert code == 0 and out.startswith(f"removed  {ended[0].root}")
    assert not ended[0].root.exists() and ended[1].root.exists()
    assert clean(capsys, tmp_path, "--remove", "--all")[0] == 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("chosen", [[], ["--all", "path"], ["--all", "--ckpt-dir", "path"]])
def test_removal_requires_explicit_selection(ended, capsys, tmp_path, chosen):
    with pytest.raises(SystemExit) as end:
        clean(capsys, tmp_path, "--remove", *(ended[0].root if one == "path" else one for one in chosen))
    assert end.value.code == 2 and "--all" in capsys.readouterr().err
    assert len(leftovers(tmp_path)) == 2


def test_checkpoint_directory_names_only_memory_of_its_run(capsys, tmp_path):
    """Other runs stay: of other directories, and of the same directory before it was made again."""
    memory, here, there = tmp_path / "memory", tmp_path / "here", tmp_path / "there"
    memory.mkdir()
    runs = {name: begin_run(LocalStorage(name), str(name)).run for name in (here, there)}
    mine = [memory_storage(memory, str(here), runs[here], node) for node in (None, "0", "1")]
    others = [
        memory_storage(memory, str(there), runs[there]),
        memory_storage(memory, str(here), "bbbbbbbbbbbbbbbb", "0"),
    ]
    for place in (*mine, *others):
        alive(place, 3600)
    assert all(str(one.root) in clean(capsys, memory, "--ckpt-dir", here)[1] for one in mine)
    assert clean(capsys, memory, "--remove", "--ckpt-dir", here)[0] == 0
    assert not any(one.root.exists() for one in mine) and all(one.root.exists() for one in others)
    code, out, _ = clean(capsys, memory, "--remove", "--ckpt-dir", here)
    assert code == 0 and str(here) in out  # the memory of this run is gone already
    code, _, err = clean(capsys, memory, "--remove", "--ckpt-dir", tmp_path / "nowhere")
    assert code == 1 and "nowhere" in err and all(one.root.exists() for one in others)


@pytest.mark.parametrize("chosen", ["path", "all"])
@pytest.mark.parametrize("ago, lease_s, stays", [(1, 30, True), (31, 30, False), (31, 60, True), (1, 0.5, False)])
def test_memory_with_valid_lease_is_not_removed(left, capsys, tmp_path, chosen, ago, lease_s, stays):
    for place in left:
        alive(place, ago, lease_s)
    words = [left[0].root, left[1].root] if chosen == "path" else ["--all"]
    code, _, err = clean(capsys, tmp_path, "--remove", *words)
    assert (code, [one.root.exists() for one in left]) == (int(stays), [stays, stays])
    assert ("--ended" in err) == stays
    assert clean(capsys, tmp_path, "--remove", *words, "--ended")[0] == 0 or not stays
    assert leftovers(tmp_path) == []


def test_memory_without_lease_gets_default_lease(left, capsys, tmp_path):
    assert clean(capsys, tmp_path, "--remove", "--all")[0] == 1 and len(leftovers(tmp_path)) == 2
    (left[0].root / ".lease").write_text("{")
    assert clean(capsys, tmp_path, "--remove", "--all")[0] == 1 and len(leftovers(tmp_path)) == 2


def test_renewed_lease_has_full_duration(left):
    alive(left[0], 3600)
    assert lease_remaining_s(left[0].root) <= 0
    renew_lease(left[0].root)
    assert 25 < lease_remaining_s(left[0].root) <= 30
    shutil.rmtree(left[0].root)
    renew_lease(left[0].root)  # a newer generation may have removed the directory
    assert not left[0].root.exists()


def test_memory_in_use_is_kept_until_process_ends(ended, user, capsys, tmp_path):
    store = Store(ended[0])
    before = files(store)
    code, out, err = clean(capsys, tmp_path, "--remove", "--all", "--ended")
    assert code == 1 and err.count("\n") == 1 and only_code(err) == "memory-in-use"
    assert err.startswith(f"clean_memory: {ended[0].root} ") and str(user.pid) in err
    assert files(store) == before and not ended[1].root.exists()
    assert f"process {user.pid}" in clean(capsys, tmp_path)[1]
    user.send_signal(signal.SIGKILL)
    user.wait()
    assert clean(capsys, tmp_path, "--remove", "--all", "--ended")[0] == 0
    assert leftovers(tmp_path) == []


def test_directory_of_no_run_is_not_removed(ended, capsys, tmp_path):
    (tmp_path / "others").mkdir()
    code, _, err = clean(capsys, tmp_path, tmp_path / "others", "--remove")
    assert code == 1 and only_code(err) == "memory-of-no-run" and str(tmp_path / "others") in err
    assert len(leftovers(tmp_path)) == 2


def test_unidentified_directory_is_listed(left, capsys, tmp_path):
    (left[1].root / ".run.json").write_text("{")
    shutil.rmtree(left[1].root / "slots", ignore_errors=True)
    assert str(left[1].root) in clean(capsys, tmp_path)[1]
    with open(left[1].root / "file", "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 4096)
        assert leftovers(tmp_path)[1].used_by == (os.getpid(),)
        mapped.close()
