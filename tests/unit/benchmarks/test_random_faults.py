"""What a campaign of random faults takes for a failure."""

import random

import pytest

from benchmarks.faults.run import LAYOUTS, TIERS, End
from benchmarks.random_faults import Row, _differences, _somewhere, computed_again, from_outside, parse, summary

EXPECTED = End({1: (2.0, 0.5), 2: (1.5, 0.4)}, {"box": "a", "other": "b"})


@pytest.mark.parametrize(
    "ended, wrong",
    [
        (End({1: (2.0, 0.5), 2: (1.5, 0.4)}, {"box": "a", "other": "b"}), []),
        (End({1: (2.0, 0.5), 2: (1.5, 0.41)}, EXPECTED.hashes), ["losses differ in iterations [2]"]),
        (End({2: (1.5, 0.4)}, EXPECTED.hashes), ["losses differ in iterations [1]"]),
        (End(EXPECTED.losses, {"box": "a", "other": "c"}), ["1 of 2 tensors differ"]),
        (End(EXPECTED.losses, {}), ["2 of 2 tensors differ"]),
        (End(EXPECTED.losses, EXPECTED.hashes | {"third": "c"}), ["1 of 3 tensors differ"]),
    ],
)
def test_a_run_that_ends_otherwise_has_failed(ended, wrong):
    assert _differences(ended, EXPECTED) == wrong


def test_all_faults_are_counted():
    rows = [
        Row("PP2xEP2", "disk", 0, ["kill 1 at 3, start", "stop 0 at 5, start"]),
        Row(
            "PP2xEP2",
            "memory",
            1,
            ["kill 1 at 4, loading", "keeper 0 at 4, outside"],
            wrong=["exit code 1"],
            again=[2, 5],
        ),
    ]
    assert summary(rows) == {
        "runs": 2,
        "equal": 1,
        "faults": 4,
        "by_point": {"start": 2, "loading": 1, "outside": 1},
        "by_action": {"kill": 2, "stop": 1, "keeper": 1},
        "computed_again": {"recoveries": 2, "mean": 3.5, "most": 5},
        "computed_again_by_all": None,
    }


def test_what_is_computed_again_belongs_to_the_recovery_that_it_ends_with():
    replay, kept, lost = {"type": "replay"}, {"type": "resume", "stages": []}, {"type": "generation"}
    events = [kept, lost, replay, lost, replay, replay, {"type": "resume", "stages": [1]}, {"type": "iteration"}]
    events += [lost, replay, kept]
    assert computed_again(events) == ([2], [1])


@pytest.mark.parametrize("action", ["stop", "slow"])
def test_the_same_seed_meets_the_same_worker(action):
    assert _somewhere(action, random.Random(3), 4, 20) == _somewhere(action, random.Random(3), 4, 20)
    assert parse([]).layouts == list(LAYOUTS)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_done_from_outside_comes_to_pass(layout, tier):
    for seed in range(20):
        done = from_outside(random.Random(seed), layout, tier, 24)
        assert {"controller", "agent", "node"} <= {one.action for one in done}
        assert all(2 <= one.iteration <= 24 - 5 for one in done)
        keepers = [one.node for one in done if one.action == "keeper"]
        assert len(keepers) == ("peers" in tier and layout != "DP4, replicated") and set(keepers) <= {0, 1}
