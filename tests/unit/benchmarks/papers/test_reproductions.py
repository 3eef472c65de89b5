"""How near the figures of the papers ours come."""

import itertools
import re

import numpy as np
import pytest

from benchmarks.papers import moetion, moevement
from benchmarks.papers.program import OF_LOADS, REPRODUCTIONS, main
from tests.unit.policy.routing import RECORDED


@pytest.fixture(scope="module")
def table_3():
    return moevement.table_3()


def errors(found):
    return [error for row in found.rows if row.kind == "ettr" for error in row.errors()]


def test_moevement_table_3_errors_are_bounded(table_3):
    ettr = errors(table_3)
    assert len(ettr) == 60 and sum(ettr) / 60 <= 2 and max(ettr) <= 5
    assert table_3.order_right == (20, 20)


def test_rows_with_failures_are_shown_under_common_law_too(table_3):
    """At 10 minutes, where the number of failures was fitted; elsewhere Table 3's law is the common one."""
    rows = [row for row in table_3.rows if row.kind == "ettr"]
    assert all((row.common != row.ours) == (", 10 min," in row.label) for row in rows)
    common = [error for row in rows for error in row.errors(common=True)]
    assert len(common) == 60 and max(common) > 2 * max(errors(table_3))
    headline = "\n".join(table_3.summary())
    assert f"worst {max(common):.1f}" in headline and f"worst {max(errors(table_3)):.1f}" in headline
    assert "0.24 GB/s" in headline and "155 s" in headline and "600 s" in headline


def test_gemini_oracle_intervals_match_paper(table_3):
    intervals = [row for row in table_3.rows if "interval" in row.label]
    assert len(intervals) == 4 and max(row.error for row in intervals) <= 1.5


@pytest.mark.slow
def test_moevement_table_7_errors_are_bounded():
    found = moevement.table_7()
    ettr = errors(found)
    assert len(ettr) == 44 and sum(ettr) / 44 <= 3 and max(ettr) <= 6
    assert found.order_right == (15, 15)
    intervals = [row for row in found.rows if "interval" in row.label]
    beyond = [row.label.split(", Gemini")[0] for row in intervals if row.error > 1.5]
    assert beyond == ["FP8, FP32, FP32+FP32, 60 min", "FP8, FP8, FP8+FP16, 60 min"]  # see docs/results/papers.md
    assert max(row.error for row in intervals) < 1.6


def test_moevement_figure_11_errors_are_bounded():
    found = moevement.figure_11()
    assert max(errors(found)) <= 4
    printed = {row.label: row.ours for row in found.rows}
    assert printed["671B, 10 min, MoEvement"] > printed["671B, 10 min, Gemini"] + 0.2


def test_sizes_and_lost_tokens_are_near_those_of_papers():
    full, ours, partial = (REPRODUCTIONS[f"{name}"]() for name in ("moc-fig10", "moc-fig15", "moetion-fig9"))
    assert all(row.errors()[0] <= 1.5 for row in full.rows if "K = 1, " not in row.label)
    assert all(row.holds for row in ours.rows if row.bound)
    assert all(row.error <= 1.1 for row in partial.rows)


def test_moetion_figure_4_is_reproduced():
    """587 to 61 GB, and the reduction of section 4.1 by its own share of experts."""
    everything, some, *_, reduction = moetion.figure_4().rows
    assert (everything.paper, some.paper) == (587, 61) and max(everything.error, some.error) < 1.02
    assert reduction.ours == pytest.approx(74.4, abs=0.05) and reduction.ours == pytest.approx(75, rel=0.02)
    assert reduction.excluded  # two experts were chosen for it


@pytest.mark.slow
def test_moetion_figure_11_has_expected_ratios():
    if not RECORDED.exists():
        pytest.skip("the recorded loads are not at hand")
    *rows, most = moetion.figure_11(moetion.read_loads(RECORDED)).rows
    assert [row.ours for row in rows[::2]] == pytest.approx([1.55, 1.80, 3.06, 7.36], rel=0.01)
    assert [row.ours for row in rows[1::2]] == pytest.approx([2.74, 3.12, 4.74, 11.99], rel=0.01)
    assert [bool(row.excluded) for row in rows[::2]] == [True, True, False, False]
    assert all(row.excluded for row in (*rows[1::2], most))


def test_moetion_figure_10_rows_are_excluded():
    """No row counts, since all need what the paper does not state; gradients by the experts that recur elsewhere."""
    found = moetion.figure_10()
    assert [round(row.paper, 1) for row in found.rows] == [86.5, 64.2, 55.7, 31.0]
    assert [round(row.ours, 1) for row in found.rows] == [72.3, 80.0, 53.5, 30.9]
    assert all(row.excluded for row in found.rows) and "Nothing here" in found.summary()[1]
    if not RECORDED.exists():
        pytest.skip("the recorded loads are not at hand")
    loads = moetion.read_loads(RECORDED)
    quarter, chosen = len(loads[0][0]) // 4, []

    def algorithm_1(*of):
        chosen.append(moetion._algorithm_1(*of))
        return chosen[-1]

    moetion.at_risk(loads, quarter, algorithm_1)
    pairs = list(itertools.pairwise({(layer, e) for layer in one for e in one[layer]} for one in chosen))
    recur = sum(len(one & other) for one, other in pairs) / sum(len(other) for _, other in pairs)
    assert recur == pytest.approx(moetion._RECURRING, abs=0.01)


def test_deviation_above_paper_fails_the_bound():
    """59 % where the paper has 29 % is an error of 30 points, though the paper's reduction is reached."""
    worst = max(REPRODUCTIONS["moc-fig10"]().rows, key=lambda row: abs(row.error))
    assert (worst.paper, round(worst.ours)) == (29, 59) and worst.errors() == [pytest.approx(30.2, abs=0.1)]


def test_command_prints_figure_and_refuses_unknown_name(capsys):
    assert main(["moevement-fig1"]) == 0
    assert "absolute error" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["moevement-fig2"])
    said = capsys.readouterr().err
    assert all(name in said for name in (*REPRODUCTIONS, *OF_LOADS))


def test_recorded_loads_are_required_only_where_used(tmp_path, capsys):
    for command, sentence in (
        (["moetion-fig11"], "moetion-fig11 needs recorded loads of experts: give them by --routing FILE"),
        (["moetion-fig11", "--routing", str(tmp_path / "none")], "cannot read tokens"),
        (["moetion-fig4", "--routing", str(tmp_path)], "moetion-fig4 takes no recorded loads: drop --routing"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert sentence in capsys.readouterr().err
    np.savez(tmp_path / "loads.npz", tokens=np.array([[[9, 3, 0, 0, 5, 1, 1, 1]] * 2] * 12))
    assert main(["moetion-fig11", "--routing", str(tmp_path / "loads.npz")]) == 0
    assert re.search("2 layers .* 8 experts, 12 ", capsys.readouterr().out)
