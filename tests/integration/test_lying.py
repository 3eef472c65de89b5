"""What a GPU would do to votes, batches, connections and whole jobs, by a device that lies: see :mod:`tests.lying`."""

import re

import pytest

from moc.runtime.membership import MAX_DEVICE_FAILURES
from moc.runtime.termination import LOST
from tests.integration.elastic_jobs import FLAGS as ELASTIC
from tests.integration.elastic_jobs import ZERO, assert_as_of_fixed_members, job_of
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.test_elastic import REPLICATED
from tests.integration.test_groups import store  # noqa: F401  # a fixture
from tests.integration.test_pure_torch import running
from tests.integration.tiny import FLAGS as TINY
from tests.integration.tiny import LAYOUTS
from tests.shared import ALL
from tests.worlds import REPOSITORY, run_world, start_world

BODIES = "tests.integration.lying_bodies"
BODIES_OF_MOVES = "tests.integration.lying_elastic_bodies"


def test_collectives_on_lying_device_match_gloo(store):  # noqa: F811
    honest = run_world(4, "tests.integration.group_operations:operations", port=None)
    for (gloo,), told in zip(honest, run_world(4, f"{BODIES}:operations", port=store.port), strict=True):
        assert told == [{name: gloo[name] for name in told[0]}] * 2 and len(told[0]) == 6


@pytest.mark.parametrize("when", ["vote", "reduce"])
def test_commit_fails_without_contribution_of_each_worker(when, store):  # noqa: F811
    told = run_world(2, f"{BODIES}:vote_while_a_peer_is_gone", port=store.port, when=when)[0]
    assert told in ("Aborted", "PeerFailure")


def test_completed_commits_are_correct_if_generations_end(store):  # noqa: F811
    told = run_world(3, f"{BODIES}:believe", port=store.port, rounds=20)
    for seen in zip(*told, strict=True):  # by generation, how many votes each worker has believed
        assert max(count for count, _ in seen) - min(count for count, _ in seen) <= 1
        assert {problem for _, problem in seen} <= {"Aborted", "PeerFailure"}


def test_host_memory_group_works_in_worlds_of_other_members(store):  # noqa: F811
    assert run_world(3, f"{BODIES}:votes_of_other_worlds", port=store.port) == [[3.0, 2.0], [3.0], [3.0, 2.0]]


def test_interrupted_batch_does_not_block_next_generation(store):  # noqa: F811
    assert run_world(2, f"{BODIES}:cut_off_batch", port=store.port) == [[2.0], [2.0]]


def test_single_rank_groups_connect_on_first_use(store):  # noqa: F811
    assert run_world(2, f"{BODIES}:alone", port=store.port) == [[1, 2, True, [1.0]]] * 2


def test_worker_enqueuing_after_error_is_released_at_once(store):  # noqa: F811
    assert run_world(2, f"{BODIES}:seconds_until_free", port=store.port)[0] < 20  # torch's own: 60


def test_worker_with_device_waiting_for_peer_reports_it(store):  # noqa: F811
    assert run_world(2, f"{BODIES}:one_is_slow", port=store.port) == [[True, False], [False, False]]


def test_unused_groups_are_not_connected(data, store):  # noqa: F811
    size, parallel = LAYOUTS["PP2xEP2"]
    told = run_world(size, f"{BODIES}:connections", port=store.port, flags=TINY | parallel | data)
    assert told == [[[2, 3], ["RuntimeError"] * 2]] * size  # that of all workers, and the pipeline


@pytest.mark.parametrize("stages", [3, 4, 5] if ALL else [3])
def test_interleaved_pipeline_does_not_deadlock(data, store, stages):  # noqa: F811
    """Their transfers are not batched, follow one another on one communicator, and end when they are received."""
    both = dict(pipeline_model_parallel_size=stages, num_virtual_stages_per_pipeline_rank=2, num_layers=2 * stages)
    flags = TINY | data | both | REPLICATED | dict(global_batch_size=2 * stages, train_iters=2)
    told = run_world(stages, f"{BODIES}:train", port=store.port, flags=flags)
    assert told[0] == run_world(stages, "tests.integration.bodies:train", flags=flags)[0]["records"]
    assert len(told[0]) == 2


@pytest.mark.parametrize("batched", [True, False])
def test_unbatched_sends_before_receives_deadlock(store, batched):  # noqa: F811
    told = run_world(2, f"{BODIES}:both_send_first", port=store.port, batched=batched)
    assert told == [[2.0], [1.0]] if batched else told == ["Aborted", "Aborted"]


@pytest.mark.parametrize("unbatched", [False, True])
def test_unbatched_transfers_do_not_wait_for_other_neighbours(unbatched, store):  # noqa: F811
    told = run_world(4, f"{BODIES}:ring", port=store.port, unbatched=unbatched)
    assert told == [[3.0], [0.0], [1.0], [2.0]] if unbatched else told == ["Aborted"] * 4


def test_device_shared_by_two_ranks_is_named(store):  # noqa: F811
    for told in run_world(2, f"{BODIES}:two_on_one_device", port=store.port):
        assert told == "Duplicate GPU detected: ranks [0, 1] are both on 0/0"


def test_subset_exchanges_values_in_host_memory(store):  # noqa: F811
    told = run_world(4, f"{BODIES}:gather_of_some", port=store.port)
    first, second = [[0, "text"], [1, "text"]], [[2, "text"], [3, "text"]]
    assert told == [[first] * 2, [first] * 2, [second], [second]]


def test_peer_lost_while_connecting_does_not_block_other(store):  # noqa: F811
    world = start_world(2, f"{BODIES}:lost_while_connecting", port=store.port)
    assert world.wait()[0].value == "Aborted"


@pytest.mark.recovery
def test_killed_job_on_lying_device_is_bit_identical(data, tmp_path, monkeypatch):
    monkeypatch.setenv("LYING_DEVICE", '{"seed": 3, "spares": [0, 1, 2, 3]}')
    snapshots = dict(ckpt_policy="full", ckpt_tier="memory", snapshot_interval=1, persist_interval=4)
    records = []
    for kills in ((), (1, 2, 3, 0)):
        with node_memory() as memory:
            places = dict(ckpt_dir=str(tmp_path / f"c{len(kills)}"), ckpt_memory_dir=memory)
            flags, directory = data | snapshots | places | dict(train_iters=14), tmp_path / f"job{len(kills)}"
            program = "tests/integration/lying_pretrain_gpt_moe.py"
            with Launched("PP2xEP2", flags, directory, program=program) as job:
                for rank in kills:
                    job.reach(job.iteration + 2)
                    before = job.pids
                    job.kill(rank)
                    job.replaces(before, rank)
                assert job.wait() == 0, job.console[-4000:]
                records.append(job.records())
    assert records[0] == records[1] and len(records[0]) == 14


@pytest.mark.recovery
def test_broken_device_ends_its_node_after_replacements(tmp_path, monkeypatch):
    monkeypatch.setenv("LYING_DEVICE", '{"seed": 1, "breaks": 1.0, "spares": [0]}')
    program = REPOSITORY / "tests" / "integration" / "lying_pure_torch.py"
    with running(tmp_path / "run", iterations=10**6, program=program) as run:
        for number in range(MAX_DEVICE_FAILURES):
            run.reach(20 * (number + 1))
            run.kill(0)  # the abort breaks the device of the other one
            run.generation(2 * number + 1)
        assert run.process.wait(120) == LOST
    assert run.console.count("it ends itself, to be replaced") == MAX_DEVICE_FAILURES
    why = r"it (has a device that does not work any more|cannot continue) \(.*(NCCL|CUDA) error: "
    assert re.search(rf"worker 1 was killed by signal 9: {why}", run.console)
    assert (
        f"as were {MAX_DEVICE_FAILURES - 1} before it with device 1 of node 0: the node gives up its place"
        in run.console
    )


@pytest.mark.recovery
def test_device_failure_after_last_iteration_is_harmless(tmp_path, monkeypatch):
    monkeypatch.setenv("LYING_DEVICE", '{"breaks": 1.0, "how": ["fails"]}')
    program = REPOSITORY / "tests" / "integration" / "lying_pure_torch.py"
    with running(tmp_path / "run", iterations=20, program=program) as run:
        assert run.process.wait(120) == 0, run.console
    assert run.console.count("has done its work, and leaves (1 of 1 NCCL groups could not be aborted") == 2


@pytest.mark.parametrize("rounds", [12] if not ALL else [200])
def test_workers_lost_during_transfer_keep_other_state(data, rounds, store):  # noqa: F811
    size, parallel = LAYOUTS["DP3"]
    flags = TINY | parallel | data | ELASTIC | ZERO | dict(elastic_slots=4)
    told = run_world(
        size, f"{BODIES_OF_MOVES}:moves", port=store.port, flags=flags, rounds=rounds, seed=rounds, timeout=20 * rounds
    )
    assert sum(worker["cut_off"] for worker in told) > 0 and sum(worker["landed"] for worker in told) > 0
    assert [worker["wrong"] for worker in told] == [0] * size


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("point", "zero"), [("landed", True), ("landed", False), ("rebalancing", False)] if ALL else [("landed", True)]
)
def test_nodes_lost_during_state_transfer_on_lying_device(data, tmp_path, point, zero):
    faults = ["kill node=2 iteration=4", f"kill node=3 iteration=4 point={point}"]
    more = dict(use_distributed_optimizer=zero, program="tests/integration/lying_losing_pretrain_gpt_moe.py")
    with job_of(data, tmp_path, faults, **more) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data)
    assert {event["tier"] for event in job.events("resume")} == {"live"}
    assert [event["world_size"] for event in job.events("start")] == [4, 2]


@pytest.mark.recovery
def test_worker_slow_outside_steps_starts_no_generation(data, tmp_path, monkeypatch):
    """The others wait in their steps, on the device, for longer than a step may take."""
    monkeypatch.setenv("LYING_DEVICE", "{}")
    snapshots = dict(ckpt_policy="full", ckpt_tier="memory", snapshot_interval=1, ckpt_dir=str(tmp_path / "snapshots"))
    faults = ["slow rank=0 iteration=4 point=snapshot_committed seconds=9"]
    with node_memory() as memory:
        flags = data | snapshots | REPLICATED | dict(ckpt_memory_dir=memory, train_iters=8, inject=faults)
        own, program = ["--hang-timeout", "step=4"], "tests/integration/lying_pretrain_gpt_moe.py"
        with Launched("DP2", flags, tmp_path / "job", *own, program=program) as job:
            assert job.wait() == 0, job.console[-4000:]
            assert "injected: slow" in job.console and job.events("generation") == []
