"""Where failures come from."""

import itertools
import random
import re
from statistics import fmean

import pytest

from moc.simulate.failures import ClusterEvent, Faults, Trace, read_trace
from tests.cases import each_row

BY_NODE = "0,add,node1\n0,add,node2\n0,add,node3\n60000,remove,node2\n60000,remove,node1\n90500,add,node4\n"
BY_COUNT = "2021-12-11, 23:59:30, 8\n2021-12-12, 00:00:30, 8\n2021-12-12, 00:01:30, 5\n2021-12-12, 00:02:00, 6\n"


def first(faults: Faults, count: int, seed: int = 0) -> list[ClusterEvent]:
    return list(itertools.islice(faults.events(random.Random(seed)), count))


def test_random_failures_have_mean_distance_mtbf():
    times = [event.at_s for event in first(Faults(600.0), 4000)]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0 and fmean(gaps) == pytest.approx(600, rel=0.05)
    assert fmean(gap > 600 for gap in gaps) == pytest.approx(0.368, abs=0.03)  # 1 / e: a Poisson process


def test_even_failures_occur_once_per_mtbf():
    times = [event.at_s for event in first(Faults(600.0, evenly=True, together=2), 72)]
    assert [int(at // 600) for at in times] == list(range(72))
    assert len({round(at % 600, 3) for at in times}) == 72
    assert first(Faults(600.0, together=2), 1)[0].lost == 2


def test_both_trace_formats_are_read(tmp_path):
    (tmp_path / "nodes.csv").write_text(BY_NODE)
    assert read_trace(tmp_path / "nodes.csv") == Trace(3, (ClusterEvent(60.0, lost=2), ClusterEvent(90.5, gained=1)))
    (tmp_path / "counts.txt").write_text(BY_COUNT)
    assert read_trace(tmp_path / "counts.txt") == Trace(8, (ClusterEvent(120.0, lost=3), ClusterEvent(150.0, gained=1)))


def test_unordered_trace_changes_are_sorted_with_warning(tmp_path):
    lines = BY_NODE.splitlines(keepends=True)
    (tmp_path / "nodes.csv").write_text("".join(lines[:3] + [lines[5], lines[3], lines[4]]))
    (tmp_path / "sorted.csv").write_text(BY_NODE)
    found, ordered = (read_trace(tmp_path / name) for name in ("nodes.csv", "sorted.csv"))
    assert (found.nodes, found.events) == (ordered.nodes, ordered.events) and not ordered.doubt
    assert found.doubt is not None and re.findall(r"\d+", found.doubt) == ["1", "6", "5"]  # which lines are early


def test_later_line_of_overlapping_counts_is_used(tmp_path):
    """As Bamboo's recorder wrote them: each count for two minutes ahead, and the next one when it changed."""
    seen = (
        "13:07:45, 80",
        "13:08:45, 80",
        "13:09:45, 80",
        "13:08:45, 70",
        "13:09:45, 70",
        "13:09:15, 60",
        "13:12:00, 75",
    )
    (tmp_path / "counts.txt").write_text("".join(f"2021-12-10, {line}\n" for line in seen))
    found = read_trace(tmp_path / "counts.txt")
    assert found.nodes == 80 and re.findall(r"\d+", found.doubt)[:2] == ["2", "7"]
    assert found.events == (ClusterEvent(60.0, lost=10), ClusterEvent(90.0, lost=10), ClusterEvent(255.0, gained=15))


@each_row(
    ("text", "message"),
    [
        ("", "is empty"),
        (BY_NODE + "soon,add,node5\n", "line 7 is not of the form"),
        (BY_COUNT + "tomorrow\n", "line 5 is neither"),
        (BY_NODE + f"{'9' * 400},add,node5\n", "line 7 is not of the form"),
        (BY_NODE + "\u00b2,add,node5\n", "line 7 is not of the form"),
        (BY_COUNT + "2021-12-10, 10:00:00+01:00, 5\n", "line 5 is neither"),
        (BY_COUNT + "2021-12-10, 10:00:00, -5\n", "line 5 is neither"),
        (BY_COUNT + f"2021-12-10, 10:00:00, {'9' * 400}\n", "line 5 is neither"),
    ],
)
def test_invalid_trace_is_refused_with_line(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_failures_require_exactly_one_source():
    for wrong in (
        {},
        {"mtbf_s": 1.0, "trace": (ClusterEvent(1.0, 1),)},
        {"mtbf_s": -1.0},
        {"mtbf_s": 1.0, "together": 0},
    ):
        with pytest.raises(ValueError, match="failure|MTBF"):
            Faults(**wrong)
