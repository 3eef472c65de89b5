"""The curve is the run's: torn lines are passed over, and what a resumed run does again replaces the rest."""

import json
import math
import re

import pytest

from moc.report import loss
from moc.report.loss import read_loss_curve, smooth
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


def test_losses_by_iteration(events):
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
    assert run.resumed_at == [] and run.name == "run"


def test_a_resumed_run_undoes_what_came_after_its_checkpoint(events):
    before = [iteration(i, float(i)) for i in range(1, 10)]
    stale = {"type": "evaluation", "iteration": 8, "split": "valid", "loss": 1.0}
    path = events(*before, stale, {"type": "start", "iteration": 5}, iteration(6, 66.0), iteration(7, 77.0))
    run = read_loss_curve(path)
    assert run.series("loss") == ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 66, 77])
    assert run.resumed_at == [5] and run.validation == {}


def test_the_later_line_of_an_iteration_wins(events):
    assert read_loss_curve(events(iteration(1, 5.0), iteration(1, 4.0))).series("loss") == ([1], [4.0])


def test_torn_lines_are_passed_over(events):
    torn = '{"type": "iteration", "iteration": 2, "lo'
    path = events(iteration(1, 5.0), torn + "\n", "7\n", "null\n", iteration(3, 4.0), torn)
    assert read_loss_curve(path).series("loss") == ([1, 3], [5.0, 4.0])


def test_what_is_no_number_is_not_drawn(events):
    path = events(
        iteration(1, 5.0),
        iteration(2, math.nan),
        iteration(3, math.inf),
        iteration(4, None),
        iteration(5, 4.0, skipped=True),
        iteration(6, 3.0),
    )
    assert read_loss_curve(path).series("loss") == ([1, 6], [5.0, 3.0])


def test_smoothing():
    assert smooth([2.0, 2.0, 2.0], 5) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([1.0, 2.0, 6.0, 4.0], 1) == pytest.approx([1.0, 3.0, 4.0, 4.0])
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], 10) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])  # no lag
    assert smooth([1.0, 3.0], 0) == [1.0, 3.0]
    assert smooth([], 3) == []


def test_draws_everything_asked_for(events, tmp_path, capsys):
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
    assert [path.name for path in output.parent.iterdir()] == ["loss.png"]
    assert re.findall(r"\d+", capsys.readouterr().out.rpartition("(")[2]) == ["21", "2"]


def test_the_figure_shows_the_curves(events):
    run = read_loss_curve(events(iteration(1, 5.0), {"type": "start", "iteration": 1}, iteration(2, 3.0)))
    figure = loss.draw_loss_curves([run], "a title", 3, [])
    (panel,) = figure.axes
    raw, smoothed = panel.lines
    (resumed,) = panel.collections
    assert panel.get_title() == "a title"
    assert list(raw.get_ydata()) == [5.0, 3.0]
    assert list(smoothed.get_ydata()) == pytest.approx(smooth([5.0, 3.0], 3))
    assert [segment.tolist() for segment in resumed.get_segments()] == [[[1, 0], [1, 1]]]


def test_a_part_of_a_run(events):
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
def test_mistakes_are_one_sentence(events, tmp_path, capsys, args, code, named):
    path = events(*([iteration(1, 1.0)] if "--smoothing" in args else [{"type": "exit", "iteration": 0}]))
    assert path.exists()
    output = tmp_path / "loss.png"
    assert loss.main([a.format(dir=tmp_path) for a in args] + ["--output", str(output)]) == 1
    err = capsys.readouterr().err
    assert only_code(err) == code and named in err and err.count("\n") == 1
    assert not output.exists()
