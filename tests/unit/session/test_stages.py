"""Progress of the stages of the saving pipeline in commit all-reduces."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from moc.policy import SnapshotPlan
from moc.session.peers import CopyOutcome
from moc.session.saving.committing import Failure, SnapshotInProgress
from moc.session.saving.pipeline import Stages, totals_at
from moc.session.saving.stages import POSITIONS, Copying, Replicating, Writing
from moc.state.operators import Detail
from moc.store.errors import CheckpointError, InsufficientMemoryError


def future(done: bool, result: object = None) -> Future:
    made = Future()
    if done:
        made.set_result(result)
    return made


def in_progress(number: int, done: bool) -> SnapshotInProgress:
    layout, capture = SimpleNamespace(nbytes=number), SimpleNamespace(seconds=number, bubble_bytes=number)
    facts = dict(layout=layout, capture=capture, finalize_s=number, persisted_bytes=number, persist_s=number, retries=0)
    facts |= dict(gradients_s=0.0, delay=lambda: 0.0)
    snapshot = SimpleNamespace(finalized=future(done), persisted=future(done), **facts)
    plan = SnapshotPlan(number, "test", {"output": Detail.FULL}, complete=True)
    return SnapshotInProgress(plan, plan, {}, snapshot, replicated=future(done, CopyOutcome(number, float(number))))


def stages() -> Stages:
    parts = Mock(world=SimpleNamespace(size=1), tiers=SimpleNamespace(node=(0,), nodes=("0",)))
    of_copying = ["reservation", "memory", "failure", "describe", "replicating", "writing"]
    of_writing = ["policy", "saver", "reservation", "tokens", "meter", "report", "committing", "removing", "pauses_s"]
    nothing = SimpleNamespace(queue=(), progress=lambda: [{}] * POSITIONS, failure=lambda: None)
    return Stages(
        copying=Copying(parts, **dict.fromkeys(of_copying)),
        replicating=Replicating(parts, memory=Mock()),
        writing=Writing(workers=1, **dict.fromkeys(of_writing)),
        committing=nothing,
        removing=nothing,
        has_memory_tier=True,
    )


def contribution(*done: bool) -> dict[str, float]:
    mine = stages()
    for stage in (mine.copying, mine.replicating, mine.writing):
        stage.queue.extend(in_progress(number, is_done) for number, is_done in enumerate(done, 1))
    return mine.progress()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_totals_count_work_in_order(workers):
    contributions = [contribution(*done) for done in workers]
    totals = {name: sum(mine[name] for mine in contributions) for name in contributions[0]}
    common = min([*done, False].index(False) for done in workers)
    for place in range(POSITIONS):
        of_place = totals_at(totals, place)
        for what in ("copied", "replicated", "written"):
            assert (of_place[f"snapshot_{what}"] == len(workers)) == (place < common)


def test_late_snapshot_does_not_delay_next_one():
    mine = contribution(True, True)
    assert [totals_at(mine, place)["snapshot_copied"] for place in range(2)] == [1, 1]
    assert [totals_at(mine, place)["snapshot_bytes"] for place in range(2)] == [1, 2]
    assert [totals_at(mine, place)["snapshot_replicated_bytes"] for place in range(2)] == [1, 2]
    assert not any(contribution(False, True).values())
    assert not any(contribution().values())


def test_contribution_entries_have_fixed_order():
    assert list(contribution()) == list(contribution(True, False)) == list(contribution(True, True))


def test_error_ends_run_unless_its_stage_tolerates_it():
    mine = stages()
    lost, full = in_progress(1, False), in_progress(2, False)
    mine.copying.queue.append(lost)
    mine.writing.queue.append(full)
    lost.snapshot.finalized.set_exception(InsufficientMemoryError("no room"))
    full.snapshot.persisted.set_exception(CheckpointError("full"))
    assert mine.failure() is None
    failure = Failure()
    failure.sources += [mine.failure]
    broken = in_progress(3, False)
    mine.replicating.queue.append(broken)
    assert failure.find() is None
    broken.replicated.set_exception(CheckpointError("gone"))
    assert failure.find() == mine.failure() and "gone" in failure.find()
