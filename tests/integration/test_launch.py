"""Our own launcher: workers are lost, the others live on, and the run ends as if nothing had been."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from benchmarks.live.job import free_ports
from moc.errors import codes_in
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, train
from tests.integration.strangers import Stranger
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import SHALLOW
from tests.worlds import REPOSITORY

pytestmark = pytest.mark.recovery
ITERATIONS = 16


@pytest.fixture(scope="module")
def data(data):
    """Of the dataset, for a model of two layers."""
    return data | SHALLOW


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with a snapshot in each iteration, in memory."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory)
        yield data | places | dict(ckpt_policy="full", ckpt_tier="memory", snapshot_interval=1, train_iters=ITERATIONS)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """By layout, what a run that loses nobody ends with: records, and the hashes of its last snapshot."""
    known = {}

    def run(layout: str, **more) -> tuple:
        key = layout, *more.items()
        if key not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            flags = dict(
                ckpt_policy="full", snapshot_interval=ITERATIONS, train_iters=ITERATIONS, ckpt_dir=str(directory)
            )
            records = train(layout, data | flags | more).records
            known[key] = [(r["iteration"], r["loss"], r["grad_norm"]) for r in records], ended_with(flags)
        return known[key]

    return run


def ended_with(flags: dict) -> dict:
    """The hash of everything in the last snapshot."""
    return contents(Store(LocalStorage(Path(flags["ckpt_dir"]))), ITERATIONS)


def assert_nobody_can_tell(job: Launched, flags: dict, expected: tuple) -> None:
    assert job.wait() == 0, job.console[-4000:]
    assert (job.records(), ended_with(flags)) == expected
    assert job.left() == []


def test_killed_workers_survive_removed_temporary_files(flags, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with Launched("PP2xEP2", flags, tmp_path / "job") as job:
        for iteration, ranks in ((3, [1]), (7, [0]), (11, [2, 3])):
            job.reach(iteration)
            shutil.rmtree(tmp_path / "tmp", ignore_errors=True)
            before = job.pids
            job.kill(*ranks)
            job.replaces(before, *ranks)
            job.reach(iteration + 2)
            assert {rank for rank, pid in job.pids.items() if pid != before[rank]} == set(ranks)
        assert_nobody_can_tell(job, flags, undisturbed("PP2xEP2"))
    for event in job.events("generation"):
        assert event["cause"] == "worker-lost" and "was killed by signal 9" in event["reason"] and event["met_s"] > 0
        assert event["lost_after"] >= 2 and event["lost_devices"] in ([[0, 1]], [[0, 0]], [[0, 2]], [[0, 3]])
    for event in job.events("resume"):
        assert event["tier"] == "memory" and event["kept"] in (0, 2, 3)  # 0: it had not sealed what the others had


def test_unauthenticated_peers_neither_stop_nor_join_job(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job") as job, Stranger(job.process.pid) as stranger:
        job.reach(3)
        job.kill(1)
        job.reach(6)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert stranger.entered == [] and all(stranger.tried.values())
    assert [event["generation"] for event in job.events("generation")] == [1]


def test_job_survives_hanging_worker_and_killed_controller(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", "--silence-timeout", "6") as job:
        job.reach(3)
        os.kill(job.children("moc.runtime.controller")[0], signal.SIGKILL)
        job.reach(5)
        job.kill(1, number=signal.SIGSTOP)
        job.reach(8)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
        assert "the controller has died: started again" in job.console


def test_controller_killed_before_and_during_rendezvous(flags, undisturbed, tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    slow = dict(inject="slow rank=1 iteration=0 point=ready seconds=3 times=99")
    with Launched("EP2", flags | slow, tmp_path / "job", cold=True) as job:
        for iteration, later in ((3, 0.0), (6, 1.0)):
            job.reach(iteration)
            before, held = job.pids[1], _injected(job)
            job.kill(1)
            deadline = time.monotonic() + 120
            while job.pids[1] == before or (later and _injected(job) == held):
                assert time.monotonic() < deadline, job.console[-4000:]
                time.sleep(0.01)
            time.sleep(later)  # until the others have begun to connect
            os.kill(job.children("moc.runtime.controller")[0], signal.SIGKILL)
            job.reach(iteration + 2)
        assert psutil.Process(job.pids[1]).environ()["MALLOC_ARENA_MAX"] == "1"
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "c10::Error" not in job.console  # torch's own words about the store that has gone


def _injected(job: Launched) -> int:
    return len(list((job.log / "injected").iterdir()))


def test_node_memory_lost_before_first_stored_snapshot(flags, undisturbed, tmp_path):
    own = ["--silence-timeout", "5"]
    with Launched("EP2", flags | dict(persist_interval=ITERATIONS), tmp_path / "job", *own, nodes=2) as job:
        job.reach(4)
        (gone,) = Path(flags["ckpt_memory_dir"]).rglob("*-node-1")
        job.lose(1)
        shutil.rmtree(gone)  # as the memory of its machine would be
        job.start(1)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "nothing-stored-yet" in codes_in(job.console)


def test_job_without_snapshot_starts_over(flags, undisturbed, tmp_path):
    with Launched("EP2", flags | dict(snapshot_interval=ITERATIONS), tmp_path / "job") as job:
        job.reach(4)
        job.kill(0)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "starts over" in job.console


def test_replica_restores_lost_state_without_rollback(flags, undisturbed, tmp_path):
    replicated = dict(expert_model_parallel_size=1, use_distributed_optimizer=False)
    # the first worker dies before it reports what it has completed
    faults = dict(inject="kill rank=0 iteration=4 point=after_apply; kill rank=1 iteration=9 point=forward_backward")
    with Launched("EP2", flags | replicated | dict(snapshot_interval=ITERATIONS) | faults, tmp_path / "job") as job:
        assert_nobody_can_tell(job, flags, undisturbed("EP2", **replicated))
        assert [(event["tier"], event["kept"]) for event in job.events("resume")] == [("live", 1)] * 2
        assert [event["iteration"] for event in job.events("iteration")] == list(range(1, ITERATIONS + 1))


def test_missing_worker_log_directory_ends_no_job(flags, undisturbed, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    with Launched("EP2", flags, tmp_path / "job", "--worker-log-dir", str(output)) as job:
        for generation, iteration in enumerate((3, 7), 1):
            job.reach(iteration)
            shutil.rmtree(output)
            if iteration == 7:
                output.write_text("in its place")
            job.kill(1)
            job.tells(f"generation {generation}: ")
            job.reach(iteration + 2)
            deadline = time.monotonic() + 60
            while iteration == 3 and not (output / "rank_00001.log").exists():
                assert time.monotonic() < deadline, job.console[-4000:]
                time.sleep(0.01)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "rank_00001.log cannot be written (" in job.console


def test_worker_lost_during_setup_is_replaced(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job") as job:
        while 1 not in job.pids:
            time.sleep(0.01)
        job.kill(1)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_lost_node_replaced_by_spare_returns_as_spare(flags, undisturbed, tmp_path):
    flags = flags | dict(ckpt_tier="disk")
    with Launched("EP2", flags, tmp_path / "job", "--silence-timeout", "10", nodes=2, spares=1) as job:
        job.reach(5)
        job.tells("node 2 is there, and waits as a spare")
        for lost, instead in ((1, 2), (2, 1)):
            job.lose(lost)
            job.tells(f"node {lost} is lost, and node {instead} takes its place")
            if lost == 1:
                job.start(1)
                job.tells("node 1 is there, and waits as a spare")
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_loss_of_first_node_is_recovered(flags, undisturbed, tmp_path):
    flags = flags | dict(ckpt_tier="disk")
    own = ["--silence-timeout", "10"]
    with Launched("EP2", flags, tmp_path / "job", *own, nodes=2, spares=1, candidates=3) as job:
        job.reach(4)
        job.tells("node 2 is there, and waits as a spare")
        job.lose(0)
        job.tells("this controller has taken over the job")
        job.tells("node 0 is lost, and node 2 takes its place")
        job.start(0)
        job.tells("node 0 is there, and waits as a spare")
        job.lose(1)  # which leads now
        job.tells("node 1 is lost, and node 0 takes its place")
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_job_without_majority_ends_and_restarts(flags, tmp_path):
    own = ["--patience", "5", "--silence-timeout", "4"]
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job", *own, nodes=2) as job:
        job.reach(2)
        job.lose(0)
        assert job.wait() == 75
        assert "no controller was reachable for 5 s" in job.console and "start the job again" in job.console
        assert job.left() == []


def test_lost_node_without_replacement_ends_job(flags, tmp_path):
    own = ["--max-wait", "1", "--silence-timeout", "5"]
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job", *own, nodes=2) as job:
        job.reach(2)
        job.lose(1)
        assert job.wait() == 75
        assert "node 1 is missing, and no node has connected for 1 s (--max-wait)" in job.console
        assert job.left() == []
    assert list(Path(flags["ckpt_memory_dir"]).rglob("manifest.json"))  # what the nodes have in memory stays there


def test_spare_on_same_machine_replaces_node(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", "--spares", "1") as job:
        job.reach(3)
        job.tells("node 1 is there, and waits as a spare")
        os.kill(job.children("moc.runtime.forkserver")[0], signal.SIGKILL)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
        assert "node 0 is lost, and node 1 takes its place" in job.console


def test_worker_stuck_in_computation_is_replaced(flags, undisturbed, tmp_path):
    own = ["--hang-timeout", "step=10", "--silence-timeout", "5"]
    with Launched("EP2", flags, tmp_path / "job", *own, program="tests/integration/hanging.py") as job:
        job.reach(5)
        before = job.pids
        job.reach(7)
        assert before[0] == job.pids[0] and before[1] != job.pids[1]
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "worker 1 has been in its step for" in job.console and "worker 0 has been in" not in job.console
    (event,) = job.events("generation")
    assert event["cause"] == "worker-lost"
    assert event["reason"].startswith("worker 1 was killed by signal 9: it was in its step for")


def test_torchrun_restarts_all_workers(flags, undisturbed, tmp_path):
    own = ["--standalone", "--max-restarts", "1"]
    served = dict(metrics_port=0) if importlib.util.find_spec("aiohttp") else {}
    with Launched("EP2", flags | served, tmp_path / "job", *own, launcher="torch.distributed.run") as job:
        job.reach(5)
        if served:  # by the first worker
            job.tells("metrics: http")
            (url,) = re.findall(r"metrics: (http\S+)", job.console)
            assert b"moc_iteration " in urllib.request.urlopen(url, timeout=60).read()
        os.kill(job.children("pretrain_gpt_moe.py")[1], signal.SIGKILL)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_signal_saves_and_ends_job(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    stoppable = dict(train_iters=5000, exit_signal_handler=True)
    with Launched("EP2", flags | stoppable, tmp_path / "job", cold=True) as job:
        job.reach(2)
        assert psutil.Process(job.pids[1]).environ()["MALLOC_ARENA_MAX"] == "2"
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75
        assert job.left() == []
    assert Store(LocalStorage(Path(flags["ckpt_dir"]))).iterations() == [job.iteration]


@pytest.mark.parametrize(
    "there, iteration",
    [("moc.runtime.controller", 0), ("moc.runtime.forkserver", 0), ("moc.runtime.forkserver", 2)],
    ids=["while the controller starts", "while workers start", "in training"],
)
def test_control_c_ends_all_processes(there, iteration, flags, tmp_path):
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job") as job:
        job.starts(there)
        job.reach(iteration)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: to all processes
        assert job.wait() == 130
        assert job.left() == [] and "started again" not in job.console
        assert_reported(job.console, "SIGINT", 130)


@pytest.mark.parametrize("nodes", [1, 2])
def test_control_c_does_not_wait_for_imports(nodes, tmp_path):
    """It reaches the launcher of one node, and ends the job on all."""
    warm_up = "def warm_up():\n    open(f'warms {os.getppid()}', 'x').close()\n    time.sleep(3600)\n"
    (tmp_path / "slow.py").write_text(f"import os, time\n{warm_up}if __name__ == '__main__':\n    pass\n")
    command = [sys.executable, "-m", "moc.launch", "--nproc-per-node", "1", "--nnodes", str(nodes)]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"] * (nodes > 1)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "MOC_TOKEN": "0" * 64}
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--node-rank", str(node), "slow.py"],
                    cwd=tmp_path,
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for node in range(nodes)
        ]
        wait_for(lambda: len(list(tmp_path.glob("warms*"))) == nodes)
        jobs[-1].send_signal(signal.SIGINT)
        consoles = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [130] * nodes
    for console in consoles:
        assert_reported(console, "SIGINT", 130)


def assert_reported(console, name, code, iteration=""):
    """One line names the signal, the exit code and the iteration; nothing else reports what the signal has caused."""
    found = [line for line in console.splitlines() if name in line]
    assert len(found) == 1 and f"exit code {code}" in found[0] and "the same command" in found[0], console
    assert iteration in found[0]
    for noise in ("Traceback", "Error", "failed", "was killed by signal", "asked to stop"):
        assert noise not in console, console


@pytest.mark.parametrize("saves", [False, True], ids=["at once", "saved"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name)
def test_signal_is_reported_in_one_line(number, saves, flags, tmp_path):
    with Launched("EP2", flags | dict(train_iters=5000, exit_signal_handler=saves), tmp_path / "job") as job:
        job.reach(3)
        job.process.send_signal(number)
        code = 75 if saves else 128 + number
        assert job.wait() == code
        assert_reported(job.console, number.name, code, f"iteration {job.iteration} " if saves else "iteration ")


def test_signal_during_evaluation_is_reported_in_one_line(flags, tmp_path):
    evaluates = dict(train_iters=10, eval_interval=2, eval_iters=5000, exit_signal_handler=True)
    with Launched("EP2", flags | evaluates, tmp_path / "job") as job:
        job.reach(2)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 75
        assert_reported(job.console, "SIGINT", 75, "iteration 2 ")


@pytest.mark.parametrize("node, missing", [(0, 1), (1, 0)], ids=["for the other", "for the first"])
def test_waiting_node_exits_on_sigterm(node, missing, flags, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", nodes=2) as job:
        job.launchers[missing].kill()
        job.starts("moc.runtime.forkserver", node)
        job.launchers[node].send_signal(signal.SIGTERM)
        assert job.launchers[node].wait() == 143
        assert "SIGTERM" in job.console and "exit code 143" in job.console


def test_launcher_with_wrong_token_is_refused(flags, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", nodes=2) as job:
        job.launchers[1].kill()
        job.launchers[1].wait()
        job._token = "0" * 64
        job.start(1)
        assert job.launchers[1].wait(60) == 70 and "the job's token" in job.console


@pytest.mark.parametrize(
    "mistake, code, sentence",
    [
        (dict(num_experts=3), 2, "--num-experts 3"),
        (dict(ckpt_memory_dir="/dev/null"), 2, "--ckpt-memory-dir"),
        (dict(load="/nowhere", exit_on_missing_checkpoint=True), 1, "--exit-on-missing-checkpoint"),
    ],
    ids=["in the flags", "in a path", "found by workers"],
)
def test_user_error_ends_job_without_restart(mistake, code, sentence, flags, tmp_path):
    with Launched("EP2", flags | mistake, tmp_path / "job") as job:
        assert job.wait() == code and sentence in job.console
        assert job.left() == [] == job.events("generation")


@pytest.mark.parametrize(
    "number, sentence",
    [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "has not answered for 5 s")],
    ids=["killed", "stopped"],
)
def test_node_that_cannot_fork_workers_leaves_no_processes(number, sentence, flags, tmp_path):
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job", "--silence-timeout", "5") as job:
        job.reach(2)
        os.kill(job.children("moc.runtime.forkserver")[0], number)
        assert job.wait() == 70, job.console[-4000:]
        assert f"mocrun: error: the process that workers are forked from {sentence}" in job.console
        assert job.left() == []


def test_stopped_launcher_loses_workers_before_reassignment(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", "--spares", "1", "--silence-timeout", "6") as job:
        job.reach(2)
        job.tells("node 1 is there, and waits as a spare")
        before = dict(job.pids)
        job.process.send_signal(signal.SIGSTOP)  # as by Ctrl-Z
        job.tells("node 0 is lost, and node 1 takes its place")
        job.tells("has lost the controller for too long, and ends itself")
        deadline = time.monotonic() + 120
        while any(job.pids[rank] == before[rank] for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not any(_runs(pid) for pid in before.values())
        job.process.send_signal(signal.SIGCONT)
        job.tells("node 0 is there, and waits as a spare")
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
