"""Programs end with one sentence, whatever is at the paths that they are given."""

import contextlib
import os
import socket

import pytest

from megatron.pretraining.convert import program as convert
from megatron.pretraining.data import preprocess, tokenizer_training
from megatron.pretraining.examples import program as examples
from megatron.pretraining.planning import simulate, sizes
from moc.inspect import memory, summary, verify
from moc.report import loss, report
from tests.cases import each_row
from tests.hostile_files import EVENTS, lines

NOBODY = 65534
PROGRAMS = {
    "summary": (summary.main, "{}", "{} --json", "{} --iteration 3"),
    "verify": (verify.main, "{}", "{} --all --json", "{} --iteration 3"),
    "memory": (memory.main, "{} --memory-dir good", "--ckpt-dir {} --memory-dir good", "--memory-dir {}"),
    "report": (report.main, "{}", "good --json {}", "good --plot {}"),
    "loss": (loss.main, "{}", "{} {}"),
    "convert": (convert.main, "{} out",),
    "simulate": (simulate.main, "--profile {}", "--trace {}", "--routing {}"),
    "sizes": (sizes.main, "--routing {}"),
    "preprocess": (preprocess.main, "--input {} --output-prefix out --tokenizer-type NullTokenizer --vocab-size 9"),
    "examples": (examples.main, "pure_torch {}"),
    "tokenizer": (tokenizer_training.main, "--input {} --output-prefix out --vocab-size 300"),
}  # fmt: skip
PATHS = [
    "", "file", "fifo", "dangling", "loop", "closed", "partly", "to_file", "to_directory", "socket", "checkpoints",
    "links", "nothing", "file/inner", "x" * 5000, "d/" * 3000, "\udcff", "a\nb\x1b[2J", "closed/iter_0000003",
    "partly/iter_0000003", *(f"checkpoints/iter_000000{number}" for number in range(1, 6)),
]  # fmt: skip


READ_ONLY = ["/dev/null", "/proc/self/mem"]  # given to commands that write nowhere


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with something of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in ("closed/iter_0000003", "partly/iter_0000003", "partly/iter_0000004", "links", "good"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "good" / "events.jsonl").write_bytes(lines(EVENTS))
    (tmp_path / "file").write_text("x")
    os.mkfifo("fifo")
    for name, target in dict(dangling="nothing", loop="loop", to_file="file", to_directory="partly").items():
        (tmp_path / name).symlink_to(target)
    for number, target in enumerate(("file", "fifo", "dangling", "loop", "closed"), 1):
        (tmp_path / "links" / f"iter_{number:07d}").symlink_to(f"../{target}")
    for number in (3, 4, 5):
        (tmp_path / "checkpoints" / f"iter_{number:07d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iter_0000001").write_text("x")
    os.mkfifo("checkpoints/iter_0000002")
    os.mkfifo("checkpoints/iter_0000003/manifest.json")
    (tmp_path / "checkpoints" / "iter_0000004" / "manifest.json").mkdir()
    (tmp_path / "checkpoints" / "iter_0000005" / "training_state.json").write_text("[]")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").mkdir()
    os.mkfifo("checkpoints/events.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    return tmp_path


@contextlib.contextmanager
def without_access(here):
    """Inside, some directories cannot be read."""
    for path in (*here.parents, here):
        with contextlib.suppress(PermissionError):
            if path.stat().st_uid == os.geteuid() and path.name.startswith(("pytest-", here.name)):
                path.chmod(0o777)
    closed = [here / "closed", here / "partly" / "iter_0000004"]
    for path in closed:
        path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(NOBODY)
        yield
    finally:
        os.seteuid(user)
        for path in closed:
            path.chmod(0o700)


def ended(main, arguments, capsys):
    """The exit code of a program, after a check of what it has printed."""
    try:
        code = main(arguments)
    except SystemExit as leaves:
        code = leaves.code
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed and "\x1b" not in printed
    assert code == 0 or printed
    return code


READ_PIPES = ("preprocess", "tokenizer")  # a FIFO may be what the user means


@each_row("name", PROGRAMS)
def test_unusual_paths_are_refused_in_one_sentence(here, capsys, name):
    main, *commands = PROGRAMS[name]
    pipes = ("fifo", "checkpoints/iter_0000002") if name in READ_PIPES else ()
    paths = [path for path in PATHS if path not in pipes]
    for access in (contextlib.nullcontext(), without_access(here)):
        with access:
            for command in commands:
                for path in paths if "good" in command else (*paths, *READ_ONLY):
                    assert ended(main, [word.replace("{}", path) for word in command.split()], capsys) in (0, 1, 2)


def test_file_named_like_checkpoint_is_not_one(here, capsys):
    assert ended(verify.main, ["checkpoints", "--all"], capsys) == 1
    assert ended(verify.main, ["checkpoints", "--iteration", "1"], capsys) == 1
