"""A worker that joins its agent: it waits for a crowded one, and is lost if it is not admitted."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from moc.runtime import environment, protocol
from moc.runtime.connections import listening_socket
from tests.unit.conftest import REPOSITORY
from tests.unit.runtime.peers import TOKEN, fill, serving

JOINS = """
import functools, sys
from moc.runtime import managed_job
managed_job.retry_connect = functools.partial(managed_job.retry_connect, timeout_s=float(sys.argv[1]))
print("joins", flush=True)
managed_job.ManagedJob.join()
print("is there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def joining(tmp_path):
    """Starts a worker that has so many seconds to join the agent at ``socket``."""
    variables = {
        environment.AGENT: f"unix:{tmp_path}/socket",
        environment.WORKER: "0.1",
        environment.GENERATION: "0",
        environment.STARTS_TOGETHER: "1",
        protocol.TOKEN_VARIABLE: TOKEN.hex(),
    }

    def start(seconds):
        command = [sys.executable, "-c", JOINS, str(seconds)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | variables, **pipes)
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.enter_context(process.stdin)
        stack.enter_context(process.stdout)
        assert process.stdout.readline() == "joins\n"
        return process

    with contextlib.ExitStack() as stack:
        yield start


@pytest.mark.slow
def test_worker_waits_while_agent_queue_is_full(joining, tmp_path):
    address = f"unix:{tmp_path}/socket"
    with contextlib.ExitStack() as crowd:
        listener = listening_socket(address, beyond_loopback=False)
        listener.listen(0)
        fill(f"{tmp_path}/socket", crowd)
        worker = joining(600)
        with pytest.raises(subprocess.TimeoutExpired):  # longer than one attempt to connect takes
            worker.wait(7)
        with serving(address=address, listener=listener):
            assert worker.stdout.readline() == "is there\n"


def test_worker_not_admitted_ends_by_signal(joining):
    assert joining(0).wait() == -signal.SIGKILL  # a signal: the job replaces it
