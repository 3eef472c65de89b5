"""The fork server that all these tests stand on."""

import os

import pytest

from tests.worlds import WorldFailed, run_world, start_world

BODY = "tests.integration.bodies:"


def test_workers_find_each_other():
    assert run_world(3, BODY + "add_ranks") == [3.0, 3.0, 3.0]


def test_a_failing_worker_is_shown():
    with pytest.raises(WorldFailed, match="(?s)exit codes .*worker 0.*ZeroDivisionError"):
        run_world(2, BODY + "divide_by_rank")


def test_a_world_that_hangs_is_killed():
    with pytest.raises(WorldFailed, match="killed after 1 s"):
        run_world(2, BODY + "hang", timeout=1)


def test_killed_workers_say_so():
    world = start_world(2, BODY + "hang")
    world.kill()
    assert [result.exit for result in world.wait()] == [-9, -9]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in world.pids)


def test_what_a_worker_leaves_behind_is_noticed():
    with pytest.raises(WorldFailed, match="left processes behind.*sleep"):
        run_world(1, BODY + "leave_a_process", patience=0.5)
