"""A damaged name of a run or of an owner is printed, ignored and replaced, and never admits a second live owner."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moc import cli_output
from moc.store.errors import TakenError
from moc.store.ownership import NAME as FENCE
from moc.store.ownership import Claim, Fence, Holder, lives
from moc.store.storage import LocalStorage
from moc.store.store import RUN_FILE as RUN
from moc.store.store import Run, Store, begin_run, find_run, record_run
from tests.cases import each_row
from tests.unit.store.test_store import saved

ROOT = Path(__file__).parents[3]
OLD = "0123456789abcdef"


@contextlib.contextmanager
def checkpoints():
    """A directory for checkpoints, in memory where possible: thousands of writes are synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as there:
        (Path(there) / "ckpt").mkdir()
        (Path(there) / "victim").write_text("precious")
        yield Path(there) / "ckpt"
        assert (Path(there) / "victim").read_text() == "precious"


@pytest.fixture
def root():
    with checkpoints() as root:
        yield root


def flips(content):
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            yield bytes(changed)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 30)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def a_full_directory(path):
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").touch()


DAMAGES = {
    "empty": lambda path: path.touch(),
    "not JSON": lambda path: path.write_bytes(b"\xff\x00{"),
    "another type": lambda path: path.write_text("[1]"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("../victim"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a hard link": lambda path: os.link(path.parent.parent / "victim", path),
    "a socket": a_socket,
    "sparse": sparse,
    "a directory": os.mkdir,
    "a full directory": a_full_directory,
}
damaged = each_row("damage", DAMAGES.values(), ids=DAMAGES)


def with_checkpoints(root, *iterations, run=OLD):
    store = Store(LocalStorage(root, claim=Claim("before", run=run)))
    saved(store, *iterations)
    return store


def owned(root, claim):
    """What a job does when it takes a directory whose run it has been given."""
    place = LocalStorage(root, claim=claim, lock_timeout_s=0.0)
    place.lock()
    record_run(place, Run(claim.run, "/data", 0.0))


@damaged
def test_damaged_run_record_is_replaced_from_newest_checkpoint(damage, capfd):
    with checkpoints() as root:
        with_checkpoints(root, 10, 20)
        damage(root / RUN)
        cli_output.print_once.cache_clear()
        assert begin_run(LocalStorage(root), "/data").run == OLD
        assert str(root / RUN) in capfd.readouterr().err
        owned(root, Claim("next", run=OLD))
        capfd.readouterr()
        assert find_run(LocalStorage(root)) == Run(OLD, "/data", 0.0)
        assert capfd.readouterr().err == "" and (root / RUN).is_file() and not (root / RUN).is_symlink()


@damaged
def test_damaged_run_record_without_checkpoint_starts_new_run(damage):
    with checkpoints() as root:
        damage(root / RUN)
        run = begin_run(LocalStorage(root), "/data")
        owned(root, Claim("next", run=run.run))
        assert begin_run(LocalStorage(root), "/data").run == run.run


def test_lost_run_name_is_that_of_newest_valid_checkpoint(root):
    store = with_checkpoints(root, 10)
    with_checkpoints(root, 20, run="f" * 16)
    saved(Store(LocalStorage(root)), 30)  # by a tool, which has no run
    (root / "iter_0000020" / "manifest.json").write_text("{")
    assert find_run(store.storage).run == begin_run(store.storage, "/data").run == OLD


def test_every_flipped_bit_of_run_record_is_detected(root):
    with_checkpoints(root, 10)
    place = LocalStorage(root)
    record_run(place, Run(OLD, "/data", 1.5))
    for changed in flips(place.read(RUN)):
        (root / RUN).write_bytes(changed)
        assert begin_run(place, "/data").run == OLD


OWNS = """
import sys
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
place = LocalStorage(sys.argv[1], claim=Claim("first", (0, 3)), lock_timeout_s=0.0)
for line in sys.stdin:
    try:
        place.lock() if line == "take\\n" else place.write("iter_0000001/file", [b"first"])
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Job:
    """A process of another job, which takes the directory."""

    def __init__(self, root):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNS, str(root)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.does("take") == "done"

    def does(self, what):
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def a_job(root):
    """A job that has a directory until the end."""
    job = Job(root)
    try:
        yield job
    finally:
        job.end()


@pytest.fixture
def first(root):
    with a_job(root) as job:
        yield job


def takes(root, job="second", lock_timeout_s=0.0):
    fence = Fence(root, Claim(job), lock_timeout_s)
    fence.take()
    return fence


def replace(path, damage):
    path.unlink()
    damage(path)


@damaged
def test_damaged_fence_admits_no_second_live_job(damage, capfd):
    with checkpoints() as root, a_job(root) as first:
        replace(root / FENCE, damage)
        cli_output.print_once.cache_clear()
        with pytest.raises(TakenError, match=str(first.process.pid)):
            takes(root)
        assert str(root / FENCE) in capfd.readouterr().err
        assert lives(root).pid == first.process.pid
        assert first.does("publish") == "done"  # which is still the owner, and its next generation repairs the fence
        first.end()
        second = takes(root, lock_timeout_s=60.0)
        assert second.read().claim == Claim("second") and (root / FENCE).is_file()
        assert not (root / FENCE).is_symlink() and not list(root.glob(".fence.*"))


def test_owner_replaces_damaged_fence(root, first):
    (root / FENCE).write_bytes(b"")
    assert first.does("take") == "done"
    assert Fence(root, Claim("second")).read().claim == Claim("first", (0, 3))


def test_live_owner_is_kept_after_any_flipped_fence_bit(root, first):
    whole = (root / FENCE).read_bytes()
    for changed in flips(whole):
        (root / FENCE).write_bytes(changed)
        with pytest.raises(TakenError):
            takes(root)
        assert first.does("publish") == "done"
    (root / FENCE).write_bytes(whole)


def test_fence_with_flipped_bit_is_replaced_without_live_owner(root, first):
    first.end()
    for number, changed in enumerate(flips((root / FENCE).read_bytes())):
        (root / FENCE).write_bytes(changed)
        assert takes(root, f"second{number}").read().claim == Claim(f"second{number}")


def test_superseded_job_commits_nothing_with_damaged_fence(root, first):
    (root / FENCE).unlink()
    second = takes(root)  # a removed fence is no damage: the directory has no owner
    (root / FENCE).write_bytes(b"\0")
    assert first.does("publish") == "SupersededError"
    second.check()


def test_newer_generation_keeps_directory_with_damaged_fence(root, first):
    newer = Fence(root, Claim("first", (0, 4)))
    newer.take()
    (root / FENCE).write_bytes(b"\0")
    assert first.does("publish") == "SupersededError"
    newer.check()


def test_concurrent_starts_with_damaged_fence_have_one_owner(root):
    (root / FENCE).write_bytes(b"\0")
    script = OWNS.replace('"first", (0, 3)', "sys.argv[2]").replace("lock_timeout_s=0.0", "lock_timeout_s=60.0")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root), f"job{number}"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    try:
        for job in jobs:
            job.stdin.write("take\n")
            job.stdin.flush()
        for _ in jobs:  # each gets the directory once the others are gone
            owner = None
            while owner is None:
                alive = lives(root)
                owner = next((job for job in jobs if alive is not None and job.pid == alive.pid), None)
            owner.stdin.write("publish\n")
            owner.stdin.flush()
            assert [owner.stdout.readline() for _ in range(2)] == ["done\n", "done\n"]
            owner.kill()
            owner.communicate()
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@each_row("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("../victim")])
@each_row("owner", ["second", "other"])
def test_non_regular_lock_file_does_not_block(make, owner):
    """Neither the lock file of the job itself, nor that of the owner that the fence names."""
    with checkpoints() as root:
        make(root / f".lock.{Claim(owner).tag}")
        if owner == "other":
            (root / FENCE).write_text(Holder(Claim(owner), "host", 1).to_json())
            assert takes(root).read().claim == Claim("second")
        else:
            with pytest.raises(OSError):
                takes(root)


LOCKS = """
import fcntl, os, sys
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
kind = {"read": fcntl.LOCK_SH, "write": fcntl.LOCK_EX}[sys.argv[2]]
with open(sys.argv[1], "r" if sys.argv[2] == "read" else "r+") as file:
    fcntl.lockf(file, kind)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def locker(root):
    """Starts a process that locks the file of a dead owner, as another user if there is one."""
    started = []

    def start(kind):
        takes_and_dies = OWNS.replace("for line in sys.stdin", 'for line in ["take\\n"]')
        subprocess.run([sys.executable, "-c", takes_and_dies, str(root)], cwd=ROOT, check=True)
        os.chmod(root.parent, 0o755)
        (lock,) = root.glob(".lock.*")
        lock.chmod(0o666 if kind == "write" else 0o644)
        user = ["65534"] if os.geteuid() == 0 else []
        command = [sys.executable, "-c", LOCKS, str(lock), kind, *user]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "locked\n"
        return started[-1]

    yield start
    for process in started:
        process.communicate("")


def test_process_locking_file_of_dead_owner_is_named(root, locker):
    with pytest.raises(TakenError, match=str(locker("write").pid)):
        takes(root)


def test_shared_lock_of_any_user_does_not_own_directory(root, locker):
    locker("read")
    assert takes(root).read().claim == Claim("second")


def test_whole_file_lock_of_old_version_counts_as_owner(root, first):
    lock = root / f".lock.{Claim('older').tag}"
    first.end()
    lock.touch()
    command = [sys.executable, "-c", LOCKS, str(lock), "write"]
    holds = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holds.stdout.readline() == b"locked\n"
    (root / FENCE).write_bytes(b"\0")
    with pytest.raises(TakenError):
        takes(root)
    holds.communicate(b"")
    assert takes(root).read().claim == Claim("second")


def test_superseded_job_does_not_retake_damaged_directory(root, first):
    (root / FENCE).unlink()
    second = takes(root)
    (root / FENCE).write_bytes(b"\0")
    assert first.does("take") == "TakenError"
    second.check()


AS_NOBODY = """
import os, sys
from pathlib import Path
from moc.store.ownership import Claim
from moc.store.ownership import Fence
os.setgid(65534), os.setuid(65534)
try:
    Fence(Path(sys.argv[1]), Claim("nobody"), 0.0).take()
    print("took it")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
@pytest.mark.parametrize(
    ("mode", "fence", "ends"),
    [
        (0o1777, 0o644, "PermissionError"),  # only its owner may replace the fence
        (0o1777, 0o600, "PermissionError"),
        (0o777, 0o644, "took it"),  # whoever may write there may own the directory
        (0o755, 0o644, "PermissionError"),
    ],
)
def test_fence_of_another_user_is_replaced_only_if_permitted(root, first, mode, fence, ends):
    first.end()
    root.chmod(mode)
    root.parent.chmod(0o755)
    (root / FENCE).chmod(fence)
    before = (root / FENCE).read_bytes()
    command = [sys.executable, "-c", AS_NOBODY, str(root)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == f"{ends}\n", ended.stderr
    assert ((root / FENCE).read_bytes() == before) == (ends != "took it")
    assert not list(root.glob("*.tmp"))
