"""Each documented code is the end of a real command line: exit code, code, what it names, and no traceback.

Programs run in this process by their real ``main``, or as processes forked from a warm one.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.live.job import free_ports
from megatron.pretraining.convert import program as convert
from megatron.pretraining.data import preprocess, tokenizer_training
from megatron.pretraining.planning import simulate, sizes
from megatron.pretraining.reference import documented
from moc import launch
from moc.errors import FIX, codes_in
from moc.inspect import memory, summary, verify
from moc.report import loss, report
from moc.runtime import controller
from moc.runtime.protocol import Channel, Message
from tests import warm
from tests.cases import each_row
from tests.codes import elsewhere, flags, jobs, launcher, tools
from tests.codes.case import PROGRAM, Case
from tests.worlds import REPOSITORY

MAINS = {
    "mocrun": launch,
    "controller": controller,
    "convert_checkpoint": convert,
    "inspect_checkpoint": summary,
    "verify_checkpoint": verify,
    "clean_memory": memory,
    "report": report,
    "plot_loss": loss,
    "plan_checkpoint": sizes,
    "simulate": simulate,
    "preprocess_data": preprocess,
    "train_tokenizer": tokenizer_training,
}
TOOLS = REPOSITORY / "tools"
HERE = launcher.CASES | tools.CASES
"""Cases whose error comes before anything that a test process must not do."""


@each_row("code", sorted(HERE))
def test_command_line_ends_with_documented_code(code, tmp_path, monkeypatch, capfd):
    case = HERE[code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("MOC_TOKEN", "MOC_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it may be imported, and not read again
    monkeypatch.setitem(sys.modules, "benchmarks.papers.program", None)  # as where only the wheel is installed
    monkeypatch.setattr(sys, "argv", [case.program, *shlex.split(case.words)])
    if case.make is not None:
        case.make(tmp_path)
    capfd.readouterr()
    try:
        status = MAINS[case.program].main()
    except SystemExit as ended:
        status = ended.code
    finally:
        tools.HELD.close()
    output = "".join(capfd.readouterr())
    assert status == case.status and code in codes_in(output), output
    assert case.named in output and "Traceback" not in output, output
    assert all(line.count(FIX) == 1 for line in output.splitlines() if codes_in(line)), output


@pytest.mark.parametrize("program", sorted(MAINS))
def test_program_process_ends_with_documented_code(program, tmp_path):
    code, case = next((code, case) for code, case in HERE.items() if case.program == program)
    if case.make is not None:
        case.make(tmp_path)
    status, output = run(case, tmp_path)
    assert status == case.status and code in codes_in(output) and "Traceback" not in output, output


JOBS = jobs.CASES | flags.CASES
PARTS = 12
"""Tests over which the jobs are spread, so that several workers of pytest share them."""


@pytest.mark.parametrize("part", range(PARTS))
def test_job_ends_with_documented_code(part, tmp_path):
    @each_row("code", sorted(JOBS)[part::PARTS])
    def ends_with_the_code(code, tmp_path):
        case = JOBS[code]
        if case.make is not None:
            case.make(tmp_path)
        status, output = run(case, tmp_path)
        assert status == case.status and code in codes_in(output), output
        assert case.named in output and "Traceback" not in output, output

    ends_with_the_code(tmp_path=tmp_path)


def run(case: Case, directory) -> tuple[int, str]:
    """Runs the program of a case as a process: exit code and output."""
    modules = {"mocrun": "moc.launch", "controller": "moc.runtime.controller"}
    file = PROGRAM if case.program == "pretrain" else str(TOOLS / f"{case.program}.py")
    program = ["-m", modules[case.program]] if case.program in modules else [file]
    variables = os.environ | {"MOC_TOKEN": "0" * 64, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.nullcontext() if case.cold else warm.starts():
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", *program, *shlex.split(case.words)],
            cwd=directory,
            env=variables | {"PYTHONPATH": f"{directory}:{REPOSITORY}"} | dict(case.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    return ended.returncode, ended.stdout


def altered(channel: Channel) -> bytes:
    """A message with another last byte."""
    message = b"".join(bytes(part) for part in channel.send(Message({"kind": "state"})))
    return message[:-1] + bytes([message[-1] ^ 1])


def without_fields(channel: Channel) -> bytes:
    """A message that lacks what its kind needs."""
    return b"".join(bytes(part) for part in channel.send(Message({"kind": "beat"})))


STRANGERS = {
    "peer-foreign": lambda hello: b"HTTP/1.1 400 Bad Request",
    "release-mismatch": lambda hello: hello[:8] + b"\xff\xff" + hello[10:],
    "connection-loops": lambda hello: hello,
    "token-mismatch": lambda hello: hello[:-1] + b"\x00" + bytes(32),
}
"""By code, what answers the first bytes of a launcher at the address of the controller."""

PEERS = {"message-altered": altered, "wire-protocol-violated": without_fields}
"""By code, the bytes that a process sends which knows the token."""


@pytest.mark.parametrize("code", [*STRANGERS, *PEERS])
def test_launcher_at_unauthenticated_peer_ends_with_code(code, tmp_path):
    def answer(connection):
        hello = connection.recv(50)
        if code in STRANGERS:
            return connection.sendall(STRANGERS[code](hello))
        channel = Channel(bytes(32), "server", 1 << 20)
        while not channel.is_open:
            channel.receive(hello)
            connection.sendall(channel.handshake_bytes())
            hello = b"" if channel.is_open else connection.recv(1 << 10)
        connection.sendall(PEERS[code](channel))

    def serve(server):
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    answer(connection)
                    while connection.recv(1 << 10):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=[server], daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        case = jobs.script("", 70, "", f"--nnodes 2 --node-rank 1 --rdzv-endpoint {address} --patience 1")
        case.make(tmp_path)
        status, output = run(case, tmp_path)
    assert status == case.status and code in codes_in(output) and "Traceback" not in output, output


@contextlib.contextmanager
def launched(words, directory):
    """A launcher of a script that sleeps, of which something is lost before it ends."""
    (directory / "sleeps.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(1e6)\n")
    with open(directory / "output", "w") as output, warm.starts():
        process = subprocess.Popen(
            [sys.executable, "-m", "moc.launch", *words.split(), "sleeps.py"],
            cwd=directory,
            env=os.environ | {"MOC_TOKEN": "0" * 64, "PYTHONPATH": str(REPOSITORY)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_begun(launcher, directory):
    while not (directory / "begun").exists():
        assert launcher.poll() is None, (directory / "output").read_text()
        time.sleep(0.05)


def test_lost_forkserver_ends_launcher_with_its_code(tmp_path):
    with launched("", tmp_path) as launcher:
        until_begun(launcher, tmp_path)
        for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
            if b"moc.runtime.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        assert launcher.wait() == 70
    assert codes_in((tmp_path / "output").read_text()) == ["zygote-lost"]


def test_second_launcher_of_node_rank_ends_with_code(tmp_path):
    (port,) = free_ports(1)
    words = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --node-rank 1"
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (tmp_path / "zero", one, other):
        directory.mkdir()
    with launched(words.replace("--node-rank 1", ""), tmp_path / "zero"), launched(words, one) as first:
        until_begun(first, one)
        with launched(words, other) as second:
            assert second.wait() == 70
    assert codes_in((other / "output").read_text()) == ["node-rank-taken"]


def test_launcher_without_lost_peer_node_ends_with_code(tmp_path):
    (port,) = free_ports(1)
    words = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --max-wait 1 --silence-timeout 10"
    zero, one = tmp_path / "zero", tmp_path / "one"
    zero.mkdir()
    one.mkdir()
    with launched(words, zero) as first:
        with launched(f"{words} --node-rank 1", one) as second:
            until_begun(second, one)
        assert first.wait() == 75
    assert codes_in((zero / "output").read_text()) == ["nodes-missing"]


HERE_TOO = {"zygote-lost", "node-rank-taken", "nodes-missing"}
"""Codes of the three tests above."""


def test_each_documented_code_has_command_line():
    """A code is in a table here, or named with the test that has it, or with the reason why no process can have it."""
    codes = documented().keys()
    here = HERE.keys() | JOBS.keys() | STRANGERS.keys() | PEERS.keys() | OTHER_STATE.keys() | HERE_TOO
    assert not codes - here - elsewhere.TESTS.keys() - elsewhere.REASONS.keys()
    assert elsewhere.TESTS.keys() | elsewhere.REASONS.keys() <= codes - here
    for code, file in elsewhere.TESTS.items():
        assert code in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), (code, file)


OTHER_STATE = {
    "optimizer-differs": "--optimizer sgd",
    "schedule-differs": "--lr 2e-3",
}
"""By code, the flags that do not fit the saved state."""


def test_job_that_cannot_load_state_ends_with_code(tmp_path):
    status, output = run(jobs.job("--save saved", 0), tmp_path)
    assert status == 0, output
    saved = tmp_path / "saved"

    @each_row("code", sorted(OTHER_STATE))
    def ends_with_the_code(code, tmp_path):
        status, output = run(jobs.job(f"--load {saved} --train-iters 3 {OTHER_STATE[code]}", 1), tmp_path)
        assert status == 1 and code in codes_in(output) and "Traceback" not in output, output
        assert str(saved) in output

    ends_with_the_code(tmp_path=tmp_path)
