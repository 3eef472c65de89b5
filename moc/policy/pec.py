"""Saves all dense operators, and some experts of each layer in turn (partial experts checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import Any, Self

from moc.files import decode
from moc.files.decode import Amount, Count
from moc.policy.costs import Machine, PolicyCosts, PolicySettings, Price
from moc.policy.errors import PolicyError
from moc.policy.expert_selection import ExpertId
from moc.policy.flags import FlagConflict, FlagValues, JobShape, PolicyFlag, PolicyFlags, number_or_auto
from moc.policy.interface import Load, PolicyReport, RecoveryResponse, SnapshotPlan, StorageSchedule
from moc.policy.interval import Every
from moc.policy.partial import ExpertTable, PartialPolicy, PartialRecovery, PartialState, PartialStorage
from moc.policy.pec_selection import (
    PLT_LIMIT,
    Ages,
    DynamicK,
    expert_ages,
    is_starved,
    load_aware_experts,
    next_rotation_step,
    persist_selection,
    sequential_experts,
    storage_cycle_length,
)
from moc.policy.registry import AUTO, policy
from moc.state.operators import Detail

NOT_CHOSEN = {"weights": Detail.MOMENTS, "optimizer": Detail.MASTER, "both": None}
"""Detail of the other experts by target: moments with ``weights``, master weights with ``optimizer``."""

SELECTIONS = ("sequential", "load_aware")


def initial_experts(flags: FlagValues) -> tuple[int, int]:
    """Returns K_snapshot and K_persist by the flags, or their initial values under ``auto``."""
    k = 1 if flags.pec_k == "auto" else int(flags.pec_k)
    return flags.pec_k_snapshot or k, flags.pec_k_persist or k


def _exceeds_message(flags: FlagValues) -> str:
    in_snapshot, to_storage = initial_experts(flags)
    return (
        f"--pec-k-persist {to_storage} is more than the {in_snapshot} experts of a layer in a snapshot. Fix: set it to "
        f"at most {in_snapshot}, or raise --pec-k-snapshot to {to_storage}"
    )


def _disk_message(flags: FlagValues) -> str:
    in_snapshot, to_storage = initial_experts(flags)
    return (
        f"{to_storage} of the {in_snapshot} experts in a snapshot would be written to --ckpt-dir, but --ckpt-tier disk "
        "writes all of them. Fix: drop --pec-k-snapshot and --pec-k-persist, or choose --ckpt-tier memory or peers"
    )


FLAGS = (
    PolicyFlag(
        "pec_k",
        str,
        "1",
        "With --ckpt-policy pec: experts of each layer in a snapshot (K_pec); auto is --ckpt-policy auto with no other "
        "policy, and keeps a given --snapshot-interval.",
        parse=number_or_auto,
        metavar="K|auto",
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "pec_k_snapshot",
        int,
        None,
        "Experts of each layer in a snapshot in memory, if not --pec-k.",
        at_least=1,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "pec_k_persist",
        int,
        None,
        "Experts of each layer that are also written to --ckpt-dir, if not --pec-k.",
        at_least=1,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "pec_selection",
        str,
        "sequential",
        "Which experts are saved: in turn, or those with the most tokens since their last save.",
        choices=SELECTIONS,
    ),
    PolicyFlag(
        "pec_target",
        str,
        "both",
        "What is saved of the chosen experts only: their weights, their optimizer state, or both; the rest is saved of "
        "all experts.",
        choices=tuple(NOT_CHOSEN),
    ),
    PolicyFlag("pec_dynamic_k", bool, False, "Double K when faults have used up their share of --pec-plt-limit."),
    PolicyFlag(
        "pec_plt_limit",
        float,
        PLT_LIMIT,
        "Largest proportion of lost tokens (MoC-System's PLT).",
        above=0.0,
        at_most=1.0,
        required_flag="pec_dynamic_k",
    ),
)


class PecFlags(PolicyFlags):
    """Flags of partial experts checkpointing."""

    specs = FLAGS
    conflicts = (
        FlagConflict(
            lambda flags: (
                flags.pec_k == "auto" and (flags.pec_k_snapshot or flags.pec_k_persist or flags.persist_interval)
            ),
            "--pec-k auto chooses the numbers of experts and the intervals. Fix: drop --pec-k-snapshot, "
            "--pec-k-persist and --persist-interval",
            code="flag-chosen-by-auto",
        ),
        FlagConflict(
            lambda flags: initial_experts(flags)[0] < initial_experts(flags)[1],
            _exceeds_message,
            code="flag-exceeds-another",
        ),
        FlagConflict(
            lambda flags: flags.ckpt_tier == "disk" and initial_experts(flags)[0] != initial_experts(flags)[1],
            _disk_message,
            code="tier-lacks-flag",
        ),
        FlagConflict(
            lambda flags: flags.pec_dynamic_k and flags.pec_target == "optimizer",
            "--pec-dynamic-k has no effect with --pec-target optimizer, which saves all weights. Fix: drop one of them",
            code="flag-has-no-effect",
        ),
        FlagConflict(
            lambda flags: (
                flags.pec_plt_limit != PLT_LIMIT
                and not (flags.pec_dynamic_k or flags.pec_k == "auto" or flags.ckpt_policy == AUTO)
            ),
            "--pec-plt-limit needs --pec-dynamic-k, --pec-k auto or --ckpt-policy auto. Fix: add one of them",
            code="flag-needs-another",
        ),
    )

    def chooses_settings(self, flags: FlagValues) -> bool:
        return flags.pec_k == "auto"

    def experts_per_layer(self, flags: FlagValues) -> tuple[int, int] | None:
        return initial_experts(flags)

    def max_lost_tokens(self, flags: FlagValues) -> float:
        return flags.pec_plt_limit

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        k, k_persist = initial_experts(flags)
        return {
            "k": k,
            "k_persist": k_persist,
            "plt_limit": flags.pec_plt_limit if flags.pec_dynamic_k else 0.0,
        }


class PecCosts(PolicyCosts):
    """Every number of experts below all, and its price."""

    doubled_setting = "k"

    def candidates(self, machine: Machine) -> Iterator[PolicySettings]:
        """As :meth:`PolicyCosts.candidates`: every candidate K except all experts."""
        return ({"k": k} for k in machine.expert_counts[:-1])

    def price(self, machine: Machine, settings: PolicySettings) -> Price:
        """As :meth:`PolicyCosts.price`; by default, K is one in eight experts."""
        if not machine.num_experts:
            return Price(machine.full_snapshot)
        k = settings.get("k") or max(1, machine.num_experts // 8)
        return Price(machine.with_experts(k), k=k)

    def describe(self, settings: PolicySettings) -> str:
        return f"K {settings['k']}" if "k" in settings else ""


@dataclass
class PecState(PartialState):
    """Progress of the rotation, and changes of K by faults.

    Attributes:
        partial: partial snapshots so far.
        k: K_persist as raised by faults; 0 if unchanged.
        booked: PLT booked on ``k``; see :class:`moc.policy.pec_selection.DynamicK`.
    """

    partial: Count = 0
    k: Count = 0
    booked: Amount = 0.0

    @classmethod
    def read(cls, state: Mapping[str, Any], num_experts: Mapping[int, int]) -> Self:
        """As :meth:`PartialState.read`; states of earlier versions have marks instead of tokens, and no iterations."""
        decoded = decode.convert_state(state, dict, cls.of)
        if "persists" in decoded:
            decoded = decoded | {"saved": {}, "persisted": {}}
        return super().read({"saved_at": {}, "persisted_at": {}, **decoded}, num_experts)


@policy("pec", flags=PecFlags(), costs=PecCosts())
@dataclass(frozen=True)
class Pec(PartialPolicy):
    """PEC (Cai, Qin, Huang, 2024, section 3.1) in the two levels of MoC-System (ASPLOS 2025, sections 3.2, 5.1, 5.3).

    The first snapshot of a run is full. Each later one saves all dense operators and K experts of each layer. With a
    tier above storage, ``k_persist`` of these experts are persisted, and the first checkpoint in storage must also be
    full. A partial snapshot is complete only if K is all experts; the other experts are in earlier ones.

    Attributes:
        k: K_snapshot, experts of each layer in a snapshot.
        k_persist: K_persist, number of these that are persisted; 0 for all.
        selection: ``sequential``, in turn, or ``load_aware``, experts with the most tokens since their last save.
        target: state saved only for the chosen experts: ``weights``, ``optimizer`` or ``both``; the rest is saved for
            all experts (MoC's W and O, section 6.3).
        ep: expert-parallel ranks, over which the selection is balanced.
        plt_limit: K doubles when faults have lost its share of this proportion of tokens; 0 for never.
        persist_every: snapshots per persisted one, if fixed.

    Raises:
        ValueError: a setting conflicts with the others or the model.
    """

    k: int = 1
    k_persist: int = 0
    selection: str = "sequential"
    target: str = "both"
    ep: int = 1
    plt_limit: float = 0.0
    persist_every: int = 1
    state: PecState = field(default_factory=PecState, compare=False, kw_only=True)

    def __post_init__(self):
        if self.selection not in SELECTIONS:
            raise PolicyError(
                f"there is no selection of experts called {self.selection}. Fix: choose {' or '.join(SELECTIONS)}",
                code="value-not-a-choice",
            )
        if self.target not in NOT_CHOSEN:
            raise PolicyError(
                f"there is no target called {self.target}. Fix: choose one of {', '.join(NOT_CHOSEN)}",
                code="value-not-a-choice",
            )
        if self.target == "optimizer" and self.plt_limit:
            raise PolicyError(
                "Dynamic-K goes by tokens that weights have lost, and with the target optimizer all weights are saved, "
                "so it would never act. Fix: drop --pec-dynamic-k, or choose another --pec-target",
                code="flag-has-no-effect",
            )
        if self.persist_every < 1:
            raise PolicyError(
                f"persist_every is {self.persist_every}. Fix: set persist_every to at least 1",
                code="interval-invalid",
            )
        for layer, number in self.num_experts.items():
            if not 1 <= self.k <= number or not 0 <= self.k_persist <= self.k:
                raise PolicyError(
                    f"of the {number} experts of layer {layer}, {self.k} cannot be in a snapshot and {self.k_persist} "
                    f"of these go to storage. Fix: take from 1 to {number}, and to storage no more than that",
                    code="experts-per-snapshot-invalid",
                )
            if self.ep < 1 or number % self.ep:
                raise PolicyError(
                    f"the {number} experts of layer {layer} are not a multiple of ep = {self.ep}. Fix: change the "
                    "number of experts, or --expert-model-parallel-size",
                    code="experts-not-divisible",
                )

    def plan_partial(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan:
        return self.plan_with(iteration, self._selected(iteration, load, persists))

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`; a partial snapshot advances the rotation."""
        super().on_snapshot(plan, load)
        self.state.partial += not plan.complete

    @property
    def storage(self) -> StorageSchedule:
        return PecStorage(self)

    @property
    def report(self) -> PolicyReport:
        return PecReport(self)

    @property
    def recovery(self) -> RecoveryResponse:
        return PecRecovery(self)

    @property
    def k_to_persist(self) -> int:
        """Current K_persist."""
        return max(self._raised, self.k_persist or self.k)

    @property
    def k_to_snapshot(self) -> int:
        """Current K_snapshot; faults raise it in proportion to K_persist, up to all experts."""
        raised = -(-self.k * self.k_to_persist // (self.k_persist or self.k))
        return min(raised, min(self.num_experts.values(), default=raised))

    @property
    def _raised(self) -> int:
        """K_persist as raised by faults; 0 without Dynamic-K."""
        return min(self.state.k, min(self.num_experts.values(), default=0)) if self.plt_limit else 0

    def expected(self, persists: bool) -> tuple[Ages, Ages | None] | None:
        """Returns the expected ages of experts in iterations: after a fault that spares memory, and from storage only.

        The second is None unless snapshots are persisted. The result is None without experts, if the interval is tuned,
        or if the selection is by load.
        """
        if not isinstance(self.interval, Every) or not self.num_experts or self.selection != "sequential":
            return None
        number, every, interval = max(self.num_experts.values()), self.persist_every, self.interval.interval
        k, k_persist = self.k_to_snapshot, self.k_to_persist
        memory, storage = expert_ages(number, k, k_persist, every)
        return memory.scaled(interval), storage.scaled(every * interval) if persists else None

    def _selected(self, iteration: int, load: Load | None, persists: bool) -> ExpertTable:
        """Returns the experts that memory lacks, or storage if the snapshot ``persists``."""
        memory, storage = self.state.in_memory, self.expected_in_storage()
        if self.selection == "sequential":
            stored = storage.at if persists else None
            return self._in_turn(self.k_to_snapshot, self.state.partial, iteration, self._never() | memory.at, stored)
        if load is None:
            raise PolicyError(
                "the tokens of experts are not counted. Fix: count them, or select experts sequentially",
                code="tokens-not-counted",
            )
        before = self._never() | (storage if persists else memory).tokens
        unsaved = {layer: list(map(sub, load[layer], saved)) for layer, saved in before.items()}
        return load_aware_experts(unsaved, self.k_to_snapshot, self.ep)

    def _in_turn(
        self, k: int, first: int, iteration: int, memory: ExpertTable, storage: ExpertTable | None = None
    ) -> ExpertTable:
        """Returns the K experts of each layer with the oldest versions in memory, or in storage if any starve there."""
        layers, selected = list(self.num_experts), {}
        for number in set(self.num_experts.values()):
            positions = [position for position, layer in enumerate(layers) if self.num_experts[layer] == number]
            marks = [[memory[layers[position]] for position in positions]]
            stored = [storage[layers[position]] for position in positions] if storage else []
            if stored and is_starved(stored, iteration, storage_cycle_length(number, k, self.k_to_persist)):
                marks = [stored, *marks]
            turn = next_rotation_step(first, k, number, self.ep, positions, marks)
            selected |= {
                layers[position]: sequential_experts(turn, position, k, number, self.ep) for position in positions
            }
        return {layer: selected[layer] for layer in layers}

    def plan_with(self, iteration: int, experts: Mapping[int, list[int]]) -> SnapshotPlan:
        """Returns a plan with these experts in full, and the others at the detail that the target leaves for them."""
        details, other_detail = {}, NOT_CHOSEN[self.target]
        for operator in self.operators:
            chosen = operator.expert_id is None or operator.expert_id[1] in experts[operator.expert_id[0]]
            if chosen or other_detail is not None:
                details[operator.name] = Detail.FULL if chosen else other_detail
        complete = len(details) == len(self.operators) and set(details.values()) == {Detail.FULL}
        return SnapshotPlan(iteration, self.name, details, complete)

    def experts_of_plan(self, plan: SnapshotPlan) -> dict[ExpertId, Detail]:
        """Returns the experts that a plan saves in full."""
        return {
            expert_id: detail for expert_id, detail in super().experts_of_plan(plan).items() if detail is Detail.FULL
        }

    def _never(self) -> ExpertTable:
        return {layer: [0] * number for layer, number in self.num_experts.items()}


@dataclass(frozen=True)
class PecStorage(PartialStorage):
    """Storage of PEC: of the experts in a snapshot, it receives the ones that it lacks most."""

    policy: Pec

    def part_of(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`StorageSchedule.part_of`: after a full one, dense operators and K_persist experts per layer."""
        policy = self.policy
        if not policy.state.stored:
            return super().part_of(plan)
        saved: ExpertTable = {layer: [] for layer in policy.num_experts}
        for layer, expert in policy.experts_of_plan(plan):
            saved[layer].append(expert)
        chosen = persist_selection(saved, policy.expected_in_storage().at, policy.k_to_persist, policy.ep)
        return policy.plan_with(plan.iteration, chosen)

    @property
    def cycle(self) -> int | None:
        """As :attr:`StorageSchedule.cycle`: one until an expert starves, and one until all such experts are saved.

        A selection by load has no maximum.
        """
        policy = self.policy
        if policy.selection != "sequential":
            return None
        numbers, k, k_persist = policy.num_experts.values(), policy.k_to_snapshot, policy.k_to_persist
        return 2 * max((storage_cycle_length(number, k, k_persist) for number in numbers), default=1)


@dataclass(frozen=True)
class PecReport(PolicyReport):
    """Numbers of experts, and the expected cost of a fault."""

    policy: Pec

    def gauges(self) -> dict[str, float]:
        """As :meth:`PolicyReport.gauges`: both K."""
        return {"k_snapshot": self.policy.k_to_snapshot, "k_persist": self.policy.k_to_persist}

    def fault_cost(self, train_iters: int, in_memory: bool, in_storage: bool) -> tuple[str, dict] | None:
        """As :meth:`PolicyReport.fault_cost`, assuming equally busy experts (MoC-System, eq. 7)."""
        if (expected := self.policy.expected(in_storage)) is None:
            return None
        memory, storage = expected
        plt = memory.mean / train_iters
        fields = {"plt": plt, "oldest": memory.oldest}
        where = "that leaves memory intact " if in_memory else ""
        text = (
            f"--ckpt-policy pec, with experts equally busy: a fault {where}is expected to cost {plt:.3%} of the tokens "
            f"of this training's experts, and the oldest expert is {memory.oldest} iterations behind"
        )
        if not in_memory:
            return text, fields
        if storage is None:
            text += (
                "; --ckpt-dir has only the first snapshot, so nearly all iterations would be repeated if memory were "
                "lost: add --persist-interval"
            )
            return text, fields
        plt_storage = storage.mean / train_iters
        text += f"; from --ckpt-dir only, {plt_storage:.3%} and {storage.oldest} iterations"
        return text, fields | {"plt_storage": plt_storage, "oldest_storage": storage.oldest}


@dataclass(frozen=True)
class PecRecovery(PartialRecovery):
    """Lost tokens may raise the number of saved experts."""

    policy: Pec

    def on_recovery(self, plt: float) -> None:
        """As :meth:`RecoveryResponse.on_recovery`: K doubles when faults have used up their share of the limit."""
        policy, state = self.policy, self.policy.state
        if policy.plt_limit and policy.num_experts:
            number, first = min(policy.num_experts.values()), policy.k_persist or policy.k
            before = DynamicK(policy.k_to_persist, number, policy.plt_limit, first, state.booked)
            after = before.after_recovery(max(0.0, plt))  # negative if a newer state was found later
            state.booked = after.lost
            if after.k > before.k:
                state.k = after.k
