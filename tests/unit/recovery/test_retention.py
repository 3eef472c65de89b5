"""What stays when a run goes on: the newest window, and the one under way if it has all that it needs."""

from moc.policy.interface import SnapshotPlan
from moc.recovery.inventory import RetainedCheckpoints, retain, retained_checkpoints
from moc.recovery.sources import MEMORY, STORAGE, AvailableCheckpoint
from moc.state.operators import Detail, Operator
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.cases import each_row
from tests.unit.recovery import test_carrying
from tests.unit.recovery.test_carrying import in_full, save

OPERATORS = [Operator(name, "mlp", 0, None, 4) for name in ("a", "b", "c")]
TURNS = [{"a": "full", "b": "compute", "c": "compute"}, {"b": "full", "c": "compute"}, {"c": "full"}]


def held(*iterations, tier=MEMORY):
    """Snapshots of windows of three, which begin with 1, 4, ..."""
    return [AvailableCheckpoint(iteration, tier, TURNS[(iteration - 1) % 3]) for iteration in iterations]


def under_way(start, upto):
    """What was planned of a window so far."""
    return [
        SnapshotPlan(i, "sparse", {name: Detail(detail) for name, detail in TURNS[i - start].items()}, False, start)
        for i in range(start, upto + 1)
    ]


def stays(there, iteration, plans=(), tier=MEMORY):
    return retained_checkpoints(there, OPERATORS, True, tier, iteration, plans)


def test_only_newest_window_is_kept_at_its_end():
    assert stays(held(1, 2, 3, 4, 5, 6, 7), 6) == RetainedCheckpoints(6, (4, 5, 6))
    assert stays(held(1, 2, 3, 4, 5, 6, 7), 3) == RetainedCheckpoints(3, (1, 2, 3))
    assert stays(
        [AvailableCheckpoint(7, MEMORY, dict.fromkeys("abc", "full")), *held(4, 5, 6)], 7
    ) == RetainedCheckpoints(7, (7,))
    assert stays([], 7) == RetainedCheckpoints(continues_window=False)


def test_all_snapshots_of_gradient_chain_are_kept():
    turns = [{name: "full" if name == turn else "grad" for name in "abc"} for turn in "abc"]
    there = [AvailableCheckpoint(i, MEMORY, turns[i % 3]) for i in range(1, 8)]
    assert stays(there, 7) == RetainedCheckpoints(7, (5, 6, 7))
    assert stays(there[:-1], 7) == RetainedCheckpoints(6, (4, 5, 6), continues_window=False)
    stored = [AvailableCheckpoint(5, STORAGE, turns[2]), *there[5:]]
    assert stays(stored, 7) == RetainedCheckpoints(7)


@each_row("at", [7, 8])
def test_complete_window_in_progress_is_resumed(at):
    there = held(*range(4, at + 1))
    assert stays(there, at, under_way(7, at)) == RetainedCheckpoints(6, tuple(range(4, at + 1)))


def test_snapshot_of_current_iteration_can_be_retaken():
    plans = under_way(7, 8)
    assert stays(held(4, 5, 6, 7), 8, plans) == RetainedCheckpoints(6, (4, 5, 6, 7), repeated_plan=plans[-1])
    assert stays(held(4, 5, 6), 7, plans[:1]) == RetainedCheckpoints(6, (4, 5, 6), repeated_plan=plans[0])
    partly = AvailableCheckpoint(8, MEMORY, {"b": "full"})  # a node is lost, and with it what it had of an operator
    assert stays([*held(4, 5, 6, 7), partly], 8, plans) == RetainedCheckpoints(6, (4, 5, 6, 7), repeated_plan=plans[-1])


@each_row("there", [(4, 5, 6, 8), (4, 5, 6), (4, 5, 6, 9)])
def test_window_lacking_another_snapshot_restarts(there):
    assert stays(held(*there), 8, under_way(7, 8)) == RetainedCheckpoints(6, (4, 5, 6), continues_window=False)


def test_unplanned_snapshots_are_not_kept():
    assert stays(held(4, 5, 6, 7, 8), 8) == RetainedCheckpoints(6, (4, 5, 6), continues_window=False)


def test_last_snapshot_of_window_can_be_retaken():
    plans = under_way(4, 6)
    assert stays(held(1, 2, 3, 4, 5), 6, plans) == RetainedCheckpoints(3, (1, 2, 3, 4, 5), repeated_plan=plans[-1])


def test_window_in_storage_leaves_nothing_in_memory():
    assert stays(held(4, 5, 6, tier=STORAGE), 6) == RetainedCheckpoints(6)
    assert stays(held(4, 6) + held(4, 5, 6, tier=STORAGE), 6) == RetainedCheckpoints(6)
    assert stays(held(1, 2, 3) + held(4, 5, 6, tier=STORAGE), 6) == RetainedCheckpoints(6)


def test_storage_has_window_in_progress_without_memory_tier():
    there = held(4, 5, 6, 7, tier=STORAGE)
    assert stays(there, 7, under_way(7, 7), STORAGE) == RetainedCheckpoints(6)
    assert stays(there, 8, under_way(7, 8), STORAGE) == RetainedCheckpoints(6, (), under_way(7, 8)[-1])
    assert not stays(there[:3], 8, under_way(7, 8), STORAGE).continues_window


@each_row(
    ("keep", "upto", "left"),
    [(1, 5, [1, 3, 4, 5]), (4, 5, [1, 2, 3, 4, 5]), (1, 4, [1, 3, 4, 5]), (1, 2, [1, 2, 3, 4, 5])],
)
def test_storage_keeps_newest_paths_and_newer_state(tmp_path, keep, upto, left):
    """Snapshots of two experts each: the newest way on takes those of others from 3, and the rest from 1."""
    store = Store(LocalStorage(tmp_path))
    for iteration, experts in enumerate([range(test_carrying.EXPERTS), (0, 1), (0, 1), (2, 3), (4, 5)], start=1):
        save(store, iteration, in_full(*experts))
    retain(store, test_carrying.OPERATORS, False, keep, upto)
    assert store.iterations() == left


def test_unreadable_snapshot_is_kept(tmp_path):
    store = Store(LocalStorage(tmp_path))
    for iteration in (1, 2, 3):
        save(store, iteration, in_full(*range(test_carrying.EXPERTS)))
    (tmp_path / checkpoint_name(1) / "manifest.json").write_text("{")
    retain(store, test_carrying.OPERATORS, True, 1, 3)
    assert store.iterations() == [1, 3]
