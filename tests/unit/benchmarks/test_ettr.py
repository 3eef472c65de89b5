"""From what a run tells to its ETTR, and to what the simulator makes of its first half."""

import dataclasses

import pytest

from benchmarks import simulator_vs_real
from benchmarks.ettr.predict import Way, expected, halves, predicted, saving_of
from moc.runtime.fault_injection import parse_faults
from moc.simulate.profile import fitted, profile_of
from tests.cases import each_row

PLAIN_S, SAVING_S, RESTART_S = 0.1, 0.125, 0.75


def run(iterations: int, every: int, back: int = 0, restart_s: float = RESTART_S) -> list[dict]:
    """A run that loses a worker in the middle of each ``every``-th iteration, and goes back by ``back`` of them."""
    now, at, newest, events = 0.0, 0, 0, [{"type": "start", "time": 0.0, "world_size": 4}]
    while at < iterations:
        if newest and newest % every == 0 and at == newest:
            now += SAVING_S / 2
            events.append({"type": "inject", "time": now, "action": "kill"})
            now += restart_s
            events.append({"type": "resume", "time": now, "seconds": 0.25})
            events.append({"type": "start", "time": now, "world_size": 4})
            at, newest = at - back, newest + 1
        now, at = now + SAVING_S, at + 1
        newest = max(newest, at)
        events.append({"type": "iteration", "time": now, "iteration": at, "elapsed_s": SAVING_S})
    return events


def known_of(events):
    known, other = halves(events)
    profile = profile_of(known.events)
    return other, (profile, fitted(profile.recoveries), PLAIN_S)


def test_halves_contain_alternating_parts():
    known, other = halves(run(405, every=50))
    assert [part.iterations for part in known.parts + other.parts] == [50] * 8
    assert known.parts[1].events[0]["time"] > other.parts[0].events[-1]["time"] > known.parts[0].events[-1]["time"]
    assert known.ettr(PLAIN_S) == 200 * PLAIN_S / known.seconds
    assert known.seconds + other.seconds == pytest.approx(400 * SAVING_S + 8 * (RESTART_S + SAVING_S / 2))
    assert len(known.hits) == len(other.hits) == 4
    hit = other.parts[0].hits[0]
    assert (hit.iterations, hit.after_s, hit.lost) == (100 - 55, None, 1)
    assert hit.since_s == pytest.approx(SAVING_S / 2)
    with pytest.raises(ValueError, match="too few"):
        halves(run(6, every=50))


def test_parts_start_at_snapshot_and_not_in_recovery():
    first, second = halves(run(205, every=50), every=8, parts=2)
    assert (first.iterations, second.iterations) == (104 - 8, 205 - 104)
    # A worker is lost in the middle of the run, and the others complete the iteration of the middle before they notice.
    events = run(205, every=104)
    (killed,) = (place for place, event in enumerate(events) if event["type"] == "inject")
    late = {"type": "iteration", "time": events[killed]["time"] + 0.01, "iteration": 105, "elapsed_s": SAVING_S}
    for half in halves([*events[: killed + 1], late, *events[killed + 1 :]], parts=2):
        assert sum(event["type"] == "resume" for event in half.events) == len(half.hits)


def test_loss_before_progress_is_found_by_distance():
    events = run(205, every=150)
    (killed,) = (event for event in events if event["type"] == "inject")
    again = killed | {"time": killed["time"] + 0.5}
    _, second = halves(sorted([*events, again], key=lambda event: event["time"]), parts=2)
    assert [(hit.iterations, hit.after_s) for hit in second.hits] == [(45, None), (45, pytest.approx(0.5))]


@each_row("back", [0, 1])
def test_half_predicts_ettr_of_other_half(back):
    second, known = known_of(run(505, every=25, back=back))
    lag = dataclasses.replace(known[0], usable_s=back * SAVING_S)
    found = predicted(Way(), second, lag, *known[1:])
    assert found == pytest.approx(second.ettr(PLAIN_S), abs=0.005)
    by_chance = expected(Way(), second.seconds, 25, lag, *known[1:])
    assert 0 < abs(by_chance - found) < 0.05


def test_plain_time_above_saving_time_cancels_out():
    second, known = known_of(run(505, every=25))
    slower = 2 * SAVING_S
    assert predicted(Way(), second, *known[:2], slower) == pytest.approx(second.ettr(slower), abs=0.01)


def test_longer_recoveries_are_not_predicted():
    longer, (profile, parts, _) = known_of(run(505, every=25, restart_s=2 * RESTART_S))
    assert parts.restart_s == pytest.approx(2 * RESTART_S)
    usual = dataclasses.replace(parts, regroup_s=parts.regroup_s - RESTART_S)
    assert predicted(Way(), longer, profile, usual, PLAIN_S) > longer.ettr(PLAIN_S) + 0.05


def test_policy_costs_are_converted_to_model_clock():
    profile = dataclasses.replace(profile_of(run(105, every=50)), usable_s=SAVING_S / 4)
    parts = fitted(profile.recoveries)
    dense, plain_s = saving_of(Way(interval=8), profile, parts, PLAIN_S)
    assert (dense.interval, dense.lag, plain_s) == (8, 0.25, PLAIN_S)
    assert dense.stall_s == pytest.approx(8 * (SAVING_S - PLAIN_S)) and dense.replay_s == pytest.approx(SAVING_S)
    window, _ = saving_of(Way(window=3), profile, parts, PLAIN_S)
    assert (window.interval, window.lag, window.conversion) == (3, 2.25, 2)
    assert saving_of(Way(blocking=True), profile, parts, PLAIN_S)[0].lag == 0
    faster, as_fast = saving_of(Way(), profile, parts, 2 * SAVING_S)
    assert faster.stall_s == 0 and as_fast == pytest.approx(SAVING_S)


def test_policy_is_judged_by_all_halves_together():
    plain = [run(50, every=1000)] * 2
    ways = {"full": Way(), "other": Way(window=3)}
    runs = {m: dict.fromkeys(ways, simulator_vs_real.Told(run(405, every=int(m)), plain)) for m in (25.0, 50.0)}
    found = simulator_vs_real.judge(runs, ways)
    lines = simulator_vs_real.table(found)
    assert "every 25 iterations | every 50 iterations" in lines[0] and lines[2].startswith("| full | 0.")
    by = found["full"]
    assert abs(simulator_vs_real.error(by)) < 0.01 and lines[2].endswith(
        f"| {100 * simulator_vs_real.error(by):+.1f} |"
    )
    halved = {25.0: {"measured": 0.5, "seconds": 30.0}, 50.0: {"measured": 0.9, "seconds": 10.0}}
    assert simulator_vs_real.together(halved, "measured") == pytest.approx((15 + 9) / 40)
    with pytest.raises(ValueError, match="run longer"):
        simulator_vs_real.judge({25.0: {"full": simulator_vs_real.Told(plain[0], plain)}}, {"full": Way()})


@each_row(("mean", "iterations", "count"), [(25, 240, 9), (50, 200, 4), (100, 200, 2)])
def test_planned_faults_have_requested_distance(mean, iterations, count):
    faults = simulator_vs_real.planned(mean, iterations, seed=1)
    assert (
        faults == simulator_vs_real.planned(mean, iterations, seed=1) != simulator_vs_real.planned(mean, iterations, 2)
    )
    plan = parse_faults(";".join(faults))
    assert len(plan) == len({fault.iteration for fault in plan}) == count
    assert all(16 <= fault.iteration < iterations - 8 and 1 <= len(fault.ranks) <= 3 for fault in plan)
