"""What a recovery was made of, from events."""

from moc.simulate.policy_costs import RecoveryCosts
from moc.simulate.profile import Recovered, faults, fitted, recovered, stretches


def event(kind, time, **fields):
    return {"type": kind, "time": time, **fields}


def iteration(number, time):
    return event("iteration", time, iteration=number, elapsed_s=1.0)


KILL = event("inject", 10.0, action="kill", rank=2)
GENERATION = event("generation", 11.5, noticed_s=0.125, met_s=1.25)  # so they had stopped at 10.25
RESUME = event("resume", 13.0, iteration=8, seconds=1.0)
START = event("start", 13.25, iteration=8)
RECOVERY = [KILL, GENERATION, RESUME, START, iteration(9, 15.5)]
BEFORE, AFTER = [iteration(7, 8.5), iteration(8, 9.5)], [iteration(10, 16.5)]
FOUND = RecoveryCosts(detect_s=0.25, regroup_s=1.75, transfer_s=1.0, warm_up_s=1.5)


def test_recovery_is_extracted_and_split_into_parts():
    (found,) = stretches([*BEFORE, *RECOVERY, *AFTER])
    assert found == RECOVERY
    parts = recovered(found, usual_s=1.0).parts
    assert parts == FOUND
    assert parts.restart_s == 15.5 - 10.0 - 1.0  # from the loss to the first iteration, less a usual one


def test_iteration_before_detection_belongs_to_failure():
    late = iteration(9, 10.125)
    (found,) = stretches([*BEFORE, KILL, late, *RECOVERY[1:]])
    assert found == [KILL, late, *RECOVERY[1:]]


def test_loss_during_recovery_restarts_it():
    first = [event("inject", 5.0, action="kill", rank=1), event("resume", 7.0, seconds=0.5, iteration=8)]
    # the last loss is not noticed before those that are left have done another iteration
    again = [*first, event("start", 7.5), KILL, iteration(9, 10.125), *RECOVERY[1:]]
    (found,) = stretches([*BEFORE, *again])
    assert found == again and recovered(found, 1.0) == (1, FOUND)


def test_frozen_iterations_do_not_count_as_loading():
    again = [event("replay", 12.5, seconds=0.25, frozen=2), event("replay", 12.75, seconds=0.5, frozen=1)]
    _, parts = recovered([KILL, GENERATION, *again, RESUME, START, iteration(9, 15.5)], 1.0)
    assert parts.frozen_s == 0.375 and parts.transfer_s == 0.25
    assert parts.restart_s + 0.75 == FOUND.restart_s and parts.alone_s is None


def test_localized_stages_replay_before_joining():
    again = [event("replay", 12.25, seconds=0.25, frozen=2), event("replay", 12.75, seconds=0.125, frozen=0)]
    _, parts = recovered([KILL, GENERATION, *again, RESUME, START, iteration(9, 15.5)], 1.0)
    assert (parts.frozen_s, parts.alone_s, parts.transfer_s) == (0.25, 0.125, 0.625)
    assert fitted([Recovered(1, parts), Recovered(1, FOUND)]).alone_s == 0.125


def test_loss_time_is_its_detection_without_injector():
    _, parts = recovered(RECOVERY[1:], 1.0)
    assert parts.detect_s == 0.125 and parts.regroup_s == FOUND.regroup_s
    new = event("generation", 11.5, noticed_s=0.0, met_s=0.25)  # of a first worker that took the lost one's place
    assert recovered([KILL, new, *RECOVERY[2:]], 1.0).parts == RecoveryCosts(0.0, 2.0, 1.0, 1.5)
    assert recovered([new, *RECOVERY[2:]], 1.0) is None


def test_incomplete_or_other_events_are_no_recovery():
    slow = event("inject", 10.0, action="slow", rank=2)
    assert not list(stretches([*BEFORE, slow, *AFTER]))
    assert not list(stretches([*BEFORE, *RECOVERY[:-1]]))
    assert not list(stretches([*BEFORE, *RECOVERY[:-1], event("exit", 14.0, code=75), START, iteration(9, 25.5)]))
    assert recovered([KILL, GENERATION, START, iteration(1, 15.5)], 1.0) is None  # it started over


def test_restarted_job_counts_as_lost_unless_it_had_ended():
    resume, begun = event("resume", 13.0, iteration=8, tier="storage", seconds=1.0), event("start", 1.0, iteration=0)
    again = [resume, START, iteration(9, 15.5)]
    assert list(stretches([begun, *BEFORE, *again, *AFTER])) == [again]
    assert list(stretches([begun, *BEFORE, START, iteration(1, 15.5)])) == [[START, iteration(1, 15.5)]]  # from scratch
    assert not list(stretches([begun, *BEFORE, event("exit", 10.0, code=75), *again, *AFTER]))
    assert not list(stretches([*again, *AFTER]))  # of another run, which has its own events
    live = resume | {"tier": "live"}  # another policy
    assert not list(stretches([begun, *BEFORE, live, START, iteration(9, 15.5)]))
    assert list(stretches([begun, *BEFORE, GENERATION, live, START, iteration(9, 15.5)]))


def test_simultaneous_kills_are_one_fault():
    kills = [event("inject", at, action="kill", rank=rank) for rank, at in enumerate((10.0, 10.125, 11.0, 13.0, 13.2))]
    assert faults([*BEFORE, *kills]) == [(10.0, 2), (11.0, 1), (13.0, 2)]
    second = KILL | {"time": 10.125, "rank": 1}
    assert recovered([KILL, second, *RECOVERY[1:]], 1.0) == (2, FOUND)


def test_recovery_costs_are_fitted_linearly_to_losses():
    other = RecoveryCosts(0.75, 3.25, 3.0, 2.5, frozen_s=2.0)  # 5 s longer, with two more that were lost
    fit = fitted([Recovered(1, FOUND), Recovered(3, other)])
    assert fit == RecoveryCosts(0.5, 2.5 - 2.5, 2.0, 2.0, frozen_s=2.0, more_s=2.5)
    assert fitted([Recovered(2, FOUND)] * 2) == FOUND
    unseen = RecoveryCosts(detect_s=0.0, regroup_s=2.0, transfer_s=1.0, warm_up_s=1.5)  # the same, and nobody told
    assert fitted([Recovered(1, FOUND), Recovered(1, unseen)]) == FOUND
    less = fitted([Recovered(1, other), Recovered(2, FOUND)])
    assert less.more_s == 0 and less.restart_s == (FOUND.restart_s + other.restart_s) / 2
