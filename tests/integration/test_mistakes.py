"""Mistakes of users at the real command line: each ends with its code, a remedy and a non-zero exit code, no traceback.

``tests/codes`` has a command line for each code; here are problems that need a machine, other jobs or signals.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from moc.errors import codes_in
from tests import warm
from tests.integration.mounts import mounted
from tests.shared import ALL
from tests.worlds import REPOSITORY

PROGRAM = str(REPOSITORY / "pretrain_gpt_moe.py")
BASE = (
    "--model micro --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 "
    "--train-iters 2 --micro-batch-size 1 --eval-iters 0 --transformer-impl local"
)


def launched(*words, program=PROGRAM, flags=BASE, **environment):
    """Runs the launcher to its end: exit code, codes in its output, and the output."""
    command = [sys.executable, "-W", "ignore", "-m", "moc.launch", *words, program, *shlex.split(flags)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    ended = subprocess.run(
        command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, start_new_session=True
    )
    output = ended.stdout + ended.stderr
    assert "Traceback" not in output, output
    return ended.returncode, codes_in(output), output


def test_worker_without_our_launcher_checks_flags():
    command = [sys.executable, "-W", "ignore", PROGRAM, *shlex.split(BASE), "--nonsense", "64"]
    variables = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "PYTHONPATH": str(REPOSITORY)}
    flags = ["--pipeline-model-parallel-size", "2"]
    ended = subprocess.run([*command, *flags], env=variables, capture_output=True, text=True)
    assert ended.returncode == 2 and codes_in(ended.stderr) == ["flag-unknown", "workers-not-divisible"]


@pytest.mark.parametrize("flag", ["--save", "--log-dir", "--tensorboard-dir"])
def test_uncreatable_directory_is_refused(flag, tmp_path):
    (tmp_path / "file").touch()
    code, codes, output = launched(flags=f"{BASE} {flag} {tmp_path}/file/directory")
    assert code == 2 and codes[-1] == "output-not-writable" and flag in output


def test_full_log_device_is_refused():
    device = "/dev/full"  # stands for a full disk: what is written fails with the same error
    code, codes, output = launched(flags=f"{BASE} --log-dir {device}")
    assert code == 2 and codes == ["output-not-writable"] and device in output


def test_full_disk_is_refused(tmp_path):
    with mounted(tmp_path / "disk", "64k") as disk:
        with open(disk / "filling", "wb", buffering=0) as file:
            written = 1
            while written:
                try:
                    written = file.write(bytes(1 << 12))
                except OSError:
                    written = 0
        code, codes, output = launched(flags=f"{BASE} --log-dir {disk}")
    assert code == 2 and codes == ["output-not-writable"] and str(disk) in output


def test_read_only_disk_is_refused(tmp_path):
    with mounted(tmp_path / "disk", "64k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, codes, output = launched(flags=f"{BASE} --save {disk}/saved")
    assert code == 2 and codes == ["output-not-writable"] and f"--save {disk}/saved" in output


SNAPSHOTS = f"{BASE} --ckpt-policy full --snapshot-interval 1 --train-iters 1000000"


@pytest.fixture
def forked():
    """Jobs are forked from a warm process."""
    with warm.starts():
        yield


@pytest.mark.usefixtures("forked")
def test_too_little_snapshot_memory_is_refused(tmp_path):
    with mounted(tmp_path / "memory", "64k") as memory:
        flags = f"{SNAPSHOTS} --ckpt-dir {tmp_path}/c --ckpt-tier memory --ckpt-memory-dir {memory}"
        code, codes, output = launched(flags=flags)
    assert code == 1 and codes == ["memory-full"] and "--ckpt-memory-dir" in output, output


def started(flags, output):
    """A job that trains."""
    command = [sys.executable, "-W", "ignore", "-m", "moc.launch", PROGRAM, *shlex.split(flags)]
    with output.open("wb") as file:
        job = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=file, stderr=file, start_new_session=True
        )
    while "saved snapshot of iteration 2" not in output.read_text():
        assert job.poll() is None, output.read_text()
        time.sleep(0.1)
    return job


@pytest.mark.usefixtures("forked")
def test_second_job_in_used_directory_is_refused(tmp_path):
    flags = f"{SNAPSHOTS} --ckpt-dir {tmp_path}/c"
    first = started(f"{flags} --exit-signal-handler", tmp_path / "first")
    try:
        code, codes, output = launched(flags=flags)
        assert code == 2 and codes == ["directory-in-use"] and f"{tmp_path}/c" in output, output
    finally:
        os.killpg(first.pid, signal.SIGTERM)
    assert first.wait() == 75, (tmp_path / "first").read_text()  # it saves its state: nothing was taken from it


@pytest.mark.usefixtures("forked")
def test_locks_of_killed_job_do_not_prevent_start(tmp_path):
    flags = f"{SNAPSHOTS} --ckpt-dir {tmp_path}/c"
    job = started(flags, tmp_path / "first")
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    code, codes, output = launched(flags=f"{flags} --exit-interval 5")
    assert code == 0 and not codes and "loading snapshot" in output, output


@pytest.mark.parametrize("words", ["--rdzv-endpoint 127.0.0.1:{}", "--master-addr 127.0.0.1 --master-port {}"])
def test_used_port_is_refused(words):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, codes, output = launched(*words.format(port).split())
    assert code == 70 and codes == ["port-in-use"], output
    assert str(port) in output and "127.0.0.1" in output and words.split()[-2] in output


def test_arguments_of_other_programs_are_not_parsed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import json, sys\nopen({str(tmp_path / 'words')!r}, 'w').write(json.dumps(sys.argv[1:]))\n")
    code, codes, output = launched(program=str(program), flags="--hiden-size 64 --mock-data")
    assert code == 0 and not codes, output
    assert json.loads((tmp_path / "words").read_text()) == ["--hiden-size", "64", "--mock-data"]


@pytest.mark.parametrize("after_s", [0.4, 2.0, *ALL * [0.0]])
def test_control_c_at_any_time_prints_no_traceback(after_s, tmp_path):
    """From the first line of the launcher on: Python itself prints a traceback while it starts."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "moc.launch",
        PROGRAM,
        *shlex.split(BASE),
        *("--train-iters", "1000000"),
        *("--log-dir", str(tmp_path)),
    ]
    job = subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline()
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate()[0]
    assert job.returncode in (-signal.SIGINT, 128 + signal.SIGINT), output
    assert "Traceback" not in output, output
