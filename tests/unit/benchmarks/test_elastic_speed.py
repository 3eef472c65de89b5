"""What benchmarks of elastic jobs say is computed from what they have seen."""

import pytest

from benchmarks.cluster.elastic import as_of_fixed_members, members
from benchmarks.elastic_speed import speeds
from benchmarks.faults.run import End
from tests.cases import each_row


def test_speed_is_compared_with_micro_batch_rounds():
    found = speeds(62, {6: [11.0, 11.2, 11.0], 3: [21.0, 21.0, 30.0]})
    assert found[6] == {"iteration_s": 11.0, "rounds": 11, "speed": 1.0, "promised": 1.0, "off": 0.0}
    assert found[3]["speed"] == pytest.approx(11 / 21, abs=1e-4) and found[3]["promised"] == pytest.approx(
        11 / 21, abs=1e-4
    )


EXPECTED = End({"1": [2.0, 1.0], "2": [1.0, 1.0]}, {"box": "digest"})
EVENTS = [{"type": "start", "world_size": 5}, *({"type": "iteration", "iteration": i} for i in (1, 2))]


def test_losses_may_differ_only_by_rounding():
    assert as_of_fixed_members(End({"1": [2.0, 1.0], "2": [1.000004, 1.1]}, {"box": "other"}), EXPECTED, EVENTS) == []
    (wrong,) = as_of_fixed_members(End({"1": [2.0, 1.0], "2": [1.0001, 1.0]}, {"box": "digest"}), EXPECTED, EVENTS)
    assert "iterations ['2']" in wrong
    assert members(EVENTS) == [5]


@each_row(
    ("event", "sentence"),
    [
        ({"type": "iteration", "iteration": 2}, "computed twice"),
        ({"type": "fallback", "reason": "nobody has it"}, "a checkpoint was read: nobody has it"),
        ({"type": "resume", "tier": "storage"}, "state was loaded from storage"),
    ],
)
def test_forbidden_elastic_events_are_reported(event, sentence):
    (wrong,) = as_of_fixed_members(EXPECTED, EXPECTED, [*EVENTS, event])
    assert sentence in wrong
    assert as_of_fixed_members(EXPECTED, EXPECTED, [*EVENTS, {"type": "resume", "tier": "live"}]) == []
