"""The fork server that all these tests stand on."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests import warm
from tests.worlds import WorldFailed, run_world, start_world

BODY = "tests.integration.bodies:"


def test_workers_connect_to_each_other():
    assert run_world(3, BODY + "add_ranks") == [3.0, 3.0, 3.0]


def test_failing_worker_is_reported():
    with pytest.raises(WorldFailed, match="(?s)exit codes .*worker 0.*ZeroDivisionError"):
        run_world(2, BODY + "divide_by_rank")


def test_hanging_world_is_killed():
    with pytest.raises(WorldFailed, match="killed after 1 s"):
        run_world(2, BODY + "hang", timeout=1)


def test_killed_workers_exit_with_minus_9():
    world = start_world(2, BODY + "hang")
    world.kill()
    assert [result.exit for result in world.wait()] == [-9, -9]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in world.pids)


def test_leftover_process_of_worker_is_detected():
    with pytest.raises(WorldFailed, match="left processes behind.*sleep"):
        run_world(1, BODY + "leave_a_process", patience=0.5)


SAYS = r"""
import os, signal, sys
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
print(sys.argv, sys.path[0], os.getcwd(), dict(os.environ), sys.stdin.read(), os.read(int(sys.argv[1]), 9), blocked)
print(os.getppid(), os.getsid(0) == os.getpid(), open("/proc/self/cmdline").read().rstrip("\0").split("\0"))
sys.exit("over")
"""


@pytest.mark.parametrize("how", [["says.py"], ["-W", "ignore", "-m", "says"]], ids=["script", "module"])
def test_warm_program_behaves_as_cold_program(how, tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how_started = dict(cwd=tmp_path, start_new_session=True, text=True, **pipes)
    environment = dict(LC_ALL="C.UTF-8", A="b c")

    def ended(starts):
        reads, writes = os.pipe()
        os.write(writes, b"inherited")
        command = [sys.executable, *how, str(reads), "x y"]
        with starts():
            program = subprocess.Popen(command, env=environment, pass_fds=[reads], **how_started)
        os.close(reads)
        os.close(writes)
        return *program.communicate("asked"), program.returncode

    cold = ended(contextlib.nullcontext)
    assert cold[1:] == ("over\n", 1) and str(os.getpid()) in cold[0]
    assert ended(warm.starts) == cold


def test_killed_warm_program_exits_as_cold_program(tmp_path):
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 9)")
    with warm.starts():
        program = subprocess.Popen([sys.executable, tmp_path / "dies.py"], start_new_session=True)
    assert program.wait(60) == -9
