"""Our own launcher: workers are lost, the others live on, and the run ends as if nothing had been."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from moc.store.places import LocalPlace
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, train
from tests.integration.tiny import SHALLOW

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
    return contents(Store(LocalPlace(Path(flags["ckpt_dir"]))), ITERATIONS)


def assert_nobody_can_tell(job: Launched, flags: dict, expected: tuple) -> None:
    assert job.wait() == 0, job.console[-4000:]
    assert (job.records(), ended_with(flags)) == expected
    assert job.processes() == []


def test_workers_are_killed(flags, undisturbed, tmp_path):
    with Launched("PP2xEP2", flags, tmp_path / "job") as job:
        for iteration, ranks in ((3, [1]), (7, [0]), (11, [2, 3])):
            job.reach(iteration)
            before = job.pids
            job.kill(*ranks)
            job.reach(iteration + 2)
            assert {rank for rank, pid in job.pids.items() if pid != before[rank]} == set(ranks)
        assert_nobody_can_tell(job, flags, undisturbed("PP2xEP2"))
    for event in job.events("generation"):
        assert "was killed by signal 9" in event["reason"] and event["met_s"] > 0
    for event in job.events("resume"):
        assert event["tier"] == "memory" and event["kept"] in (0, 2, 3)  # 0: it had not sealed what the others had


def test_one_hangs_and_the_controller_dies(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", "--silence-timeout", "6") as job:
        job.reach(3)
        os.kill(job.children("moc.runtime.controller")[0], signal.SIGKILL)
        job.reach(5)
        job.kill(1, number=signal.SIGSTOP)
        job.reach(8)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
        assert "the controller has died: started again" in job.console


def test_there_is_no_snapshot_to_go_back_to(flags, undisturbed, tmp_path):
    with Launched("EP2", flags | dict(snapshot_interval=ITERATIONS), tmp_path / "job") as job:
        job.reach(4)
        job.kill(0)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "starts over" in job.console


def test_a_replica_gives_what_is_lost_and_nobody_goes_back(flags, undisturbed, tmp_path):
    replicated = dict(expert_model_parallel_size=1, use_distributed_optimizer=False)
    # the first worker dies before it reports what it has completed
    faults = dict(inject="kill rank=0 iteration=4 point=after_apply; kill rank=1 iteration=9 point=forward_backward")
    with Launched("EP2", flags | replicated | dict(snapshot_interval=ITERATIONS) | faults, tmp_path / "job") as job:
        assert_nobody_can_tell(job, flags, undisturbed("EP2", **replicated))
        assert [(event["tier"], event["kept"]) for event in job.events("resume")] == [("live", 1)] * 2
        assert [event["iteration"] for event in job.events("iteration")] == list(range(1, ITERATIONS + 1))


def test_a_worker_is_lost_while_all_build(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job") as job:
        while 1 not in job.pids:
            time.sleep(0.01)
        job.kill(1)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_a_spare_takes_the_place_of_a_lost_node_which_comes_back_as_a_spare(flags, undisturbed, tmp_path):
    flags = flags | dict(ckpt_tier="disk")
    with Launched("EP2", flags, tmp_path / "job", "--silence-timeout", "10", nodes=2, spares=1) as job:
        job.reach(5)
        for lost, instead in ((1, 2), (2, 1)):
            job.lose(lost)
            job.reach(job.iteration + 3)
            assert f"node {lost} is lost, and node {instead} takes its place" in job.console
            if lost == 1:
                job.start(1)
                job.tells("node 1 is there, and waits as a spare")
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_a_lost_node_that_nobody_replaces_ends_the_job(flags, tmp_path):
    own = ["--max-wait", "1", "--silence-timeout", "5"]
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job", *own, nodes=2) as job:
        job.reach(2)
        job.lose(1)
        assert job.wait() == 75
        assert "node 1 is missing, and nobody has come for 1 s (--max-wait)" in job.console
        assert job.processes() == []
    assert list(Path(flags["ckpt_memory_dir"]).rglob("manifest.json"))  # what the nodes have in memory stays there


def test_a_spare_on_the_same_machine_takes_over(flags, undisturbed, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", "--spares", "1") as job:
        job.reach(3)
        job.tells("node 1 is there, and waits as a spare")
        os.kill(job.children("moc.runtime.zygote")[0], signal.SIGKILL)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
        assert "node 0 is lost, and node 1 takes its place" in job.console


def test_a_worker_that_computes_for_ever_is_replaced(flags, undisturbed, tmp_path):
    own = ["--hang-timeout", "step=10", "--silence-timeout", "5"]
    with Launched("EP2", flags, tmp_path / "job", *own, program="tests/integration/hanging.py") as job:
        job.reach(5)
        before = job.pids
        job.reach(7)
        assert before[0] == job.pids[0] and before[1] != job.pids[1]
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))
    assert "worker 1 has been in its step for" in job.console and "worker 0 has been in" not in job.console
    (event,) = job.events("generation")
    assert event["reason"].startswith("worker 1 was killed by signal 9: it had been in its step for")


def test_torchrun_starts_all_of_them_again(flags, undisturbed, tmp_path):
    own = ["--standalone", "--max-restarts", "1"]
    with Launched("EP2", flags, tmp_path / "job", *own, launcher="torch.distributed.run") as job:
        job.reach(5)
        os.kill(job.children("pretrain_gpt_moe.py")[1], signal.SIGKILL)
        assert_nobody_can_tell(job, flags, undisturbed("EP2"))


def test_a_signal_stops_the_job_in_good_order(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with Launched("EP2", flags | dict(train_iters=5000, exit_signal_handler=True), tmp_path / "job") as job:
        job.reach(2)
        assert psutil.Process(job.pids[1]).environ()["MALLOC_ARENA_MAX"] == "2"
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75
        assert job.processes() == []
    assert Store(LocalPlace(Path(flags["ckpt_dir"]))).iterations() == [job.iteration]


@pytest.mark.parametrize(
    "there, iteration",
    [("moc.runtime.controller", 0), ("moc.runtime.zygote", 0), ("moc.runtime.zygote", 2)],
    ids=["while the controller starts", "while workers start", "in training"],
)
def test_control_c_ends_all_of_it(there, iteration, flags, tmp_path):
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job") as job:
        job.starts(there)
        job.reach(iteration)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: to all processes
        assert job.wait() == 130
        assert job.processes() == [] and "started again" not in job.console and "Traceback" not in job.console


@pytest.mark.parametrize("node, missing", [(0, 1), (1, 0)], ids=["for the other", "for the first"])
def test_a_node_that_waits_can_be_asked_to_stop(node, missing, flags, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", nodes=2) as job:
        job.launchers[missing].kill()
        job.starts("moc.runtime.zygote", node)
        job.launchers[node].send_signal(signal.SIGTERM)
        assert job.launchers[node].wait(60) == 143 and "nothing has begun" in job.console


def test_a_stranger_is_refused_in_one_sentence(flags, tmp_path):
    with Launched("EP2", flags, tmp_path / "job", nodes=2) as job:
        job.launchers[1].kill()
        job.launchers[1].wait()
        job._token = "0" * 64
        job.start(1)
        assert job.launchers[1].wait(60) == 70 and "the job's token" in job.console


@pytest.mark.parametrize(
    "mistake, code, sentence",
    [(dict(num_experts=3), 2, "--num-experts"), (dict(ckpt_memory_dir="/dev/null"), 1, "--ckpt-memory-dir")],
    ids=["in the flags", "in what they find"],
)
def test_a_mistake_ends_the_job(mistake, code, sentence, flags, tmp_path):
    with Launched("EP2", flags | mistake, tmp_path / "job") as job:
        assert job.wait() == code and sentence in job.console
        assert job.processes() == [] == job.events("generation")


def test_nothing_is_left_of_a_node(flags, tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    with Launched("EP2", flags | dict(train_iters=5000), tmp_path / "job") as job:
        job.reach(2)
        assert psutil.Process(job.pids[1]).environ()["MALLOC_ARENA_MAX"] == "1"
        os.kill(job.children("moc.runtime.zygote")[0], signal.SIGKILL)
        assert job.wait() == 70, job.console[-4000:]
        assert "mocrun: error: the process that workers are forked from has died" in job.console
        assert job.processes() == []
