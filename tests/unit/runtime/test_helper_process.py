"""Processes that work for a worker answer, or are told to have died: nobody waits for ever."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from moc.runtime import child_processes
from moc.runtime.helper_process import HelperError, HelperProcess

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.unit.runtime.helping"


@pytest.fixture
def helper():
    one = HelperProcess(MODULE)
    one.start()
    yield one
    one.close()


def test_helper_process_answers_sequential_calls_of_any_size(helper):
    assert helper.pids == [] and helper.is_running
    pid = helper.call_process({})
    assert helper.pids == [pid]
    for size in (1 << 20, 0, 5):
        assert helper.call_process({"size": size, "given": "y" * size}) == "x" * size


def test_interpreter_output_is_not_read_as_answer(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("print('5'); print('no end', end='')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    helper = HelperProcess(MODULE)
    helper.start()
    assert helper.call_process({"size": 3}) == "xxx"
    helper.close()
    assert capfd.readouterr().err == "5\nno end"


@pytest.mark.parametrize("calls", ["", '{"size": 3}\n', '{"size": 3}\n' * 3])
def test_helper_process_exits_cleanly_if_worker_is_gone(calls):
    reads, writes = os.pipe()
    os.close(reads)
    environment = os.environ | {"PYTHONPATH": str(ROOT), child_processes.REPORT_DESCRIPTOR: str(writes)}
    imports = "from moc.runtime.helper_process import answer_calls", "from tests.unit.runtime.helping import answer"
    serving = "; ".join((*imports, "answer_calls(answer)"))
    done = subprocess.run(
        [sys.executable, "-c", serving], input=calls, env=environment, pass_fds=[writes], capture_output=True, text=True
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


def test_restarted_helper_process_leaks_no_descriptors(helper):
    helper.call_process({})
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(HelperError, match="has died"):
            helper.call_process({"dies": True})
        helper.start()
        helper.call_process({})
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_helper_process_start_is_reported(helper):
    while not helper.has_started():
        time.sleep(0.001)
    assert helper.call_process({"size": 3}) == "xxx" and helper.has_started()


@pytest.mark.parametrize("given", ["", "y" * (1 << 20)], ids=["short", "longer than the pipe"])
def test_unresponsive_helper_process_is_killed(helper, given):
    helper.call_process({})
    (pid,) = helper.pids
    psutil.Process(pid).suspend()
    helper.timeout_s = 0.1
    with pytest.raises(HelperError, match=r"0\.1 s"):
        helper.call_process({"given": given})
    assert helper.pids == [] and not psutil.pid_exists(pid)


def test_dead_helper_process_is_reported_and_restartable(helper):
    with pytest.raises(HelperError, match="has died"):
        helper.call_process({"dies": True})
    with pytest.raises(HelperError, match="has died"):
        helper.call_process({"given": "y" * (1 << 20)})
    assert helper.pids == [] and not helper.is_running
    assert helper.start() and not helper.start()
    assert [helper.call_process({})] == helper.pids


def test_death_before_start_is_reported():
    helper = HelperProcess(MODULE, env={"HELPING_DIES": "1"})
    for ask in (lambda: helper.call_process({}), lambda: [helper.has_started() for _ in range(10**9)]):
        helper.start()
        with pytest.raises(HelperError, match="has died"):
            ask()
    helper.close()


def test_failed_start_is_reported(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(HelperError, match="/nowhere/python"):
        HelperProcess(MODULE).start()


def test_close_ends_pending_call_with_error(helper):
    helper.call_process({})
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(helper.call_process, {"waits_s": 600})
        time.sleep(0.1)
        helper.close()
        with pytest.raises(HelperError, match="has died"):
            asked.result(timeout=60)
    with pytest.raises(HelperError, match="ended"):
        helper.start()


def test_helper_process_ends_with_its_starting_thread():
    helper = HelperProcess(MODULE)
    with ThreadPoolExecutor(1) as one:
        pid = one.submit(lambda: (helper.start(), helper.call_process({}))[1]).result()
    while helper.is_running:
        time.sleep(0.001)
    assert not psutil.pid_exists(pid)
    helper.close()


def test_helper_process_ends_with_worker_during_import(tmp_path):
    """On a busy machine that may take a second, in which there would be a process too many."""
    (tmp_path / "slow.py").write_text(
        "from pathlib import Path; Path(__file__).with_name('imports').touch(); import time; time.sleep(600)"
    )
    (tmp_path / "worker.py").write_text("""\
import sys, time
from moc.runtime.helper_process import HelperProcess
helper = HelperProcess("slow")
helper.start()
print(helper._process.pid, flush=True)
time.sleep(600)
""")
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with subprocess.Popen([sys.executable, tmp_path / "worker.py"], stdout=subprocess.PIPE, env=env) as worker:
        process = psutil.Process(int(worker.stdout.readline()))
        while not (tmp_path / "imports").exists():
            time.sleep(0.001)
        worker.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(timeout=60)
    assert not process.is_running()
