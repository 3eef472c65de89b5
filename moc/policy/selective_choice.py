"""Chooses the experts of a selective snapshot, and whether their state or their gradients are saved.

* State of the policy: the saved versions of experts in each tier, and the tokens at risk.
* Measured budgets of bytes (MoEtion, section 4.2).
* Gradients in place of state: MoEtion's asynchronous optimizer recomputation (section 5.2, Algorithm 3). An expert is
  in a *chain* if every snapshot since its last full save has it. Its next state follows from the previous one by an
  update with its reduced gradients, a third of the bytes. So a snapshot may have gradients instead, and a recovery
  repeats the updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from moc.files import decode
from moc.files.decode import Amount, Count
from moc.policy.expert_selection import (
    CountsByLayer,
    ExpertId,
    ExpertsByLayer,
    ExpertSizes,
    Limit,
    Preselection,
    expert_ids,
    lost_tokens_by_layer,
    per_byte,
    proportional,
    scores,
)
from moc.policy.interface import Load
from moc.policy.interval import Interval, Measurements, ObservedIteration
from moc.policy.partial import ExpertTable, PartialState, SavedVersions
from moc.state.operators import Detail


@dataclass
class SelectiveState(PartialState):
    """Saves to memory, copies and storage, and the risk of the newest snapshot.

    Attributes:
        copied: as ``saved``, for copies in the memory of other nodes.
        copied_at: as ``saved_at``, for copies.
        bases: iteration of each expert's last full save since the run was last resumed.
        copied_bases: as ``bases``, for copies.
        given: tokens given to the experts of each layer until the newest snapshot.
        iteration: iteration of the newest snapshot.
        mlt: momentary lost tokens right after it, in iterations: see :meth:`SelectiveReport.gauges`.
        mlt_peers: momentary lost tokens if a node is lost, and its experts are loaded from copies.
    """

    of: ClassVar[str] = "selective checkpoints"

    copied: ExpertTable = field(default_factory=dict)
    copied_at: ExpertTable = field(default_factory=dict)
    bases: ExpertTable = field(default_factory=dict)
    copied_bases: ExpertTable = field(default_factory=dict)
    given: dict[Count, Count] = field(default_factory=dict)
    iteration: Count = 0
    mlt: Amount = 0.0
    mlt_peers: Amount = 0.0

    @property
    def in_memory(self) -> SavedVersions:
        """Saves to memory, or to the only tier."""
        return SavedVersions(self.saved, self.saved_at, self.bases)

    @property
    def in_peers(self) -> SavedVersions:
        """Copies in other nodes' memory."""
        return SavedVersions(self.copied, self.copied_at, self.copied_bases)

    def record_resume(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`PartialState.record_resume`; chains of gradients end."""
        super().record_resume(in_memory, in_storage)
        self.bases.clear()
        self.copied_bases.clear()

    def record_risk(self, iteration: int, load: Load) -> None:
        """Records the tokens that a fault right after this snapshot would lose."""
        tokens = {layer: sum(row) for layer, row in load.items()}
        each = {
            layer: (tokens[layer] - self.given.get(layer, 0)) / max(1, iteration - self.iteration) for layer in tokens
        }
        risks = [
            lost_tokens_by_layer(subtract_counts(load, saves.tokens), each) for saves in (self.in_memory, self.in_peers)
        ]
        self.given, self.iteration = tokens, iteration
        self.mlt, self.mlt_peers = (sum(risk) / max(1, len(risk)) for risk in risks)

    def experts_per_layer(self, saves: SavedVersions, chained: bool = False) -> float:
        """Returns the mean number of experts of each layer in the newest snapshot; 0 without one.

        With ``chained``, only experts saved by their gradients count.
        """
        newest, layers = max(map(max, self.saved_at.values()), default=0), saves.at
        if not newest:
            return 0.0
        count = sum(
            at == newest and not (chained and base == at)
            for layer, row in layers.items()
            for at, base in zip(row, saves.bases.get(layer, row), strict=True)
        )
        return count / len(layers)


def subtract_counts(current: Load, earlier: Load) -> ExpertTable:
    """Returns the tokens of each expert since an earlier count, for the layers of ``earlier``."""
    return {layer: [n - b for n, b in zip(current[layer], earlier[layer], strict=True)] for layer in earlier}


Chains = Mapping[ExpertId, tuple[int, int]]
"""By expert, the iterations of its base (the last full save) and of its last save, both inclusive."""

DetailByExpert = Mapping[ExpertId, Detail]
"""Details of the chosen experts."""


def gradient_chains(bases: CountsByLayer, saved_at: CountsByLayer) -> dict[ExpertId, tuple[int, int]]:
    """Returns the chains of all experts with a full save.

    Args:
        bases: by layer and expert, the iteration of the last full save; 0 if there is none.
        saved_at: by layer and expert, the iteration of the last save at any detail.
    """
    return {
        (layer, expert): (base, saved_at[layer][expert])
        for layer, row in bases.items()
        for expert, base in enumerate(row)
        if base
    }


def chained_experts(chains: Chains, iteration: int) -> frozenset[ExpertId]:
    """Returns the experts whose gradients of an iteration suffice: their chains reach the previous iteration."""
    return frozenset(expert_id for expert_id, (_, last) in chains.items() if last == iteration - 1)


def experts_to_renew(
    bases: CountsByLayer,
    chained: Collection[ExpertId],
    iteration: int,
    max_age: float,
    limits: Sequence[Limit],
    preselection: Preselection,
) -> frozenset[ExpertId]:
    """Returns the chained experts that need a full save, since longer chains take more memory and recovery time.

    Their bases are older than ``max_age`` iterations. The oldest are first, within the limits left by ``preselection``.
    """
    old = frozenset(expert_id for expert_id in chained if iteration - bases[expert_id[0]][expert_id[1]] > max_age)
    old = old.difference(preselection.chosen)
    if not old:
        return old
    ages = {layer: [iteration - base for base in row] for layer, row in bases.items()}
    first = {layer: [age * ((layer, e) in old) for e, age in enumerate(row)] for layer, row in ages.items()}
    return old.intersection(expert_ids(per_byte(first, ages, math.inf, limits, preselection)))


def choose_details(
    select: Callable[[Preselection], ExpertsByLayer],
    before: DetailByExpert,
    full: Collection[ExpertId],
    chained: Collection[ExpertId],
    compares: bool = False,
) -> DetailByExpert:
    """Returns the experts of a snapshot, each at its detail.

    Args:
        select: chooses experts within limits.
        before: experts that are chosen already.
        full: experts that are saved in full before others are chosen.
        chained: experts whose gradients suffice.
        compares: chained experts that are saved in full also cost their gradients, which are saved for comparison.
    """
    chosen = {expert_id: Detail.FULL for expert_id in full} | dict(before)
    cheaper = frozenset(expert_id for expert_id in chained if chosen.get(expert_id) is not Detail.FULL)
    both = frozenset(chained).intersection(chosen) - cheaper if compares else frozenset()
    experts = expert_ids(select(Preselection(chosen.keys(), cheaper, state_and_gradients=both)))
    return {expert_id: Detail.GRAD if expert_id in cheaper else Detail.FULL for expert_id in sorted(experts)}


def scores_per_cost(
    scores: Mapping[int, Sequence[float]], cheaper: Collection[ExpertId], sizes: ExpertSizes | None = None
) -> dict[int, list[float]]:
    """Returns scores per byte of the save, relative to a full save.

    Args:
        scores: scores by layer and expert.
        cheaper: experts that cost only their gradients.
        sizes: sizes of states and gradients; None if unknown, and then costs are equal.
    """
    ratios = {} if sizes is None else {expert_id: sizes.gradient_ratio(expert_id) for expert_id in cheaper}
    return {
        layer: [score * ratios.get((layer, expert), 1.0) for expert, score in enumerate(row)]
        for layer, row in scores.items()
    }


STORAGE_SHARE = 0.5
"""Share of the limits for experts that are stored in full, if memory receives gradients of the others."""

MAX_AGE_CYCLES = 4
"""Cycles through all experts after which the base of a chain is saved again, and an expert is stored first."""

STATE_AGE_CYCLES = 8
"""As :data:`MAX_AGE_CYCLES`, if snapshots have only states, and no chain in memory grows until then.

On recorded loads and from a warm start, a limit of 8 cycles leaves 2 to 5 % more tokens at risk than none, and one of 4
cycles 9 to 16 %.
"""

STORAGE_CYCLES = MAX_AGE_CYCLES + 2
"""Cycles until storage has a new version of each expert: old experts take at most half of each snapshot."""


@dataclass(frozen=True)
class ExpertChoice:
    """A choice of experts at one iteration; pure, and the same on every rank.

    Attributes:
        iteration: iteration of the snapshot.
        load: tokens of each expert since training began.
        rule: ``per-byte`` or ``proportional`` (MoEtion, Algorithm 1).
        score: ``tokens`` or ``tokens-age``, with the rule ``per-byte``.
        max_age: iterations after which an expert, or the base of a chain, is saved first.
        gradients: gradients are saved in place of state where they suffice.
        sizes: bytes of states and gradients, for scores per byte; None if unknown.
        saves_comparison: if an expert is saved in full although its gradients suffice, these are saved, too.
        storage_max_age: as ``max_age``, for versions in storage; None for :data:`MAX_AGE_CYCLES` cycles at its speed.
    """

    iteration: int
    load: Load
    rule: str
    score: str
    max_age: int
    gradients: bool = False
    sizes: ExpertSizes | None = None
    saves_comparison: bool = False
    storage_max_age: float | None = None

    def choose(
        self,
        memory: SavedVersions,
        limits: Sequence[Limit],
        before: DetailByExpert = MappingProxyType({}),
        storage: SavedVersions | None = None,
    ) -> DetailByExpert:
        """Returns the experts that fit, each at its detail.

        The choice depends on the tokens that memory lacks, or storage if the snapshot is stored. If gradients are
        saved, the choice for storage:

        * takes at most :data:`STORAGE_SHARE` of the limits, and leaves the rest for chains,
        * ranks by tokens times iterations, since storage has no gradients.

        Args:
            memory: saves to memory.
            limits: the budget.
            before: experts that are chosen already, and included in the result.
            storage: versions in storage, or on their way there; None if the snapshot is not stored.
        """
        by_storage = self if storage is None else self._by_storage(storage, limits)
        if not self.gradients:
            experts = expert_ids(by_storage._select(limits, storage or memory, Preselection(before.keys())))
            return dict.fromkeys(experts, Detail.FULL)
        chained = chained_experts(gradient_chains(memory.bases, memory.at), self.iteration)
        preselection = Preselection(
            before.keys(), [expert_id for expert_id in before if before[expert_id] is Detail.GRAD], STORAGE_SHARE
        )
        if storage is not None:
            full = expert_ids(by_storage._select(limits, storage, preselection))
        else:
            full = experts_to_renew(memory.bases, chained, self.iteration, self.max_age, limits, preselection)
        return choose_details(partial(self._select, limits, memory), before, full, chained, self.saves_comparison)

    def _by_storage(self, storage: SavedVersions, limits: Sequence[Limit]) -> ExpertChoice:
        """Returns the choice for storage, with the age limit from the measured speed of storage."""
        since_last = self.iteration - max(map(max, storage.at.values()), default=0)
        old = MAX_AGE_CYCLES * expert_cycle(sum(map(len, storage.at.values())), limits, self.gradients) * since_last
        return replace(
            self,
            score="tokens-age" if self.gradients else self.score,
            max_age=old if self.storage_max_age is None else self.storage_max_age,
        )

    def _select(self, limits: Sequence[Limit], saves: SavedVersions, preselection: Preselection) -> ExpertsByLayer:
        never = {layer: [0] * len(row) for layer, row in self.load.items()}
        unsaved = subtract_counts(self.load, never | saves.tokens)
        if self.rule == "proportional":
            return proportional(unsaved, limits, preselection)
        ages = {layer: [self.iteration - at for at in row] for layer, row in (never | saves.at).items()}
        costs = scores_per_cost(scores(unsaved, ages, self.score), preselection.gradients_only, self.sizes)
        return per_byte(costs, ages, self.max_age, limits, preselection)


def expert_cycle(experts: int, limits: Sequence[Limit], gradients: bool) -> int:
    """Returns the number of stored snapshots until each expert was in one, if experts take turns."""
    share = STORAGE_SHARE if gradients else 1.0
    return -(-experts // max(1, int(share * min(limit.expert_count() for limit in limits))))


def default_max_age(experts: int, interval: int, limits: Sequence[Limit], gradients: bool) -> int:
    """Returns the default number of iterations after which an expert, with ``gradients`` its base, is saved first."""
    return (
        (MAX_AGE_CYCLES if gradients else STATE_AGE_CYCLES) * interval * expert_cycle(experts, limits, gradients=False)
    )


_STALL = 0.03
"""Maximum share of training time for stalls if even the smallest snapshot does not hide."""

_GRADIENTS_STALL = 0.02
"""Maximum delay of training by gradients, as a share of an iteration; otherwise states are saved."""

_CHANGED = 0.1
"""Relative change of a measurement that updates the budgets; smaller changes do not."""

_KEYS = Measurements().state_dict().keys()


class SelectiveTuner(Interval):
    """Measures how many bytes a snapshot may copy and send without delaying training.

    The first iterations are measured without a snapshot. The first snapshot has everything, and the next one waits
    until it is durable. From then on, every ``every``-th iteration takes one.

    Args:
        every: iterations between snapshots.
        figures: earlier measurements, named as in :attr:`Measurements.medians`; budgets use them until new ones are
            known.
        bubble_share: share of forward and backward in the pipeline's bubbles until they are timed, if copies hide
            there; by default they hide behind forward and backward.
        given: all budgets are given, so no snapshot waits for a measurement.
    """

    def __init__(
        self,
        every: int = 1,
        measurements: Mapping[str, float] | None = None,
        bubble_share: float = 0.0,
        has_budgets: bool = False,
    ):
        self.every, self.bubble_share, self.has_budgets = every, bubble_share, has_budgets
        self._measurements = Measurements()
        self._used: dict[str, float] = dict(measurements or {})
        self._started = self._is_pending = False

    @property
    def iterations(self) -> int:
        return self.every

    def observe(self, observed: ObservedIteration) -> None:
        self._measurements.observe(observed)
        self._started, self._is_pending = self._started or observed.snapshot_started, observed.snapshot_pending
        medians = self._measurements.medians
        if any(abs(medians[name] - self._used.get(name, 0.0)) > _CHANGED * medians[name] for name in medians):
            self._used = medians

    def is_due(self, iteration: int) -> bool:
        """Returns True for every ``every``-th iteration once iterations and the first snapshot's cost are measured."""
        measured = "copy_rate" in self._used or not (self._started and self._is_pending)
        is_measured = self.has_budgets or ("iteration_s" in self._used and measured)
        return iteration > 0 and iteration % self.every == 0 and is_measured

    @property
    def gradients_s(self) -> float:
        """Median delay of training by the gradients of a snapshot, in seconds; 0 until measured.

        Gradients are copied twice: to a second buffer on the device, and from there to host memory. Only the first
        copy delays training, unless the device lacks memory for the buffer.
        """
        return self._measurements.gradients_s

    @property
    def are_gradients_hidden(self) -> bool:
        """Whether gradients delay training by at most 2 % of an iteration; True until measured.

        Without gradients, there are no new measurements, so this does not change back until the job starts again.
        """
        return self.gradients_s <= _GRADIENTS_STALL * self._used.get("iteration_s", math.inf)

    @property
    def local_bytes(self) -> float | None:
        """B_local: bytes that a rank copies to host memory while it computes; None until measured.

        The paper uses the complete iteration. Here training waits for the copy before the update, so only forward and
        backward count, or the pipeline's bubbles.
        """
        computing = self._overlapped_bytes
        if not self.bubble_share or computing is None:
            return computing
        bubble_s = self._used.get("bubble_s", self.bubble_share * self._used["forward_backward_s"])
        return min(computing, self._used["copy_rate"] * bubble_s)

    @property
    def _overlapped_bytes(self) -> float | None:
        """Bytes that a rank copies during forward and backward, including bubbles; None until measured."""
        if not {"copy_rate", "iteration_s"} <= self._used.keys():
            return None
        return self._used["copy_rate"] * self._used["forward_backward_s"]

    def remote_bytes(self, tier: str) -> float | None:
        """Returns B_remote per iteration: bytes that a node receives, or with tier ``disk`` that a rank writes.

        None until measured, and with tier ``memory``.
        """
        rate = {"peers": "replicate_rate", "disk": "write_rate"}.get(tier, "")
        if not {rate, "iteration_s"} <= self._used.keys():
            return None
        return self._used[rate] * self._used["iteration_s"]

    def affordable_interval(self, least: float) -> int:
        """Returns the iterations between snapshots; 1 if the smallest one hides.

        Otherwise it is twice the smallest interval that keeps stalls below 3 % of the training time. At that smallest
        interval, a snapshot would save dense operators again and again, and hardly any experts.

        Args:
            least: bytes of the busiest rank's smallest snapshot.
        """
        hidden = self._overlapped_bytes  # the rest is copied during computation if bubbles are too short
        if hidden is None or least <= hidden:
            return 1
        stall_s = (least - hidden) / self._used["copy_rate"]
        return 2 * math.ceil(stall_s / (_STALL * self._used["iteration_s"]))

    def affordable_bytes(self, least: float, interval: int) -> float | None:
        """Returns the bytes that a rank copies in a snapshot; None until measured.

        They are :attr:`local_bytes`. If the smallest snapshot does not hide, they include the bytes that are copied in
        3 % of the training time.

        Args:
            least: as in :meth:`affordable_interval`.
            interval: iterations between snapshots.
        """
        hidden = self._overlapped_bytes
        if hidden is None or least <= hidden:
            return self.local_bytes
        return max(least, hidden + _STALL * interval * self._used["iteration_s"] * self._used["copy_rate"])

    def state_dict(self) -> dict[str, Any]:
        """Returns all measurements, and the measurements that budgets use."""
        return self._measurements.state_dict() | {"used": dict(self._used)}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Interval.loading`; another tuner's state is ignored."""
        is_complete = _KEYS <= decode.convert_state(state, dict, "a tuner").keys()
        seen = Measurements.from_state(state) if is_complete else Measurements()
        used = decode.convert_state(state.get("used", {}), dict[str, decode.Positive], "a tuner") if is_complete else {}

        def load() -> None:
            self._measurements, self._used = seen, used
            self._started = self._is_pending = False

        return load
