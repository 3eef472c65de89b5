"""Where each operator comes from, whatever has survived."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.sources import (
    BEFORE,
    COMPUTE,
    MASTER,
    MEMORY,
    MOMENTS,
    PARTS,
    STORAGE,
    AvailableCheckpoint,
    needed,
    recovery_paths,
)
from moc.state.operators import Operator
from tests.cases import each_row

DENSE = ("embedding", "layers.0.router", "output")
EXPERTS = tuple(f"layers.0.expert.{expert}" for expert in range(4))


def operator(name: str) -> Operator:
    """One of a model with one layer of four experts."""
    expert = int(name.rsplit(".", 1)[1]) if ".expert." in name else None
    return Operator(name, name.split(".")[-1 if expert is None else 2], 0, expert, 10)


OPERATORS = [operator(name) for name in (*DENSE, *EXPERTS)]


def holds(iteration: int, tier: str = STORAGE, experts=range(4), dense=True, detail="full") -> AvailableCheckpoint:
    """A checkpoint with all that is not an expert, if wanted, and some experts."""
    names = [*(DENSE if dense else ()), *(EXPERTS[e] for e in experts)]
    return AvailableCheckpoint(iteration, tier, dict.fromkeys(names, detail))


def experts_from(recovery) -> list[tuple[int, str]]:
    """Where the four experts come from."""
    return [recovery.sources[name, MASTER].key for name in EXPERTS]


def test_newest_complete_checkpoint_is_first():
    ways = list(recovery_paths([holds(10), holds(20)], OPERATORS, exact=True))
    assert [way.iteration for way in ways] == [20, 10]
    assert {held.key for held in ways[0].sources.values()} == {(20, STORAGE)}


def test_memory_precedes_storage_of_same_iteration():
    way = next(recovery_paths([holds(10, STORAGE), holds(10, MEMORY)], OPERATORS, exact=True))
    assert [held.key for held in way.checkpoints()] == [(10, MEMORY)]


def test_exact_recovery_never_mixes_iterations():
    held = [holds(10), holds(20, experts=[0, 1])]
    assert [way.iteration for way in recovery_paths(held, OPERATORS, exact=True)] == [10]


def test_one_iteration_may_use_two_tiers():
    held = [holds(20, MEMORY, experts=[2, 3], dense=False), holds(20, STORAGE, experts=[0, 1, 2])]
    way = next(recovery_paths(held, OPERATORS, exact=True))
    assert experts_from(way) == [(20, STORAGE), (20, STORAGE), (20, MEMORY), (20, MEMORY)]


def test_partial_checkpoints_provide_newest_experts():
    held = [holds(10), holds(20, experts=[0]), holds(30, experts=[1])]
    way = next(recovery_paths(held, OPERATORS, exact=False))
    assert way.iteration == 30 and way.base.key == (30, STORAGE)
    assert experts_from(way) == [(20, STORAGE), (30, STORAGE), (10, STORAGE), (10, STORAGE)]


def test_figure_8_of_moc_system_is_reproduced():
    """MoC-System, section 5.1: node 0 is lost, node 1 has experts 2 and 3 in memory, storage has 0 and 2."""
    held = [holds(10), holds(20, experts=[0, 2]), holds(20, MEMORY, experts=[2, 3], dense=False)]
    way = next(recovery_paths(held, OPERATORS, exact=False))
    assert experts_from(way) == [(20, STORAGE), (10, STORAGE), (20, MEMORY), (20, MEMORY)]


def test_base_is_readable_by_every_node():
    """A node is lost; what is left in memory has all of some operators, and storage has the same iteration."""
    left = AvailableCheckpoint(20, MEMORY, {DENSE[0]: "full", EXPERTS[3]: "full"})
    for exact in (True, False):
        way = next(recovery_paths([left, holds(20)], OPERATORS, exact))
        assert way.sources[DENSE[0], MASTER].key == (20, MEMORY) and way.base.key == (20, STORAGE)


def test_survivor_expert_may_be_newer_than_base():
    held = [holds(10), holds(20, MEMORY, experts=[3], dense=False)]
    assert experts_from(next(recovery_paths(held, OPERATORS, exact=False)))[3] == (20, MEMORY)
    assert experts_from(next(recovery_paths(held, OPERATORS, exact=False, only=10)))[3] == (10, STORAGE)


def test_weights_and_moments_may_use_different_checkpoints():
    held = [holds(10), holds(20, experts=[]), holds(20, MEMORY, experts=[1], dense=False, detail="moments")]
    way = next(recovery_paths(held, OPERATORS, exact=False))
    assert way.sources[EXPERTS[1], MASTER].key == (10, STORAGE)
    assert way.sources[EXPERTS[1], MOMENTS].key == (20, MEMORY)


def sparse(iteration: int, full, compute=(), tier: str = STORAGE) -> AvailableCheckpoint:
    """A checkpoint of a window."""
    return AvailableCheckpoint(iteration, tier, dict.fromkeys(full, "full") | dict.fromkeys(compute, "compute"))


FIRST, SECOND, THIRD = EXPERTS[:2], EXPERTS[2:], DENSE
FIGURE_8 = [sparse(10, FIRST, (*SECOND, *THIRD)), sparse(11, SECOND, THIRD), sparse(12, THIRD)]


def test_figure_8_of_moevement_is_reproduced():
    """MoEvement, section 3.3: the first two experts, then the other two, then all that is not an expert."""
    (way,) = recovery_paths(FIGURE_8, OPERATORS, exact=True)
    assert way.iteration == 12 and [held.iteration for held in way.checkpoints()] == [12, 11, 10]
    assert [(m.iteration, set(m.full), set(m.frozen)) for m in way.points] == [
        (10, {*FIRST}, {*SECOND, *THIRD}),
        (11, {*SECOND}, {*THIRD}),
        (12, {*THIRD}, set()),
    ]
    assert way.base is FIGURE_8[2] and {way.learned_until(name) for name in EXPERTS} == {12}


def test_operator_learned_until_expected_iteration():
    """In a window it learns by itself after its snapshot; by partial ones, until the one that it is taken from."""
    (window,) = recovery_paths([sparse(10, EXPERTS, THIRD), sparse(11, THIRD)], OPERATORS, exact=True)
    assert {window.learned_until(one.name) for one in OPERATORS} == {11}
    older = next(recovery_paths([holds(10), holds(20, experts=[0]), holds(30, experts=[])], OPERATORS, exact=False))
    assert [older.learned_until(name) for name in (*EXPERTS[:2], "output")] == [20, 10, 30]
    survivor = [holds(10), holds(20, MEMORY, experts=[3], dense=False)]
    newer = next(recovery_paths(survivor, OPERATORS, exact=False))
    assert newer.learned_until(EXPERTS[3]) == newer.iteration == 10


@each_row("lost", range(3))
def test_window_without_one_snapshot_is_unusable(lost):
    assert not list(recovery_paths(FIGURE_8[:lost] + FIGURE_8[lost + 1 :], OPERATORS, exact=True))


def test_window_without_all_compute_weights_is_unusable():
    held = [FIGURE_8[0], sparse(11, SECOND, THIRD[1:]), FIGURE_8[2]]
    assert not list(recovery_paths(held, OPERATORS, exact=True))


def test_newest_window_precedes_dense_checkpoints():
    later = [sparse(one.iteration + 3, *_parts(one)) for one in FIGURE_8]
    ways = list(recovery_paths([*FIGURE_8, *later, holds(9), sparse(16, FIRST)], OPERATORS, exact=True))
    assert [way.iteration for way in ways] == [15, 12, 9]
    assert [len(way.points) for way in ways] == [3, 3, 1]
    assert [way.iteration for way in recovery_paths(FIGURE_8 + later, OPERATORS, exact=True, only=12)] == [12]


def _parts(held: AvailableCheckpoint):
    return ([name for name, detail in held.operators.items() if detail == kind] for kind in ("full", "compute"))


def test_window_may_use_two_tiers():
    memory = [sparse(10, FIRST[:1], SECOND, MEMORY), sparse(12, THIRD, tier=MEMORY)]
    way = next(recovery_paths([*FIGURE_8, *memory], OPERATORS, exact=True))
    assert way.sources[FIRST[0], MASTER].key == (10, MEMORY) and way.sources[FIRST[1], MASTER].key == (10, STORAGE)
    assert way.points[0].sources[SECOND[0], COMPUTE].key == (10, MEMORY)
    assert way.checkpoint_at(10).key == (10, STORAGE) and way.base.key == (12, MEMORY)


def test_one_window_and_window_in_progress_are_needed():
    held = [sparse(one.iteration + back, *_parts(one)) for back in (-3, 0) for one in FIGURE_8]
    begun = sparse(13, FIRST, (*SECOND, *THIRD))
    assert needed([*held, begun], OPERATORS, exact=True, keep=1) == {(i, STORAGE) for i in (10, 11, 12, 13)}
    assert needed([begun], OPERATORS, exact=True, keep=1) == {(13, STORAGE)}


@each_row("detail", ["compute", "grad"])
def test_untrainable_state_is_no_source(detail):
    assert not list(recovery_paths([holds(10, detail=detail)], OPERATORS, exact=False))


def test_missing_expert_prevents_recovery():
    assert not list(recovery_paths([holds(10, experts=[0, 1, 2])], OPERATORS, exact=False))


def test_superseded_checkpoints_are_not_needed():
    held = [holds(10), holds(20, experts=[0]), holds(30, experts=[0]), holds(40, experts=[1])]
    assert needed(held, OPERATORS, exact=False, keep=1) == {(10, STORAGE), (30, STORAGE), (40, STORAGE)}
    assert needed([holds(10), holds(20), holds(30)], OPERATORS, exact=True, keep=2) == {(20, STORAGE), (30, STORAGE)}


def test_state_off_the_newest_path_can_be_deleted():
    held = [holds(10, MEMORY), holds(10, STORAGE), holds(20, experts=[0])]
    assert needed(held, OPERATORS, exact=True, keep=1) == {(10, MEMORY), (20, STORAGE)}


checkpoints = st.builds(
    holds,
    st.integers(1, 4),
    st.sampled_from([MEMORY, STORAGE]),
    st.sets(st.integers(0, 3)),
    st.booleans(),
    st.sampled_from(["full", "full", "master", "moments", "compute"]),
)


@settings(deadline=None)
@given(st.lists(checkpoints, max_size=8), st.booleans(), st.none() | st.integers(1, 4))
def test_every_source_contains_its_state_subset(held, exact, only):
    for way in recovery_paths(held, OPERATORS, exact, only):
        assert set(way.sources) == {(o.name, part) for o in OPERATORS for part in (MASTER, MOMENTS)}
        for (name, part), source in way.sources.items():
            assert part in PARTS[source.operators[name]]
            if exact or len(way.points) > 1:  # a window
                assert source.iteration in {moment.iteration for moment in way.points}
            elif ".expert." not in name:
                assert source.iteration == way.iteration
            else:
                newer = [h for h in held if h.iteration > source.iteration and (only is None or h.iteration <= only)]
                assert not any(part in PARTS.get(h.operators.get(name), ()) for h in newer)


@settings(deadline=None)
@given(st.lists(checkpoints, max_size=8, unique_by=lambda h: h.key), st.booleans(), st.integers(1, 3))
def test_dropping_unneeded_checkpoints_keeps_recovery_paths(held, exact, keep):
    kept = needed(held, OPERATORS, exact, keep)
    before = list(recovery_paths(held, OPERATORS, exact))[:keep]
    after = list(recovery_paths([h for h in held if h.key in kept], OPERATORS, exact))[:keep]
    assert [(w.iteration, w.sources) for w in before] == [(w.iteration, w.sources) for w in after]


def chained(iteration: int, gradients, experts=(), tier: str = MEMORY) -> AvailableCheckpoint:
    """A checkpoint with all that is not an expert, some experts, and the gradients of others."""
    details = dict.fromkeys([*DENSE, *(EXPERTS[e] for e in experts)], "full")
    return AvailableCheckpoint(iteration, tier, details | dict.fromkeys([EXPERTS[e] for e in gradients], "grad"))


def folded(recovery) -> dict[int, list[int]]:
    """By expert with gradients, its base and the iterations of these."""
    folds = {EXPERTS.index(name): [one.iteration for one in its] for name, its in recovery.gradients.items()}
    return {expert: [recovery.sources[EXPERTS[expert], MASTER].iteration, *its] for expert, its in folds.items()}


def test_expert_with_complete_gradients_is_current():
    held = [holds(10, MEMORY), chained(11, (0, 1), (2,)), chained(12, (0, 1, 2), (3,)), chained(13, (0, 2, 3))]
    way = next(recovery_paths(held, OPERATORS, exact=False))
    assert way.iteration == 13 and folded(way) == {0: [10, 11, 12, 13], 1: [10, 11, 12], 2: [11, 12, 13], 3: [12, 13]}
    assert [way.learned_until(name) for name in (*EXPERTS, "output")] == [13, 12, 13, 13, 13]
    assert way.stale == [EXPERTS[1]]
    assert [one.iteration for one in way.checkpoints()] == [13, 12, 11, 10]
    assert needed(held, OPERATORS, exact=False, keep=1) == {one.key for one in held}
    assert next(recovery_paths(held, OPERATORS, exact=True)).iteration == 12  # all chains reach it


def test_chain_ends_at_first_gap_and_at_dense_iteration():
    damaged = chained(12, (0, 1, 2, 3)).without({EXPERTS[1]})
    held = [holds(10, MEMORY), chained(11, range(4)), damaged, chained(13, range(4))]
    way = next(recovery_paths(held, OPERATORS, exact=False))
    assert folded(way) == {0: [10, 11, 12, 13], 1: [10, 11], 2: [10, 11, 12, 13], 3: [10, 11, 12, 13]}
    torn = AvailableCheckpoint(14, MEMORY, {EXPERTS[0]: "full", EXPERTS[1]: "full", EXPERTS[2]: "grad"})
    way = next(
        recovery_paths([*held, torn], OPERATORS, exact=False)
    )  # where its chain is broken, a newer state is taken
    assert way.iteration == 13 and folded(way) == {0: [10, 11, 12, 13], 2: [10, 11, 12, 13], 3: [10, 11, 12, 13]}
    assert way.sources[EXPERTS[1], MASTER] is torn and way.stale == [EXPERTS[1]]


def test_gradients_of_superseded_memory_are_not_applied():
    held = [holds(10, MEMORY), chained(11, range(4), tier=BEFORE), chained(11, ())]
    assert folded(next(recovery_paths(held, OPERATORS, exact=False))) == {}
    held = [holds(10, STORAGE), chained(11, range(4), tier=MEMORY)]
    assert folded(next(recovery_paths(held, OPERATORS, exact=False))) == {expert: [10, 11] for expert in range(4)}
