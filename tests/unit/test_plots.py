"""Pictures: a light and a dark one of each, names that distinguish runs, and labels of losses."""

import os

import pytest

from moc.plots import LossMark, add_marks, distinct_names, drawings, styled


def test_each_picture_is_drawn_light_and_dark(tmp_path):
    papers = set()
    for figure, [[panel]] in drawings(tmp_path / "plot.png"):
        panel.plot([1], [1], label=r"$\frac{$")  # no mathematics
        panel.legend()
        papers.add(figure.get_facecolor())
    assert sorted(os.listdir(tmp_path)) == ["plot.png", "plot_dark.png"] and len(papers) == 2


def test_failing_drawing_leaves_no_picture(tmp_path):
    with pytest.raises(ZeroDivisionError):
        for _ in drawings(tmp_path / "plot.png"):
            1 / 0  # noqa: B018
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/full/log", "a/sparse/log"], ["full/log", "sparse/log"]),
        (["a/x", "b/y"], ["x", "y"]),
        (["runs/log"], ["runs/log"]),
        (["x\udcff\x1b[2J"], ["x\\udcff\\x1b[2J"]),
        (["a/x", "b/x", "b/x"], ["a/x", "b/x (1)", "b/x (2)"]),
    ],
)
def test_names_distinguish_runs(paths, names):
    assert distinct_names(paths) == names


def test_close_losses_share_label_with_seconds():
    with styled() as pyplot:
        figure, panel = pyplot.subplots()
        panel.plot([0, 100], [0, 1])
        add_marks(
            panel,
            [LossMark(10, "worker 1 killed\udcff", 2.0, 8), LossMark(50, "b", 3.0, 47), LossMark(52, "c", 4.0, 48)],
            "C0",
        )
        first, both = (text.get_text() for text in panel.texts)
        assert first.startswith("worker 1 killed\\udcff") and "2 s" in first
        assert both.startswith("2 losses") and "7 s" in both
        assert len(panel.patches) == 3
        pyplot.close(figure)
