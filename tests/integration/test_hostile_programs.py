"""With a hostile checkpoint directory, programs change it and what they change with a valid one, and nothing else.

Their system calls are recorded by strace; tests/unit/store/test_hostile_directories.py checks far more directories.
"""

import os
import random
import re
import shutil
import subprocess
import sys

import pytest

from moc.store.host_memory import SOCKETS_DIRECTORY, memory_path_of_run, memory_storage, user_directory
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Run, Store, find_run, record_run
from tests.hostile import add_victims, make_hostile, outside, state_of
from tests.shared import ALL
from tests.unit.inspect import checkpoints
from tests.unit.store.test_store import saved
from tests.worlds import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace"),
]
BATCHES, DIRECTORIES = (100, 2) if ALL else (1, 1)  # in each
SEED = 4600
SHM = "/dev/shm"
MINE = ("ckpt", "log", "memory", "tmp", "trace")  # what the programs may change in a world
_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (\d+)(?:<(.*)>)?$", re.MULTILINE)  # one that has succeeded
_AT = re.compile(r'(?:AT_FDCWD|\d+)<((?:[^>\\]|\\.)*)>, "((?:[^"\\]|\\.)*)"')
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WRITES = re.compile(r"\b(O_WRONLY|O_RDWR|O_CREAT|O_TRUNC)\b")
_CHANGES = re.compile(
    r"(unlink|rmdir|mkdir|rename|link|symlink|mknod|chmod|chown|fchmod|fchown|lchown|truncate|utime|futimes|utimens"
    r"|setxattr|lsetxattr|removexattr|lremovexattr|mount|umount)(at)?2?(at)?"
)


_TRACED = (  # the rest of strace's class "file" changes nothing
    "open,openat,openat2,creat,/^(unlink|rmdir|mkdir|rename|link|symlink|mknod|chmod|fchmodat|chown|fchownat|lchown"
    "|truncate$|utime|futimesat|setxattr|lsetxattr|removexattr|lremovexattr|mount|umount).*$"
)


def changes_in(trace):
    """The paths that the recorded system calls have changed, with the names of the calls."""
    found = set()
    for name, arguments, _, opened in _CALL.findall(trace):
        if name in ("open", "openat", "openat2", "creat"):
            if name == "creat" or _WRITES.search(arguments):
                found.add(("write", _plain(opened)))
        elif _CHANGES.fullmatch(name):
            pairs = _AT.findall(arguments)
            paths = [os.path.join(*map(_plain, pair)) for pair in pairs] or list(map(_plain, _TEXT.findall(arguments)))
            paths = paths[1:] if name == "symlink" else paths
            for path in paths:
                above, last = os.path.split(os.path.join(REPOSITORY, path))
                found.add((name.removesuffix("2").removesuffix("at"), os.path.join(os.path.realpath(above), last)))
    return found


def _plain(text):
    """A string as strace escapes it."""
    return os.fsdecode(text.encode("latin-1", "replace").decode("unicode_escape").encode("latin-1", "replace"))


def commands(world):
    """The programs, by name; the job resumes last, since it removes old snapshots."""
    ckpt, tools = world / "ckpt", REPOSITORY / "tools"
    job = ["-m", "moc.launch", "--nproc-per-node", "1", REPOSITORY / "examples" / "pure_torch.py"]
    return {
        "inspect": [tools / "inspect_checkpoint.py", ckpt, "--json"],
        "verify": [tools / "verify_checkpoint.py", ckpt, "--all"],
        "report": [tools / "report.py", world / "log"],
        "clean": [tools / "clean_memory.py", "--memory-dir", world / "memory", "--remove"],
        "job": [*job, "--ckpt-dir", ckpt, "--log-dir", world / "log", "--iterations", "8"],
    }


def changed_by(command, world):
    """What a program changes, and what it prints."""
    shutil.rmtree(world / "trace", ignore_errors=True)
    (world / "trace").mkdir()
    strace = ["strace", "-ff", "-qq", "--seccomp-bpf", "-y", "-s", "9999", "-e", f"trace={_TRACED}"]
    ended = subprocess.run(
        list(map(str, [*strace, "-o", world / "trace" / "of", sys.executable, "-W", "ignore", *command])),
        cwd=REPOSITORY, env=environment(world), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    traces = [path.read_text(errors="replace") for path in (world / "trace").iterdir()]
    assert traces, ended.stdout
    return set().union(*map(changes_in, traces)), ended.stdout


def environment(world):
    own = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(world / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A world with a run of six iterations, a dense checkpoint, and another run's memory."""
    world = tmp_path_factory.mktemp("worlds") / "world"
    (world / "tmp").mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", *commands(world)["job"][:-1], "6"]
    subprocess.run(list(map(str, command)), cwd=REPOSITORY, env=environment(world), check=True, capture_output=True)
    checkpoints.save(world / "ckpt", 3)
    run = find_run(LocalStorage(world / "ckpt")).run
    (world / "memory").mkdir()
    place = memory_storage(world / "memory", str(world / "ckpt"), run, claim=Claim("ended", run=run))
    saved(Store(place, allows_slack=True), 10, 20)
    record_run(place, Run(run, str(world / "ckpt"), 0.0))
    add_victims(world)
    kept = world.with_name("pristine")
    world.rename(kept)
    yield kept


def anew(pristine):
    """A copy of the world under its first path, in place of the last one."""
    path = pristine.with_name("world")
    remove(path)
    shutil.copytree(pristine, path, symlinks=True)
    return path


@pytest.fixture(scope="module")
def known(pristine):
    """By program, what it changes where nothing is hostile."""
    found, world = {}, anew(pristine)
    for name, command in commands(world).items():
        found[name], said = changed_by(command, world)
        assert ("iteration 8:" in said) == (name == "job"), said
    yield found
    remove(world)


def remove(path):
    shutil.rmtree(path, ignore_errors=True)
    for left in user_directory(SHM).glob(f"{memory_path_of_run(SHM, str(path / 'ckpt'), '').name}*"):
        shutil.rmtree(left)


def left(changes, world, known):
    memory = str(memory_path_of_run(SHM, str(world / "ckpt"), ""))  # of any run at this address
    foreign = {one for one in changes if not one[1].startswith(memory)}
    return outside(foreign, (*(world / name for name in MINE), user_directory(SHM) / SOCKETS_DIRECTORY), known)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_hostile_directory_causes_no_other_changes(pristine, known, batch):
    problems = []
    for number in range(batch * DIRECTORIES, (batch + 1) * DIRECTORIES):
        world = anew(pristine)
        (run,) = user_directory(world / "memory").iterdir()
        told = make_hostile(random.Random(SEED + number), world, (world / "ckpt", world / "log", run))
        before = state_of(world, MINE)
        for name, command in commands(world).items():
            changes, said = changed_by(command, world)
            if found := left(changes, world, known[name]):
                problems.append(f"{number} {told} {name}: {found}\n{said}")
            if state_of(world, MINE) != before:
                problems.append(f"{number} {told} {name}: files outside have changed\n{said}")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problem[:3000] for problem in problems[:20])


def test_recorded_changes_include_writes_through_links(tmp_path):
    """The comparison itself: changes through a link are found, under the path that they have changed."""
    (tmp_path / "trace").mkdir()
    for name in ("ckpt", "victims", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "ckpt" / "link\n").symlink_to("../victims")
    script = (
        "import os, sys; os.chdir(sys.argv[1]); root = os.open('ckpt/link\\n', os.O_RDONLY)\n"
        "open('ckpt/link\\n/new', 'w').close(); os.mkdir('made', dir_fd=root); os.rmdir('made', dir_fd=root)\n"
        "os.rename('new', 'moved', src_dir_fd=root, dst_dir_fd=root); os.unlink('moved', dir_fd=root)\n"
    )
    changes, said = changed_by(["-c", script, tmp_path], tmp_path)
    kinds = {kind for kind, path in changes if path.startswith(str(tmp_path / "victims"))}
    assert kinds == {"write", "mkdir", "rename", "unlink"}, said  # rmdir is unlinkat, too
