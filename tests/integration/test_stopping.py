"""Ways to stop before the end, and what the next start finds."""

import os
import signal

import pytest

from benchmarks.live.job import Events
from moc.store import dense_files
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import FLAGS, LAYOUTS, Trained, train
from tests.worlds import run_world, start_world


def start(layout, flags):
    size, parallel = LAYOUTS[layout]
    return start_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags)


def test_exit_interval_saves_and_exits(data, tmp_path):
    flags = data | dict(save=str(tmp_path), log_dir=str(tmp_path), exit_interval=2)
    trained = train("EP2", flags)
    assert trained.codes == [0, 0] and len(trained.records) == 2
    assert dense_files.list_iterations(tmp_path) == [2]
    (left,) = Events(tmp_path / "events.jsonl").of("exit")
    assert (left["iteration"], left["reason"], left["code"]) == (2, "limit", 0)


def test_exit_duration_saves_and_exits(data, tmp_path):
    size, parallel = LAYOUTS["EP2"]
    flags = FLAGS | parallel | data | dict(save=str(tmp_path), exit_duration_in_mins=1, train_iters=100)
    told = Trained(run_world(size, "tests.integration.bodies:train_when_time_flies", flags=flags, calls=3))
    assert told.codes == [0, 0]
    assert dense_files.latest_iteration(tmp_path) == len(told.records) < 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_one_worker_makes_all_save_and_exit(number, data, tmp_path):
    flags = dict(save=str(tmp_path), log_dir=str(tmp_path), train_iters=5000, exit_signal_handler=True)
    world = start("PP2xEP2", data | flags)
    wait_for(lambda: Events(tmp_path / "events.jsonl").of("iteration"))
    os.kill(world.pids[2], number)
    told = Trained([result.value for result in world.wait()])
    assert told.codes == [75] * 4
    assert dense_files.latest_iteration(tmp_path) == len(told.records)
    assert Events(tmp_path / "events.jsonl").of("exit")[0]["reason"] == "signal"


def test_signal_during_evaluation_exits_with_last_checkpoint(data, tmp_path):
    flags = dict(save=str(tmp_path), log_dir=str(tmp_path), exit_signal_handler=True, eval_interval=2, eval_iters=5000)
    world = start("EP2", data | flags)
    wait_for(lambda: len(Events(tmp_path / "events.jsonl").of("iteration")) == 2)
    os.kill(world.pids[1], signal.SIGTERM)
    told = Trained([result.value for result in world.wait()])
    assert told.codes == [75, 75]
    assert dense_files.list_iterations(tmp_path) == [2]
    assert not Events(tmp_path / "events.jsonl").of("evaluation")


def test_signal_during_setup_exits_without_checkpoint(data, tmp_path):
    size, parallel = LAYOUTS["PP2xEP2"]
    flags = FLAGS | parallel | data | dict(save=str(tmp_path), exit_signal_handler=True)
    told = run_world(size, "tests.integration.bodies:train_signalled_in_set_up", flags=flags)
    assert [worker["code"] for worker in told] == [75] * 4
    assert dense_files.list_iterations(tmp_path) == []


def test_signal_without_handler_kills_worker(data, tmp_path):
    world = start("1", data | dict(log_dir=str(tmp_path), train_iters=5000))
    wait_for(lambda: Events(tmp_path / "events.jsonl").of("iteration"))
    os.kill(world.pids[0], signal.SIGTERM)
    assert [result.exit for result in world.wait()] == [-signal.SIGTERM]


def test_non_finite_values_end_run_without_update(data, tmp_path):
    world = start(
        "EP2", data | dict(lr=1e30, min_lr=0.0, lr_warmup_iters=0, clip_grad=0.0, train_iters=50, save=str(tmp_path))
    )
    for rank, result in enumerate(world.wait()):
        assert result.exit == 1
        assert "Traceback" not in result.output
        assert result.output.count("are not finite; no weight has moved") == 1, (rank, result.output)
    assert dense_files.list_iterations(tmp_path) == []
