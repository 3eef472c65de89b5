"""Which runs are compared, and the arithmetic of spikes and of tokens made up."""

import json
from dataclasses import asdict

import pytest

from benchmarks.accuracy import report
from benchmarks.accuracy.cells import Plan
from benchmarks.selective_accuracy import BOOSTS, SelectiveCell, cells, made_up, spike, summary, verdicts
from megatron.pretraining.entry.offline import config_of_words

PLAN = Plan()


def sample(cell: SelectiveCell, loss: float, worst: float = 0.0, owed=()) -> dict:
    losses = [6.0, 5.0 + worst, loss]
    told = dict(loss=loss, plt=0.02 * len(cell.faults), train_losses=losses) | (dict(owed=owed) if owed else {})
    return json.loads(json.dumps(asdict(cell) | told))


def test_each_seed_has_one_run_without_faults_and_one_for_each_boost():
    free, *others = cells(PLAN, seed=3)
    assert (free.boost, free.faults, free.seed) == (None, (), 3)
    assert [cell.boost for cell in others] == list(BOOSTS) and BOOSTS[0] == 0
    assert {cell.faults for cell in others} == {(51, 102, 154, 205)}


def test_the_program_understands_the_flags(tmp_path):
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023"]
    configs = [config_of_words([*data, *cell.flags(PLAN, tmp_path, tmp_path)], None) for cell in cells(PLAN, seed=1)]
    assert all(config.moe.drops_tokens for config in configs)  # so that all drop the same ones
    assert [config.snapshot.selective_boost for config in configs] == [None, *BOOSTS]
    assert [config.snapshot.ckpt_policy for config in configs] == [None, *["selective"] * len(BOOSTS)]


def test_a_sample_tells_its_cell():
    for cell in cells(PLAN, seed=1):
        assert report.cell_of(sample(cell, 4.0), SelectiveCell) == cell


def test_spikes_are_above_the_same_iteration_without_faults():
    assert spike([6.0, 5.5, 4.1], [6.0, 5.25, 4.0]) == 0.25


def test_tokens_made_up_are_those_no_longer_owed():
    assert made_up([0, 0, 100, 80, 60]) == pytest.approx(0.4)
    assert made_up([0, 100, 50, 150, 150, 0]) == pytest.approx(1.0)  # another 100 were lost meanwhile
    assert made_up([]) == made_up([0, 0]) == 0.0


def test_means_are_over_seeds_and_goals_by_the_worst():
    told = []
    for seed in (1, 3):
        free, *others = cells(PLAN, seed)
        told += [sample(free, 4.0 + seed), *(sample(c, 4.0 + 1.1 * seed, 0.3 * seed, [0, 90, 45]) for c in others)]
    figures = summary(told)
    assert figures["spread_over_seeds"] == pytest.approx(2**0.5)
    assert [row["cell"] for row in figures["summary"]] == [cell.name for cell in cells(PLAN, 1)[1:]]
    row = figures["summary"][1]
    assert (row["seeds"], row["plt"], row["made_up"]) == (2, pytest.approx(0.08), pytest.approx(0.5))
    assert (row["difference"], row["lowest"], row["highest"]) == pytest.approx((0.2, 0.1, 0.3))
    assert row["spike"] == pytest.approx(0.9)
    assert [holds for what, holds in verdicts(figures).items() if "spike" in what] == [False] * 3
    assert [holds for what, holds in verdicts(figures).items() if "within" in what] == [True] * 3
    assert summary([])["summary"] == [] and summary(told[:1])["spread_over_seeds"] is None
