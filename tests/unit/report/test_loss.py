"""The curve is the run's: torn lines are passed over, and what a resumed run does again replaces the rest."""

import json
import math
import re

import pytest

from moc.plots import add_legend, styled
from moc.report import loss
from moc.report.loss import draw_losses, read_loss_curve, smooth
from tests.errors import only_code

PNG = b"\x89PNG\r\n\x1a\n"


def iteration(i, loss, **more):
    return {"type": "iteration", "iteration": i, "loss": loss, "learning_rate": 1e-4, "grad_norm": 1.0} | more


@pytest.fixture
def events(tmp_path):
    """Writes events to tmp_path/run/events.jsonl, strings as they are."""

    def write(*lines, name="run"):
        path = tmp_path / name / "events.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return path

    return write


def test_losses_are_read_by_iteration(events):
    path = events(
        {"type": "start", "iteration": 0},
        iteration(1, 5.0),
        iteration(2, 4.5),
        {"type": "evaluation", "iteration": 2, "split": "valid", "loss": 4.6},
        {"type": "evaluation", "iteration": 2, "split": "test", "loss": 9.9},
        {"type": "save", "iteration": 2},
    )
    run = read_loss_curve(path)
    assert run.series("loss") == ([1, 2], [5.0, 4.5])
    assert run.validation == {2: 4.6}
    assert run.resumed == [] and run.directory.name == "run"


def test_resumed_run_replaces_iterations_after_checkpoint(events):
    before = [iteration(i, float(i)) for i in range(1, 10)]
    stale = {"type": "evaluation", "iteration": 8, "split": "valid", "loss": 1.0}
    path = events(*before, stale, {"type": "start", "iteration": 5}, iteration(6, 66.0), iteration(7, 77.0))
    run = read_loss_curve(path)
    assert run.series("loss") == ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 66, 77])
    assert [mark.at for mark in run.resumed] == [5] and run.validation == {}


def test_later_line_of_iteration_is_used(events):
    assert read_loss_curve(events(iteration(1, 5.0), iteration(1, 4.0))).series("loss") == ([1], [4.0])


def test_torn_lines_are_skipped(events):
    torn = '{"type": "iteration", "iteration": 2, "lo'
    path = events(iteration(1, 5.0), torn + "\n", "7\n", "null\n", iteration(3, 4.0), torn)
    assert read_loss_curve(path).series("loss") == ([1, 3], [5.0, 4.0])


def test_non_numeric_losses_are_not_drawn(events):
    path = events(
        iteration(1, 5.0),
        iteration(2, math.nan),
        iteration(3, math.inf),
        iteration(4, None),
        iteration(5, 4.0, skipped=True),
        iteration(6, 3.0),
    )
    assert read_loss_curve(path).series("loss") == ([1, 6], [5.0, 3.0])


def test_smoothing_uses_complete_windows_only():
    assert smooth([1.0, 2.0, 6.0, 4.0], 1) == pytest.approx([3.0, 4.0])  # complete windows only
    assert smooth([1.0, 3.0], 0) == [1.0, 3.0]
    assert smooth([1.0, 3.0], 1) == smooth([], 3) == []


def test_loss_program_draws_all_requested_curves(events, tmp_path, capsys):
    a = events(
        *(iteration(i, 5 - i / 10) for i in range(1, 20)),
        {"type": "start", "iteration": 19},
        iteration(20, 3.0),
    )
    b = events(iteration(1, 6.0), {"type": "evaluation", "iteration": 1, "split": "valid", "loss": 5.5}, name="b")
    output = tmp_path / "plots" / "loss.png"
    status = loss.main(
        [str(a), "--log-dir", str(b.parent), "--output", str(output), "--title", "both", "--end", "20"]
        + ["--extra", "learning-rate", "grad-norm"]
    )
    assert status == 0
    assert output.read_bytes().startswith(PNG)
    assert sorted(path.name for path in output.parent.iterdir()) == ["loss.png", "loss_dark.png"]
    assert re.findall(r"\d+", capsys.readouterr().out.rpartition("(")[2]) == ["21", "2"]


def test_figure_shows_curves_and_labelled_losses(events):
    lost = {
        "type": "generation",
        "time": 30.0,
        "reason": "killed",
        "noticed_s": 0.1,
        "met_s": 0.2,
        "rank": 3,
        "signal": 9,
    }
    before = [iteration(i, 5 - i / 40, time=float(i)) for i in range(1, 21)]
    after = [iteration(i, 5 - i / 40, time=30.0 + i) for i in range(20, 41)]
    run = read_loss_curve(events(*before, lost, {"type": "start", "iteration": 19, "time": 32.5}, *after))
    with styled() as pyplot:
        figure, panel = pyplot.subplots()
        draw_losses(panel, {"run": run}, "", 3)
        add_legend(panel)
        figure.canvas.draw()
        raw, smoothed, _ = panel.lines
        assert list(raw.get_ydata()) == run.series("loss")[1]
        ends = [line.get_ydata()[-1] - line.get_ydata()[-2] for line in (raw, smoothed)]
        assert ends == pytest.approx([-1 / 40, -1 / 40])  # the mean of a straight line is straight, to its end
        (label,) = (text.get_text() for text in panel.texts)
        assert label.startswith("worker 3 killed") and "12.5 s" in label
        assert panel.get_title(loc="left") and "nats per token" in panel.get_ylabel()
        below = panel.get_legend().get_window_extent().y1
        assert below < panel.get_window_extent().y0  # where it covers no data
        pyplot.close(figure)


def test_iterations_of_run_can_be_selected(events):
    run = read_loss_curve(events(*(iteration(i, 1.0) for i in range(1, 10)))).select_iterations(3, 5)
    assert run.series("loss")[0] == [3, 4, 5]


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        ([], "input-missing", "events.jsonl"),
        (["{dir}/missing.jsonl"], "file-missing", "missing.jsonl"),
        (["{dir}/run"], "run-too-short", "events"),
        (["{dir}/run", "--smoothing", "-1"], "value-out-of-range", "--smoothing"),
    ],
)
def test_user_errors_are_one_sentence(events, tmp_path, capsys, args, code, named):
    path = events(*([iteration(1, 1.0)] if "--smoothing" in args else [{"type": "exit", "iteration": 0}]))
    assert path.exists()
    output = tmp_path / "loss.png"
    assert loss.main([a.format(dir=tmp_path) for a in args] + ["--output", str(output)]) == 1
    err = capsys.readouterr().err
    assert only_code(err) == code and named in err and err.count("\n") == 1
    assert not output.exists()
