"""How far storage may lag behind: at any speed, with any failures, few snapshots are begun and not yet published.

The queues, the rotation of buffers, the policies and what decides are real.  Copies, storage and the vote are a model:
each of its threads does one thing after the other, as slowly as the test draws.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock, patch

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import POLICIES, Every, Policy, policy_named
from moc.session.engine import Listener
from moc.session.peers import CopyOutcome
from moc.session.resume.point import ResumePoint
from moc.session.saving import memory_tier, pipeline, stages
from moc.session.saving.committing import Committer
from moc.session.saving.metrics import Meter
from moc.session.saving.pipeline import SavingPipeline, Stages
from moc.session.saving.storage import BEYOND, StorageHealth, may_begin, window_may_begin
from moc.session.settings import TIERS, Settings
from moc.state.record import Position
from moc.store.errors import CheckpointError, InsufficientMemoryError
from moc.store.host_memory import SPARE
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.shared import ALL

OPERATORS = model_operators(ModelShape((0, 1), 8, 16, 8, 8, 4, 100, num_experts=4, expert_ffn_hidden_size=16))
OPTIONS = {"sparse": dict(window=3), "gradient": dict(window=3), "selective": dict(experts=1)}
ITERATIONS = 24
FASTER, SLOWER, HANGS = (
    st.integers(4, 9),
    st.integers(0, 3),
    st.just(0),
)  # operations that end, between all-reduces

Speed = st.sampled_from([FASTER, SLOWER, HANGS]).flatmap(lambda speeds: st.lists(speeds, min_size=1, max_size=9))


class Thread:
    """Runs operations one after the other: as many as it is let to."""

    def __init__(self, speed: list[int], fails: list[bool], error: type[CheckpointError] = CheckpointError):
        self._speed, self._fails, self._turn, self._error = speed, fails, 0, error
        self._waiting: deque[tuple[Future, object]] = deque()

    def begin(self, result=None) -> Future:
        """Starts an operation."""
        self._waiting.append((Future(), result))
        return self._waiting[-1][0]

    def turn(self, least: int = 0) -> None:
        """Time passes; at least so many operations end, if there are as many."""
        for _ in range(max(least, self._speed[self._turn % len(self._speed)])):
            if self._waiting:
                done, result = self._waiting.popleft()
                failed = self._fails[self._turn % len(self._fails)]
                done.set_exception(self._error("no room")) if failed else done.set_result(result)
        self._turn += 1


class Model:
    """A worker's copies and its storage."""

    def __init__(self, speeds: list[list[int]], fails: list[bool], lacks: Sequence[bool] = (False,)):
        copying, writing, publishing = speeds
        self._copying, self._replicating = Thread(copying, [*lacks], InsufficientMemoryError), Thread(copying, [False])
        self._writing, self._publishing = Thread(writing, fails), Thread(publishing, fails)
        self.slots = 0
        self._begun: dict[int, Future | None] = {}  # by iteration, what publishes or removes the snapshot
        self.most, self.was_waited_for = 0, False
        self.trim = lambda slots: None

    def take(self, slot, iteration, share, entries, others, in_memory, after, nbytes, digests) -> SimpleNamespace:
        """Starts to copy a snapshot."""
        self.slots = max(self.slots, slot + 1)
        figures = dict(
            finalize_s=0.0,
            persist_s=0.0,
            persisted_bytes=0,
            retries=0,
            layout=SimpleNamespace(nbytes=1),
            gradients=None,
        )
        capture = SimpleNamespace(seconds=0.0, bubble_bytes=0, wait=lambda: None)
        finalized = self._copying.begin()
        figures |= dict(state=capture, gradients_s=0.0, delay=lambda: 0.0)
        return SimpleNamespace(
            iteration=iteration, finalized=finalized, capture=capture, in_memory=in_memory, **figures
        )

    def persist(self, snapshot, operators, pauses_s) -> None:
        """Starts to write it to storage."""
        self._begun[snapshot.iteration] = None
        snapshot.persisted = self._writing.begin()
        self._count()

    def commit_in_storage(self, plan, state, amount, write_s, pauses_s) -> Future:
        """Starts to publish it there."""
        published = self._begun[plan.iteration] = self._publishing.begin()
        return published

    def remove_abandoned(self, iteration) -> Future:
        """Starts to remove it from there."""
        removed = self._begun[iteration] = self._publishing.begin()
        return removed

    def replicate(self) -> Future:
        """Starts to copy a snapshot to another node."""
        return self._replicating.begin(CopyOutcome())

    def commit_in_memory(self, plan, state, report) -> None:
        """Publishes a snapshot in memory."""

    def all_reduce(self, contribution: dict, world) -> dict:
        """All workers do as this one; time passes."""
        for thread in (self._copying, self._replicating, self._writing, self._publishing):
            thread.turn()
        return contribution

    def wait(self, stages: Stages, for_storage: bool) -> None:
        """Something that is waited for ends, however slow it is."""
        self._copying.turn(least=1)
        self._replicating.turn(least=1)
        if for_storage:
            self.was_waited_for = True
            self._writing.turn(least=1)
            self._publishing.turn(least=1)

    def _count(self) -> None:
        there = [done for done in self._begun.values() if done is None or not done.done()]
        self.most = max(self.most, len(there))


def train(policy: Policy, tier: str, model: Model, rests: list[bool], **more) -> SavingPipeline:
    """Trains, and takes the snapshots that a policy plans."""
    world, nothing = SimpleNamespace(size=1, rank=0), Mock()
    nothing.contribution.return_value, nothing.on_totals.return_value = {}, {}
    nothing.with_gradients.return_value.layout.nbytes = 1
    nothing.processes, nothing.replicate = [], lambda *_: model.replicate()
    memory = None if tier == "disk" else Mock()
    tiers = SimpleNamespace(memory=memory, leads_node=False, node=(0,), nodes=("0",), before=None, persist_interval=1)
    log = Mock(spec=Listener)
    health = StorageHealth("there", None if tier == "disk" else 1, 100, None, log)
    turns = iter(range(10**9))
    health.contribution = lambda: {"storage_rests": float(rests[next(turns) % len(rests)]), "storage_closed": 0.0}
    parts = SimpleNamespace(
        world=world, policy=policy, tiers=tiers, saver=model, committer=model, meter=Meter(1),
        background_optimizer=None,
        peers=nothing if tier == "peers" else None, tokens=Mock(load={1: [4, 3, 2, 1]}),
        contents=nothing, upstream=None, report=nothing, hasher=nothing, retention_client=nothing, digests=nothing,
    )  # fmt: skip
    flags = Settings("there", ITERATIONS, policy=policy.name, tier=tier, **more)
    saving = SavingPipeline(parts, flags, health, ResumePoint(Position()), lambda at, record: {})
    for iteration in range(1, ITERATIONS + 1):
        saving.receive(pipeline.sum_over_workers(saving.contribution(), world))
        saving.wait_for_copies()
        saving.begin_if_planned(Position(iteration), None)
    return saving


@each_row("tier", TIERS)
@each_row("name", sorted(POLICIES))
@settings(deadline=None, max_examples=100 if ALL else 25)
@given(
    speeds=st.lists(Speed, min_size=3, max_size=3),
    fails=st.lists(st.booleans(), min_size=1, max_size=9),
    rests=st.lists(st.booleans(), max_size=9).map(lambda later: [False, *later]),
    lag=st.none() | st.integers(1, 9),
)
def test_uncommitted_snapshots_are_at_most_two_more_than_buffers(name, tier, speeds, fails, rests, lag):
    model, policy = Model(speeds, fails), policy_named(name)(OPERATORS, Every(1), **OPTIONS.get(name, {}))
    with (
        patch.object(pipeline, "sum_over_workers", model.all_reduce),
        patch.object(memory_tier, "first_reported", lambda reason: reason),
        patch.object(stages, "first_reported", lambda reason: reason),
        patch.object(stages, "gather", lambda mine: [mine]),
        patch.object(memory_tier, "gather", lambda mine: [mine]),
        patch.object(memory_tier.Reservation, "limits", lambda *_: False),
        patch.object(Stages, "wait", lambda stages, for_storage: model.wait(stages, for_storage)),
    ):
        train(policy, tier, model, rests, max_snapshot_lag=lag)
    assert model.most > 0
    if tier == "disk":
        assert model.most <= SPARE + BEYOND
    else:
        assert model.most <= policy.schedule.window_length + 1
        assert not model.was_waited_for


@each_row("tier", TIERS[1:])
@each_row("name", sorted(POLICIES))
@settings(deadline=None, max_examples=100 if ALL else 25)
@given(
    speeds=st.lists(Speed, min_size=3, max_size=3),
    fails=st.lists(st.booleans(), min_size=1, max_size=9),
    lacks=st.lists(st.booleans(), min_size=1, max_size=9),
)
def test_buffers_are_bounded_and_memory_shortage_is_harmless(name, tier, speeds, fails, lacks):
    model, policy = Model(speeds, fails, lacks), policy_named(name)(OPERATORS, Every(1), **OPTIONS.get(name, {}))
    with (
        patch.object(pipeline, "sum_over_workers", model.all_reduce),
        patch.object(memory_tier, "first_reported", lambda reason: reason),
        patch.object(stages, "first_reported", lambda reason: reason),
        patch.object(stages, "gather", lambda mine: [mine]),
        patch.object(memory_tier, "gather", lambda mine: [mine]),
        patch.object(memory_tier.Reservation, "limits", lambda *_: False),
        patch.object(Stages, "wait", lambda stages, for_storage: model.wait(stages, for_storage)),
    ):
        saving = train(policy, tier, model, [False])
    assert 0 < model.slots <= saving._reservation.most_buffers
    if not any(lacks):
        assert saving._reservation.rotation.recovery is not None


class Remover:
    """Storage that cannot remove one snapshot."""

    def __init__(self):
        self.keeps, self.removed = 3, []

    def abandon_save(self, iteration: int) -> None:
        """Removes a snapshot."""
        if iteration == self.keeps:
            raise OSError(5, "input/output error")
        self.removed.append(iteration)


def test_failed_removal_is_retried_and_blocks_no_other():
    storage = Remover()
    tiers = SimpleNamespace(storage=storage)
    committer = Committer(Mock(), SimpleNamespace(operators=[]), tiers, {}, Mock(spec=Listener), {})
    assert [type(committer.remove_abandoned(one).exception()) for one in (3, 5)] == [OSError, OSError]
    assert storage.removed == [5]
    storage.keeps = None
    assert committer.remove_abandoned(7).exception() is None
    assert storage.removed == [5, 3, 7]


@given(st.integers(0, 99), st.integers(1, 99))
def test_next_snapshot_may_start_up_to_bound(outstanding, buffers):
    assert may_begin(outstanding, buffers) == (outstanding + 1 <= buffers + 2)


@each_row("writes, ending, may", [(False, 0, True), (False, 1, True), (False, 2, False), (True, 0, False)])
def test_window_is_stored_if_storage_is_idle(writes, ending, may):
    assert window_may_begin(writes, ending) is may
