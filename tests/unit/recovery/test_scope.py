"""Which stages compute again: those that lost something, and those whose logs are needed and lost; the others stay."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.logs.crossings import Pipeline
from moc.recovery.plan import Inventory, plans
from moc.recovery.scope import Logs, scope
from moc.recovery.sources import STORAGE, Held
from moc.state.operators import Operator

OPERATORS = [Operator("embedding", "embedding", 0, None, 10), Operator("layers.0.expert.0", "expert", 0, 0, 10)]
NAMES = tuple(operator.name for operator in OPERATORS)
FIRST = Held(5, STORAGE, {NAMES[0]: "full", NAMES[1]: "compute"})
WINDOW = [FIRST, Held(6, STORAGE, {NAMES[1]: "full"})]
NEWEST = 8


def chain(stages: int, chunks: int = 1) -> Pipeline:
    return Pipeline(stages, tuple((i, chunk) for chunk in range(chunks) for i in range(2)))


def logs(pipeline: Pipeline, width: int = 1, **more) -> Logs:
    """Of ``width`` ranks in each stage; all is there from iteration 6 on."""
    stages = {rank: rank // width for rank in range(pipeline.stages * width)}
    feeds = {stage: pipeline.feeds(stage) for stage in range(pipeline.stages)}
    kept = dict.fromkeys(stages, range(6, NEWEST + 1))
    return Logs(stages, feeds, kept, **{"records": range(1, NEWEST + 1)} | more)


def inventory(live: dict, of: Logs, held=WINDOW) -> Inventory:
    return Inventory(held, live, {rank: dict.fromkeys(NAMES, str(rank)) for rank in of.stages}, of)


def first(*args, **kwargs):
    return next(plans(inventory(*args, **kwargs), OPERATORS, exact=True), None)


def alive(of: Logs, *lost: int) -> dict[int, int]:
    return {rank: NEWEST for rank in of.stages if rank not in lost}


def test_a_stage_receives_from_its_neighbours():
    assert [chain(3).feeds(stage) for stage in range(3)] == [{1}, {0, 2}, {1}]
    assert [chain(3, chunks=2).feeds(stage) for stage in range(3)] == [{1, 2}, {0, 2}, {0, 1}]  # a ring
    assert chain(1).feeds(0) == set()


def test_the_lost_stage_alone_goes_back():
    of = logs(chain(4), width=2)
    plan = first(alive(of, 3), of)
    assert (plan.iteration, plan.stages, plan.way.iteration) == (NEWEST, {1}, 6)
    assert plan.keep == {0, 1, 4, 5, 6, 7} and not plan.complete  # 2, its data-parallel peer, goes back with it
    assert plan.again == range(6, NEWEST + 1)


def test_adjacent_stages_together_and_others_apart():
    of = logs(chain(5))
    assert first(alive(of, 1, 2), of).stages == {1, 2}
    assert first(alive(of, 0, 3), of).stages == {0, 3}


def test_who_has_lost_needed_logs_joins():
    of = logs(chain(5))
    gone = replace(of, kept=of.kept | {2: [7, 8]})
    assert first(alive(gone, 1), gone).stages == {1, 2}
    assert first(alive(gone, 2), gone).stages == {2}  # its own logs are no matter
    both = replace(gone, kept=gone.kept | {3: [6, 7]})
    assert first(alive(both, 1), both).stages == {1, 2, 3}


def test_if_all_would_have_to_go_back_nobody_computes_alone():
    of = logs(chain(2))
    none = replace(of, kept={})
    plan = first(alive(none, 1), none)
    assert (plan.iteration, plan.stages, plan.keep) == (6, frozenset(), frozenset())
    assert scope([0], range(6, 9), none) is None


def test_whoever_has_missed_the_vote_completes_the_iteration():
    of = logs(chain(3), reduced={0: NEWEST, 2: NEWEST})
    plan = first({0: NEWEST - 1, 2: NEWEST}, of)
    assert (plan.keep, plan.complete, plan.stages) == ({2}, {0}, {1})
    without = replace(of, reduced={})
    assert first({0: NEWEST - 1, 2: NEWEST}, without).stages == {0, 1}


def test_nobody_has_lost_anything_but_the_vote():
    of = logs(chain(2), reduced={0: NEWEST})
    plan = first({0: NEWEST - 1, 1: NEWEST}, of)
    assert (plan.iteration, plan.keep, plan.complete, plan.way, plan.stages) == (NEWEST, {1}, {0}, None, frozenset())


def test_an_iteration_that_nobody_knows_the_norm_of_cannot_be_computed_again():
    of = logs(chain(2), records=[8])
    assert first(alive(of, 1), of).iteration == 6


def test_without_a_window_there_is_nothing_to_compute_from():
    of = logs(chain(2))
    assert first(alive(of, 1), of, held=[FIRST]) is None


@st.composite
def losses(draw):
    pipeline, width = chain(draw(st.integers(2, 5)), draw(st.integers(1, 2))), draw(st.integers(1, 2))
    of = logs(pipeline, width, reduced={0: NEWEST, 1: NEWEST})
    missing = draw(st.dictionaries(st.sampled_from(sorted(of.stages)), st.just([8])))
    live = draw(st.dictionaries(st.sampled_from(sorted(of.stages)), st.sampled_from([NEWEST - 1, NEWEST])))
    return live, replace(of, kept=of.kept | missing)


@settings(deadline=None, max_examples=300)
@given(losses())
def test_every_rank_has_a_way_and_every_log_is_there(loss):
    live, of = loss
    for plan in plans(inventory(live, of), OPERATORS, exact=True):
        if not plan.stages:
            continue
        back = {rank for rank, stage in of.stages.items() if stage in plan.stages}
        assert not back & (plan.keep | plan.complete) and back | plan.keep | plan.complete == set(of.stages)
        assert all(live[rank] == plan.iteration for rank in plan.keep) and plan.keep | plan.complete
        assert all(live[rank] == plan.iteration - 1 and of.reduced[rank] == plan.iteration for rank in plan.complete)
        feeding = {feed for stage in plan.stages for feed in of.feeds[stage]} - plan.stages
        for rank in (rank for rank, stage in of.stages.items() if stage in feeding):
            assert set(plan.again) <= set(of.kept[rank])
