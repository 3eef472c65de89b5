"""Local sockets of jobs: other users do not reach them, crowds do not end a job, and nothing of them is left."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from moc.store.host_memory import SOCKETS_DIRECTORY, user_directory
from tests.integration import loses_one, socket_attacker
from tests.shared import ALL
from tests.worlds import REPOSITORY

pytestmark = pytest.mark.recovery
BATCHES, JOBS = (50, 2) if ALL else (1, 2)  # in each
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


def start(*flags: str, path: Path | None = None) -> subprocess.Popen:
    """Starts a job of two workers, of which one is lost.

    Args:
        flags: of the program.
        path: searched for modules before the repository.
    """
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{path or REPOSITORY}:{REPOSITORY}"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moc.launch", "--nproc-per-node", "2", loses_one.__file__, *flags],
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def ends(job: subprocess.Popen) -> str:
    """Waits until a job has ended as it should; what was on its console."""
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0 and said.count("sum 2") == 2, said[-4000:]
    assert said.count("was killed by signal 9") == 1, said[-4000:]
    return said


def agent_of(job: subprocess.Popen) -> str:
    """The path of the socket at which a job's agent listens."""
    while True:
        for one in psutil.Process(job.pid).net_connections("unix"):
            if one.laddr.endswith("/agent"):
                return one.laddr
        time.sleep(0.01)


@ROOT
@pytest.mark.parametrize("batch", range(BATCHES))
def test_jobs_finish_while_other_user_attacks_sockets(batch):
    command = [sys.executable, socket_attacker.__file__]
    attackers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    for attacker in attackers:
        assert attacker.stdout.readline() == "attacks\n"
    for _ in range(JOBS):
        ends(start())
    for attacker in attackers:
        tried, entered = map(int, attacker.communicate("")[0].split())
        assert tried > 0 and entered == 0


def test_full_socket_queue_of_same_user_does_not_end_job():
    job = start()
    path, over, full = agent_of(job), threading.Event(), []

    def crowd():
        held = []
        while not over.is_set():
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].setblocking(False)
            try:
                held[-1].connect(path)
            except BlockingIOError:
                full.append(None)
            except OSError:  # the job has ended
                break
            while len(held) > 300:
                held.pop(0).close()

    crowds = [threading.Thread(target=crowd) for _ in range(2)]
    for one in crowds:
        one.start()
    try:
        ends(job)
    finally:
        over.set()
        for one in crowds:
            one.join()
    assert full


def test_job_removes_its_sockets_and_those_of_killed_job(tmp_path):
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="x" * 100))  # its paths are longer than the kernel's names
    try:
        flags = "--ckpt-memory-dir", str(memory)
        killed = start(*flags)
        while not list(memory.glob(f"moc-*/{SOCKETS_DIRECTORY}/*/replicas")):
            assert killed.poll() is None, killed.communicate()[0]
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
        home = user_directory(memory)
        assert os.listdir(home) == [SOCKETS_DIRECTORY]
        ends(start(*flags))
        assert os.listdir(home) == []
    finally:
        shutil.rmtree(memory)


@ROOT
def test_directory_of_other_user_is_replaced(tmp_path):
    taken = tmp_path / f"moc-{os.geteuid()}"
    taken.mkdir()
    os.chown(taken, socket_attacker.NOBODY, socket_attacker.NOBODY)
    said = ends(start("--ckpt-memory-dir", str(tmp_path)))
    assert f"{taken}-1" in said
    assert sorted(os.listdir(tmp_path)) == [taken.name, f"{taken.name}-1"]
    assert os.listdir(taken) == os.listdir(f"{taken}-1") == []


@pytest.mark.parametrize("prints", ["print('a line')", "print('no end of the line', end='')", "print('x' * 10**5)"])
def test_sitecustomize_output_does_not_disturb_job(tmp_path, prints):
    for name in ("sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(prints)
    ends(start(path=tmp_path))
