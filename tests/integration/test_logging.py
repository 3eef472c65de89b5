"""What a run leaves behind to be read: console line, events, TensorBoard."""

import json
import re

import pytest

from moc.events import problems
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS
from tests.worlds import start_world


@pytest.fixture(scope="module")
def logged(data, tmp_path_factory):
    """A run that evaluates, saves and logs, its output and its directory."""
    directory = tmp_path_factory.mktemp("logged")
    size, parallel = LAYOUTS["PP2xEP2"]
    flags = FLAGS | parallel | data | FOUR | dict(
        train_iters=4, log_interval=2, eval_interval=2, eval_iters=1, save=str(directory / "saved"), save_interval=3,
        log_dir=str(directory), tensorboard_dir=str(directory / "tensorboard"), log_throughput=True,
        log_num_zeros_in_grad=True, moe_z_loss_coeff=0.001, timing_log_level=2, log_timers_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True, log_params_norm=True, wandb_project="project", wandb_exp_name="run",
        wandb_save_dir=str(directory / "wandb"), mlflow_experiment="experiment",
    )  # fmt: skip
    body, record = "tests.integration.bodies:train_with_services", str(directory / "mlflow")
    results = start_world(size, body, flags=flags, record=record).wait()
    assert [result.exit for result in results] == [0] * 4, results[0].output
    return results, directory


def test_every_event_is_logged(logged):
    _, directory = logged
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [(event, wrong) for event in events if (wrong := problems(event))] == []
    kinds = [event["type"] for event in events]
    assert kinds[0] == "start" and kinds.count("iteration") == 4
    assert kinds.count("save") == 2 and kinds.count("exit") == 1
    evaluated = [(e["iteration"], e["split"]) for e in events if e["type"] == "evaluation"]
    assert evaluated == [(2, "valid"), (4, "valid"), (4, "test")]
    assert [e["iteration"] for e in events if e["type"] == "iteration"] == [1, 2, 3, 4]
    assert [e["consumed_samples"] for e in events if e["type"] == "iteration"] == [4, 8, 12, 16]
    wanted = {"type", "time", "iteration", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped", "tokens",
              "elapsed_s", "load_balancing_loss", "z_loss"}  # fmt: skip
    for event in events:
        if event["type"] == "iteration":
            assert wanted <= set(event)
            assert event["tokens"] == 4 * FLAGS["seq_length"] and event["elapsed_s"] > 0
    assert events[0]["world_size"] == 4 and events[0]["parameters"] > 0


def test_console_line_has_fields_of_megatron(logged):
    results, _ = logged
    lines = re.findall(r"^ \[.*\] iteration +(\d+)/ +4 \|(.*)$", results[-1].output, re.MULTILINE)
    assert [int(number) for number, _ in lines] == [1, 2, 4]
    for name in ("consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)",
                 "learning rate", "global batch size", "lm loss", "loss scale", "grad norm", "num zeros",
                 "number of skipped iterations", "number of nan iterations"):  # fmt: skip
        assert f"{name}:" in lines[0][1], lines[0][1]
    assert "validation loss at iteration 2 | lm loss value:" in results[-1].output
    assert all("lm loss:" not in result.output for result in results[:-1])  # one worker prints


def test_tensorboard_has_expected_scalars(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, directory = logged
    board = EventAccumulator(str(directory / "tensorboard")).Reload()
    tags = set(board.Tags()["scalars"])
    assert {"lm loss", "learning-rate", "grad-norm", "loss-scale", "lm loss validation"} <= tags
    assert [point.step for point in board.Scalars("lm loss")] == [1, 2, 3, 4]
    logged_losses = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in logged_losses if event["type"] == "iteration"]
    assert [point.value for point in board.Scalars("lm loss")] == pytest.approx(losses)
    assert "forward-backward-time" in tags and "moc/max_violation/layer_1" in tags
    assert "train_iters/text_summary" in board.Tags()["tensors"]  # the arguments, as texts


def test_hanging_service_loses_only_its_values(logged):
    _, directory = logged
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    (lost,) = (event for event in events if event["type"] == "log_failed")
    assert lost["what"] == "wandb" and lost["lost"] > 4 * 5


def test_mlflow_receives_losses_of_all_iterations(logged):
    _, directory = logged
    calls = [json.loads(line) for line in (directory / "mlflow").read_text().splitlines()]
    losses = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    losses = {event["iteration"]: event["loss"] for event in losses if event["type"] == "iteration"}
    written = {call[2]: call[1]["moc/loss"] for call in calls if call[0] == "metrics" and "moc/loss" in call[1]}
    assert written == losses and calls[-1] == ["end"]
