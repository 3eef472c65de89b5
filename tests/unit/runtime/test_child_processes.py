"""Processes that belong to another one."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moc.runtime import child_processes, protocol
from moc.runtime.child_processes import Signals, StoppedError
from moc.runtime.termination import STOP_SIGNALS

ROOT = Path(__file__).parents[3]
CHILD = "tests.unit.runtime.child"


async def started(**how):
    child = await child_processes.start(CHILD, stdout=subprocess.PIPE, cwd=ROOT, **how)
    assert await child.stdout.readline() == b"there\n"
    return child


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_child_survives_signal_during_fork(number):
    async def main():
        child = await started(preexec_fn=lambda: os.kill(os.getpid(), number))
        said = await asyncio.wait_for(child.stdout.readline(), 60)
        assert said.decode().strip() == number.name  # it gets it when it wants it
        child.kill()
        await child.wait()

    asyncio.run(main())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)  # here they are not blocked any more


def test_child_imports_nothing_from_start_directory(tmp_path):
    for name in ("glob", "secrets", "runpy", "asyncio", "sitecustomize", "tests"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")

    async def main():
        child = await child_processes.start(CHILD, stdout=subprocess.PIPE, cwd=tmp_path)
        assert await child.stdout.readline() == b"there\n"
        child.kill()
        await child.wait()

    asyncio.run(main())
    assert not (tmp_path / "ran").exists()


def test_interpreter_output_is_not_read_as_report(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("print('5'); print('no end', end='')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv(protocol.TOKEN_VARIABLE, "0" * 64)

    async def main():
        child = await child_processes.start_reporting("moc.runtime.replica_server", "--listen", "127.0.0.1:0", *orders)
        assert (await child.stdout.readline()).startswith(b"127.0.0.1:")
        assert await child.stdout.read() == b""  # its pipe is closed
        child.kill()
        await child.wait()

    orders = "--orders", f"unix:{tmp_path}/orders"
    asyncio.run(main())
    assert capfd.readouterr().err == "5\nno end"


def test_child_has_own_session():
    async def main():
        child = await started()
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
        child.kill()
        await child.wait()

    asyncio.run(main())


def test_child_dies_with_parent():
    code = f"""
import asyncio
from moc.runtime import child_processes
from moc.runtime import protocol
async def main():
    print((await child_processes.start({CHILD!r}, stdout=-1)).pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()  # before the child has said anything, or after: it makes no difference
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_child_does_not_start_if_parent_is_dead():
    whose = os.environ | {child_processes.PARENT: "1"}
    child = subprocess.run([sys.executable, "-m", CHILD], cwd=ROOT, env=whose, capture_output=True, timeout=60)
    assert child.returncode == 1 and child.stdout == b""


def test_late_listener_receives_earlier_signals():
    async def main():
        signals, heard = Signals(), []
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0)
        with signals.deliver_to(heard.append):
            os.kill(os.getpid(), signal.SIGTERM)
            while len(heard) < 2:
                await asyncio.sleep(0)
        assert heard == [signal.SIGUSR1, signal.SIGTERM]

    asyncio.run(main())


def test_signal_ends_process_whose_console_is_full():
    code = "import os; from moc.runtime.termination import end_on_signals, exit_for_signal as end; "
    code += "end_on_signals(str, end); os.kill(os.getpid(), 15)"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=full, check=False).returncode == 143


def test_signal_cancels_long_wait():
    async def main():
        signals = Signals()
        assert await signals.cancel_on_signal(asyncio.sleep(0, "done")) == "done"
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError, match="SIGTERM"):
            await signals.cancel_on_signal(asyncio.sleep(3600))

    asyncio.run(main())


def test_ended_process_is_dying_until_reaped():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    with process:
        process.stdout.readline()
        assert not child_processes.is_dying(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert child_processes.is_dying(process.pid)
        process.wait()
        assert not child_processes.is_dying(process.pid)
