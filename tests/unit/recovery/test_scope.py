"""Which stages compute again: those that lost something, and those whose logs are needed and lost; the others stay."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.logs.log import Pipeline
from moc.recovery.plan import InterruptedReplay, JobInventory, Logs, plans, replaying_stages
from moc.recovery.sources import STORAGE, AvailableCheckpoint
from moc.state.operators import Operator

OPERATORS = [Operator("embedding", "embedding", 0, None, 10), Operator("layers.0.expert.0", "expert", 0, 0, 10)]
NAMES = tuple(operator.name for operator in OPERATORS)
FIRST = AvailableCheckpoint(5, STORAGE, {NAMES[0]: "full", NAMES[1]: "compute"})
WINDOW = [FIRST, AvailableCheckpoint(6, STORAGE, {NAMES[1]: "full"})]
NEWEST = 8


def chain(stages: int, chunks: int = 1) -> Pipeline:
    return Pipeline(stages, tuple((i, chunk) for chunk in range(chunks) for i in range(2)))


def logs(pipeline: Pipeline, width: int = 1, **more) -> Logs:
    """Of ``width`` ranks in each stage; all is there from iteration 6 on."""
    stages = {rank: rank // width for rank in range(pipeline.stages * width)}
    feeds = {stage: pipeline.senders(stage) for stage in range(pipeline.stages)}
    kept = dict.fromkeys(stages, range(6, NEWEST + 1))
    return Logs(stages, feeds, kept, **{"records": range(1, NEWEST + 1)} | more)


def inventory(live: dict, of: Logs, held=WINDOW) -> JobInventory:
    return JobInventory(held, live, {rank: dict.fromkeys(NAMES, str(rank)) for rank in of.stages}, of)


def first(*args, **kwargs):
    return next(plans(inventory(*args, **kwargs), OPERATORS, exact=True), None)


def alive(of: Logs, *lost: int) -> dict[int, int]:
    return {rank: NEWEST for rank in of.stages if rank not in lost}


def test_stage_receives_from_its_neighbours():
    assert [chain(3).senders(stage) for stage in range(3)] == [{1}, {0, 2}, {1}]
    assert [chain(3, chunks=2).senders(stage) for stage in range(3)] == [{1, 2}, {0, 2}, {0, 1}]  # a ring
    assert chain(1).senders(0) == set()


def test_only_lost_stage_replays():
    of = logs(chain(4), width=2)
    plan = first(alive(of, 3), of)
    assert (plan.iteration, plan.stages, plan.path.iteration) == (NEWEST, {1}, 6)
    assert plan.keep == {0, 1, 4, 5, 6, 7} and not plan.complete  # 2, its data-parallel peer, goes back with it
    assert plan.replayed_iterations == range(6, NEWEST + 1)


def test_newest_window_with_logs_and_records_is_used():
    everything = AvailableCheckpoint(7, STORAGE, dict.fromkeys(NAMES, "full"))
    of = logs(chain(4))
    plan = first(alive(of, 3), of, held=[everything, *WINDOW])
    assert (plan.path.iteration, plan.replayed_iterations) == (7, range(8, NEWEST + 1))
    older = first(alive(of, 3), of, held=WINDOW)
    assert (older.path.iteration, older.replayed_iterations) == (6, range(6, NEWEST + 1))


def test_adjacent_stages_replay_together_and_others_separately():
    of = logs(chain(5))
    assert first(alive(of, 1, 2), of).stages == {1, 2}
    assert first(alive(of, 0, 3), of).stages == {0, 3}


def test_stage_with_lost_logs_joins_replay():
    of = logs(chain(5))
    gone = replace(of, kept=of.kept | {2: [7, 8]})
    assert first(alive(gone, 1), gone).stages == {1, 2}
    assert first(alive(gone, 2), gone).stages == {2}  # its own logs are no matter
    both = replace(gone, kept=gone.kept | {3: [6, 7]})
    assert first(alive(both, 1), both).stages == {1, 2, 3}


def test_no_stage_replays_separately_if_all_must_return():
    of = logs(chain(2))
    none = replace(of, kept={})
    plan = first(alive(none, 1), none)
    assert (plan.iteration, plan.stages, plan.keep) == (6, frozenset(), frozenset())
    assert replaying_stages([0], 5, 8, none) is None


def test_worker_that_missed_commit_completes_iteration():
    of = logs(chain(3), reduced={0: NEWEST, 2: NEWEST})
    plan = first({0: NEWEST - 1, 2: NEWEST}, of)
    assert (plan.keep, plan.complete, plan.stages) == ({2}, {0}, {1})
    without = replace(of, reduced={})
    assert first({0: NEWEST - 1, 2: NEWEST}, without).stages == {0, 1}


def test_only_commit_is_completed_if_no_state_is_lost():
    of = logs(chain(2), reduced={0: NEWEST})
    plan = first({0: NEWEST - 1, 1: NEWEST}, of)
    assert (plan.iteration, plan.keep, plan.complete, plan.path, plan.stages) == (NEWEST, {1}, {0}, None, frozenset())


def test_iteration_without_norm_cannot_be_replayed():
    of = logs(chain(2), records=[8])
    assert first(alive(of, 1), of).iteration == 6


def test_lost_stage_without_window_has_no_plan():
    of = logs(chain(2))
    assert first(alive(of, 1), of, held=[FIRST]) is None


def cut_off(of: Logs, stage: int, iteration: int, *frozen: str, **more) -> Logs:
    """The same logs, if a stage had come so far with computing again; later iterations it has not logged again yet."""
    ranks = of.ranks_of_stage(stage)
    replayed = dict.fromkeys(ranks, InterruptedReplay(iteration, frozenset(frozen), **more))
    kept = {rank: [one for one in of.kept[rank] if one <= iteration] for rank in ranks}
    return replace(of, replayed=of.replayed | replayed, kept=of.kept | kept)


def begins(plan) -> dict[int, int]:
    return {stage: course.begin for stage, course in plan.stage_plans.items()}


def test_stage_continues_replay_if_separate_stage_is_lost():
    of = cut_off(logs(chain(4), width=2), 1, 7)
    plan = first(alive(of, 2, 3, 6), of)
    assert begins(plan) == {1: 7, 3: 5} and plan.keep == {0, 1, 4, 5} and plan.begin == 5
    assert [plan.computing(iteration) for iteration in (6, 7, 8)] == [{3}, {3}, {1, 3}]
    assert plan.stage_plan(1).is_resumed and plan.stage_plan(1).path is None and plan.stage_plan(3).path is plan.path


def test_replay_continues_if_no_more_state_is_lost():
    of = cut_off(logs(chain(4)), 1, 7)
    plan = first(alive(of, 1), of)
    assert begins(plan) == {1: 7} and plan.path is None and plan.replayed_iterations == range(8, 9)


def test_unfinished_window_loads_compute_weights():
    of = cut_off(logs(chain(3)), 0, 6, NAMES[1])
    course = first(alive(of, 0, 2), of).stage_plan(0)
    assert (course.begin, course.complete_at, course.point(6).full) == (6, 6, (NAMES[1],))
    lacking = replace(of, replayed={0: InterruptedReplay(6, frozenset(NAMES))})
    assert begins(first(alive(lacking, 0, 2), lacking)) == {0: 5, 2: 5}  # of iteration 6 only one is there in full


def test_worker_lost_in_replay_restarts_its_stage():
    of = cut_off(logs(chain(4), width=2), 1, 7)
    gone = replace(of, replayed={2: of.replayed[2]})
    assert begins(first(alive(gone, 2, 3, 6), gone)) == {1: 5, 3: 5}


def test_stage_workers_differ_by_at_most_one_iteration():
    of = cut_off(logs(chain(4), width=2), 1, 7)
    apart = replace(of, replayed=of.replayed | {3: InterruptedReplay(6, frozenset(), reduced=True)})
    plan = first(alive(apart, 2, 3, 6), apart)
    assert begins(plan) == {1: 7, 3: 5} and plan.stage_plan(1).behind == {3}
    without = replace(of, replayed=of.replayed | {3: InterruptedReplay(6)})
    assert begins(first(alive(without, 2, 3, 6), without)) == {1: 5, 3: 5}
    further = replace(of, replayed=of.replayed | {3: InterruptedReplay(5, reduced=True)})
    assert begins(first(alive(further, 2, 3, 6), further)) == {1: 5, 3: 5}


def test_lost_neighbour_gets_logs_until_both_replay():
    of = cut_off(logs(chain(4)), 1, 7)
    assert begins(first(alive(of, 1, 2), of)) == {1: 7, 2: 5}  # 6 and 7 from its logs, and 8 together
    gone = replace(of, kept=of.kept | {1: [7]})
    assert begins(first(alive(gone, 1, 2), gone)) == {1: 5, 2: 5}


def test_worker_ahead_of_survivors_starts_over():
    of = cut_off(logs(chain(3)), 1, NEWEST)
    plan = first({0: NEWEST - 1, 2: NEWEST - 1}, of)
    assert plan.iteration == NEWEST - 1 and begins(plan) == {1: 5}


def test_stage_that_finished_replay_waits_for_others():
    of = cut_off(logs(chain(4)), 1, NEWEST)
    plan = first(alive(of, 1, 3), of)
    assert begins(plan) == {1: NEWEST, 3: 5} and plan.computing(NEWEST) == {3}


@st.composite
def losses(draw):
    pipeline, width = chain(draw(st.integers(2, 5)), draw(st.integers(1, 2))), draw(st.integers(1, 2))
    of = logs(pipeline, width, reduced={0: NEWEST, 1: NEWEST})
    missing = draw(st.dictionaries(st.sampled_from(sorted(of.stages)), st.sampled_from([[8], [6, 7], [6], []])))
    live = draw(st.dictionaries(st.sampled_from(sorted(of.stages)), st.sampled_from([NEWEST - 1, NEWEST])))
    state = st.builds(InterruptedReplay, st.integers(5, NEWEST), st.frozensets(st.sampled_from(NAMES)), st.booleans())
    replayed = draw(st.dictionaries(st.sampled_from(sorted(set(of.stages) - set(live)) or [-1]), state))
    return live, replace(of, kept=of.kept | missing, replayed=replayed)


@settings(deadline=None, max_examples=300)
@given(losses())
def test_every_rank_has_path_and_every_log_exists(loss):
    live, of = loss
    for plan in plans(inventory(live, of), OPERATORS, exact=True):
        if not plan.stages:
            continue
        back = {rank for rank, stage in of.stages.items() if stage in plan.stages}
        assert not back & (plan.keep | plan.complete) and back | plan.keep | plan.complete == set(of.stages)
        assert all(live[rank] == plan.iteration for rank in plan.keep) and plan.keep | plan.complete
        assert all(live[rank] == plan.iteration - 1 and of.reduced[rank] == plan.iteration for rank in plan.complete)
        for iteration in plan.replayed_iterations:
            computing = plan.computing(iteration)
            for feed in {feed for stage in computing for feed in of.feeds[stage]} - computing:
                assert all(iteration in of.kept[rank] for rank in of.ranks_of_stage(feed))


@settings(deadline=None, max_examples=300)
@given(losses())
def test_stage_plan_contains_all_missing_state(loss):
    live, of = loss
    for plan in plans(inventory(live, of), OPERATORS, exact=True):
        for stage, course in plan.stage_plans.items():
            moments = () if course.path is None else course.path.points
            assert [moment.iteration for moment in moments] == [*range(course.begin, course.begin + len(moments))]
            assert plan.begin <= course.begin <= course.complete_at <= plan.iteration
            for rank in of.ranks_of_stage(stage) if course.is_resumed else ():
                at = (
                    InterruptedReplay(live[rank], reduced=of.reduced.get(rank) == live[rank] + 1)
                    if rank in live
                    else None
                )
                at = at or of.replayed[rank]
                assert at.iteration == course.begin - (rank in course.behind) and (
                    rank not in course.behind or at.reduced
                )
                loaded = {name for moment in moments for name in moment.full}
                assert rank in course.behind or at.frozen <= loaded
            assert course.is_resumed or course.path is plan.path
            for iteration, moment in zip(range(course.begin, course.complete_at), moments, strict=False):
                later = {name for one in moments if one.iteration > iteration for name in one.full}
                assert later == set(moment.frozen)  # who cannot learn yet can compute


@settings(deadline=None, max_examples=300)
@given(losses())
def test_earlier_replay_never_increases_later_replay(loss):
    live, of = loss
    again = inventory(live, of), inventory(live, replace(of, replayed={}))
    plan, anew = (next(plans(one, OPERATORS, exact=True), None) for one in again)
    assert (plan is None) == (anew is None) and (plan is None or plan.iteration >= anew.iteration)
    if plan is not None and anew.stages and plan.iteration == anew.iteration:
        assert plan.stages <= anew.stages and plan.keep >= anew.keep
        assert all(course.begin >= anew.stage_plan(stage).begin for stage, course in plan.stage_plans.items())
