"""From what runs tell to what sparse checkpoints cost."""

import pytest

from benchmarks.live.blocks import Blocks, between
from benchmarks.sparse_overhead import AUTO, BASE, GEMINI, LAYOUTS, MODEL, THREE, WAYS, figures, summary, verdicts
from megatron.pretraining.entry.offline import config_of_words
from tests.cases import each_row


def event(kind: str, iteration: int, **fields) -> dict:
    return {"type": kind, "iteration": iteration, **fields}


EVENTS = [
    {"type": "start", "time": 1.0},
    *(event("iteration", i, elapsed_s=9.0 if i < 3 else 0.5) for i in range(1, 7)),
    event("snapshot", 2, bytes=10_000, copy_s=9.0, hash_s=9.0),  # of the warm-up
    event("snapshot", 3, bytes=600, copy_s=0.02, hash_s=0.04),
    event("snapshot", 4, bytes=400, copy_s=0.02, hash_s=0.02),
    event("stall", 4, cause="snapshot", seconds=0.1),
    event("persist", 3, bytes=600, write_s=0.1, publish_s=0.1),
    event("snapshot", 6, bytes=10_000, copy_s=9.0, hash_s=9.0),  # of everything, as the run ends
]


def test_only_counted_iterations_enter_figures():
    told = figures(EVENTS, counted={3, 4})
    assert told == {
        "seconds": [0.5, 0.5],
        "snapshots": [600, 400],
        "copied": 500.0,
        "written": 300.0,
        "waited": 0.05,
        "copying": pytest.approx(0.02),
        "hashing": pytest.approx(0.03),
    }


def of(seconds: float, *snapshots: int) -> dict:
    its = [event("iteration", i, elapsed_s=seconds) for i in (1, 2)]
    return figures([*its, *(event("snapshot", 1, bytes=b, copy_s=0.0, hash_s=0.0) for b in snapshots)], {1, 2})


ROUNDS = [
    {BASE: of(1.0), AUTO: of(1.01, 900), THREE: of(1.5, 450, 300), GEMINI: of(2.0, 1000)},
    {BASE: of(2.0), AUTO: of(2.03, 900), THREE: of(2.5, 440, 300), GEMINI: of(4.0, 1000)},
    {BASE: of(1.0), AUTO: of(1.03, 900), THREE: of(1.0, 450, 300), GEMINI: of(2.0, 1000)},
]


def test_overhead_compares_within_rounds():
    told = summary(ROUNDS)
    assert told[AUTO]["overhead"]["mean"]["median"] == pytest.approx(0.015)
    assert told[THREE]["overhead"]["mean"]["rounds"] == pytest.approx([0.5, 0.25, 0.0])
    assert (told[THREE]["largest"], told[THREE]["iteration_s"], told[BASE]["largest"]) == (450, 1.5, 0)


@each_row("core_left", [True, False])
def test_overhead_is_judged_only_with_spare_core(core_left):
    held = list(verdicts(summary(ROUNDS), core_left).values())
    assert held == [True, True, False] if core_left else [True]


def test_oversized_snapshot_fails_verdict():
    rounds = [{way: told for way, told in one.items() if way != AUTO} | {THREE: of(1.0, 451)} for one in ROUNDS]
    assert list(verdicts(summary(rounds), core_left=False).values()) == [False]


BLOCKS = Blocks(first=10, length=4)


def test_every_second_block_saves():
    assert [i for i in range(26) if BLOCKS.saves(i)] == [*range(14), *range(18, 22)]


def test_block_is_compared_with_its_neighbours():
    slow = {10: 9.0, 14: 9.0, 15: 9.0, 18: 9.0, 22: 9.0, 23: 9.0}  # what begins or ends in them is of two blocks
    blocks = {i: slow.get(i, 1.0 if i < 18 else 1.32 if i < 22 else 1.2) for i in range(40)}
    assert BLOCKS.overheads(blocks) == pytest.approx([0.2, 0.0])
    assert BLOCKS.overheads({}) == []


def test_blocks_decide_verdict_if_present():
    told = summary(ROUNDS)
    told[THREE]["blocks"], told[AUTO]["blocks"] = [0.01, 0.5, -0.3], [0.03]
    assert list(verdicts(told, core_left=True).values()) == [True, False, True]


def test_median_is_reported_with_confidence_bounds():
    low, high = between([0.01] * 9 + [0.5])
    assert (low, high) == (0.01, 0.01)
    low, high = between([-0.1, 0.0, 0.1])
    assert (low, high) == (-0.1, 0.1)


@each_row("way", WAYS)
def test_flags_of_each_case_are_valid(way):
    saving = [*WAYS[way].flags.split(), "--ckpt-dir", "d"] if WAYS[way].flags else []
    config_of_words([*MODEL, *LAYOUTS["PP2xEP2"][1], *saving], None)
