"""Process groups that outlive their connections."""

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.integration.tiny import FLAGS, LAYOUTS
from tests.worlds import run_world, start_world

BODIES = "tests.integration.group_bodies"
OPERATIONS = "tests.integration.group_operations:operations"


@pytest.fixture
def store():
    """A store that no worker serves, so that any may die."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=180))


def test_operations_equal_torch_groups_in_every_generation(store):
    torchs = run_world(4, OPERATIONS, port=None)
    ours = run_world(4, OPERATIONS, port=store.port, generations=2)
    assert all(len(worker) == 1 for worker in torchs)
    assert ours == [worker * 2 for worker in torchs]


def test_group_operations_before_between_and_after_generations(store):
    for rank, told in enumerate(run_world(2, f"{BODIES}:between_generations", port=store.port)):
        assert told == {
            "members": [rank == 0, rank == 1],
            "unconnected": "RuntimeError",
            "imported before": True,
            "fake": 2,
            "known": [True, rank, 2, "gloo"],
            "refused": ["ValueError"] * 5,
            "late": [3.0, [1, 0]],
            "split": [3.0, [1, 0]],
            "split again": "ValueError",
            "split over": "Aborted",
            "going on": "",
            "over": ["Aborted"] * 4,
            "between": "RuntimeError",
            "same number": "Aborted",
            "again": [3.0, 3.0, 7],
            "destroyed": [False, "torch.distributed.distributed_c10d"],
            "torch's own": 3.0,
        }


def test_wait_on_live_peer_is_interrupted(store):
    told = run_world(2, f"{BODIES}:wait_for_a_live_peer", port=store.port)[0]
    assert told.pop("after") == 3.0
    assert len(told) == 8
    assert set(told.values()) == {"Aborted"}, told


def test_dead_peer_is_connection_failure_until_generation_ends(store):
    assert run_world(2, f"{BODIES}:suspect", port=store.port)[0] == "PeerFailure"


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "recv"])
def test_waiting_worker_is_aborted_although_sockets_stay_open(store, operation):
    arguments = dict(port=store.port, operation=operation, timeout=60)  # the groups' own: 180
    assert run_world(2, f"{BODIES}:hear_nothing_from_gloo", **arguments)[0] == "Aborted"


@pytest.mark.parametrize("operation", ["all_reduce", "send and recv"])
def test_peer_death_in_mid_message_ends_operation(store, operation):
    arguments = dict(port=store.port, operation=operation, timeout=120, patience=120)  # the groups' own: 180
    first, second = start_world(2, f"{BODIES}:die_in_the_middle_of_a_message", **arguments).wait()
    assert first.value in ("Aborted", "PeerFailure"), first.output
    assert second.exit == -signal.SIGKILL


def test_stuck_gloo_call_ends_by_timeout(store):
    told = run_world(2, f"{BODIES}:end_in_the_middle_of_messages", port=store.port, limit=3.0)
    assert told == [[True, 3.0, 0]] * 2


def test_worlds_of_different_sizes_have_same_groups(store):
    generations, three, two = 10, [6.0, 6.0], [4.0, 4.0]
    workers = run_world(3, f"{BODIES}:move_between_worlds", port=store.port, generations=generations)
    for process, told in enumerate(workers):
        all_three = [*three, process + 1.0, process, 3]
        both = [*two, process + 1.0, process // 2, 2]
        assert told["sums"] == [*([all_three] if process == 1 else [all_three, both]) * (generations // 2)]
        assert told["same"] and told["in another order"] == told["not all"] == "RuntimeError"
        if process == 0:
            assert told["nobody"] == [[1, 3], [0, 2], [-2, 0, -7], 5.0, "RuntimeError", 1.0]
        first, last = told["usage"]
        assert last["threads"] <= first["threads"] and last["descriptors"] <= first["descriptors"] + 5


def test_generation_that_ends_during_start_is_aborted(store):
    first, second = run_world(2, f"{BODIES}:end_while_beginning", port=store.port)
    assert first == {"not at all": "Aborted", "half": "Aborted", "ended before": "Aborted", "then": 3.0}
    assert second == {"then": 3.0}


def test_connect_timeout_applies_only_to_connecting(store):
    told = run_world(2, f"{BODIES}:wait_longer_than_connecting_may_take", port=store.port, seconds=2.0)
    assert told == [["", ""]] * 2


def test_many_generations_leak_no_resources(store):
    told = run_world(2, f"{BODIES}:many_generations", port=store.port, count=40)
    for first, middle, last in told:
        assert last["threads"] <= first["threads"]
        assert last["descriptors"] <= first["descriptors"]
        assert last["memory"] - middle["memory"] < 4096  # KiB in 20 generations; kept buffers alone would be more


def test_survivors_keep_groups_and_training_is_identical(store, data):
    size, layout = LAYOUTS["PP2xEP2"]
    flags = FLAGS | layout | data | dict(train_iters=2)
    reference = run_world(size, "tests.integration.bodies:train", flags=flags)

    world = start_world(size, f"{BODIES}:train", flags=flags, port=store.port, patience=200)
    store.wait([f"ready/{rank}" for rank in range(size)])
    os.kill(world.pids[-1], signal.SIGKILL)
    store.set("dead", b"")
    fresh = run_world(1, f"{BODIES}:replace", flags=flags, port=store.port, rank=size - 1, of=size)
    results = world.wait()

    assert [result.exit for result in results] == [0, 0, 0, -signal.SIGKILL], [r.output for r in results]
    for result, trained in zip(results[:-1], reference, strict=False):
        assert {key: result.value[key] for key in trained} == trained
    for result in results[:-1]:
        assert result.value["died"] in ("PeerFailure, Aborted", "Aborted, Aborted")
    for sums in [*(result.value["sums"] for result in results[:-1]), *fresh]:
        assert len(sums) > 10
        assert all(found == sum(ranks) + len(ranks) for ranks, found in sums), sums
