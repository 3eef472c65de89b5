"""What jobs have left in memory is listed and removed; what a process uses is neither removed nor touched."""

import mmap
import os
import shutil
import signal
import subprocess
import sys

import pytest

from moc.inspect import memory
from moc.store.claims import Claim
from moc.store.leftovers import leftovers
from moc.store.runs import Run, record_run
from moc.store.storage import LocalPlace
from moc.store.store import Store
from moc.store.tiers import memory_place
from tests.unit.conftest import REPOSITORY
from tests.unit.store.test_store import files, saved

USES = {
    "has the place": """
import sys, time
from moc.store.claims import Claim
from moc.store.storage import LocalPlace
place = LocalPlace(sys.argv[1], claim=Claim("job", (0, 0), "run"))
place.lock()
print("uses it", flush=True)
time.sleep(1000)
""",
    "has a buffer there": """
import sys, time
from pathlib import Path
from moc.store.buffers import Buffer
buffer = Buffer(4096, Path(sys.argv[1]) / "slots" / "rank_00001.0")
print("uses it", flush=True)
time.sleep(1000)
""",
}


@pytest.fixture
def left(tmp_path):
    """Memory of two runs, one of which has snapshots."""
    places = [memory_place(tmp_path, "/data/ckpt", run) for run in ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb")]
    saved(Store(LocalPlace(places[0].root, claim=Claim("ended", (0, 3)))), 10, 20)
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


def test_what_is_left_is_listed_and_removed(left, capsys, tmp_path):
    taken = sum({f.stat().st_ino: f.stat().st_blocks * 512 for f in left[0].root.rglob("*") if f.is_file()}.values())
    assert [(one.run, one.newest, one.bytes > 0, one.used_by) for one in leftovers(tmp_path)] == [
        ("aaaaaaaaaaaaaaaa", 20, True, ()),
        ("bbbbbbbbbbbbbbbb", None, True, ()),
    ]
    assert leftovers(tmp_path)[0].bytes == taken  # what has two names is there once
    code, out, _ = clean(capsys, tmp_path)
    assert (
        code == 0
        and "iteration 20  run aaaaaaaaaaaaaaaa in /data/ckpt\n" in out
        and "no snapshot  run bbbbbbbbbbbbbbbb" in out
    )
    code, out, _ = clean(capsys, tmp_path, left[0].root, "--remove")
    assert code == 0 and out.startswith(f"removed  {left[0].root}")
    assert not left[0].root.exists() and left[1].root.exists()
    assert clean(capsys, tmp_path, "--remove")[0] == 0
    assert leftovers(tmp_path) == []


def test_what_a_process_uses_stays_until_it_is_killed(left, user, capsys, tmp_path):
    store = Store(left[0])
    before = files(store)
    code, out, err = clean(capsys, tmp_path, "--remove")
    assert code == 1 and err == f"clean_memory: {left[0].root} is used by process {user.pid}: stop that job first\n"
    assert files(store) == before and not left[1].root.exists()
    assert f"used by process {user.pid}" in clean(capsys, tmp_path)[1]
    user.send_signal(signal.SIGKILL)
    user.wait()
    assert clean(capsys, tmp_path, "--remove")[0] == 0
    assert leftovers(tmp_path) == []


def test_nothing_else_is_removed(left, capsys, tmp_path):
    (tmp_path / "others").mkdir()
    code, _, err = clean(capsys, tmp_path, tmp_path / "others", "--remove")
    assert code == 1 and "is no memory of a job" in err
    assert len(leftovers(tmp_path)) == 2


def test_a_directory_that_does_not_say_whose_it_is_is_shown_too(left, capsys, tmp_path):
    (left[1].root / ".run.json").write_text("{")
    shutil.rmtree(left[1].root / "slots", ignore_errors=True)
    assert "no snapshot  of no run that it names" in clean(capsys, tmp_path)[1]
    with open(left[1].root / "file", "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 4096)
        assert leftovers(tmp_path)[1].used_by == (os.getpid(),)
        mapped.close()
