"""Defines candidate settings of policies and their prices, for the simulator and ``--ckpt-policy auto``.

Prices are in bytes. The seconds to move these bytes, and the work lost to a fault, are computed identically for all
policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moc.policy.expert_selection import steady_risk
from moc.policy.windows import OperatorBytes

PolicySettings = Mapping[str, Any]
"""Settings of a policy by flag name without the policy's prefix, such as ``k`` for ``pec_k``."""


@dataclass(frozen=True)
class SnapshotSizes:
    """Bytes of one snapshot: of the busiest rank, and of all ranks."""

    busiest: float
    total: float


@dataclass(frozen=True)
class Machine:
    """A model partitioned over ranks, and the copy speed: the input of prices.

    Attributes:
        ranks: ranks of the job.
        full_snapshot: sizes of a full snapshot.
        with_experts: sizes of a snapshot of everything dense and K experts of each layer, for any K from 1 to all.
        stages: operators by pipeline stage, in the order of sparse snapshots.
        overlap_s: seconds of an iteration that a copy can overlap at no cost.
        copy_rate: bytes per second of an overlapped copy.
        expert_counts: candidate values of K, ascending, the last being all experts; empty without experts.
        tokens_at_risk: tokens at risk right after a snapshot, in iterations, if experts are selected by popularity. Its
            arguments are the share of experts in the snapshot and the cost of an expert in every snapshot
            (:func:`moc.policy.tokens_at_risk.risk_by_share`). None if tokens were not counted.
        gradient_ratio: bytes of an expert's gradients relative to its state. None if no snapshot may have gradients, or
            a loss would leave only storage, which has none.
    """

    ranks: int
    full_snapshot: SnapshotSizes
    with_experts: Callable[[int], SnapshotSizes] = field(hash=False)
    stages: Sequence[Sequence[OperatorBytes]]
    overlap_s: float
    copy_rate: float
    expert_counts: Sequence[int] = ()
    tokens_at_risk: Callable[[float, float], float] | None = field(default=None, hash=False)
    gradient_ratio: float | None = None

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 without experts."""
        return max(self.expert_counts, default=0)

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert of each layer, of all ranks; all bytes if a layer has one expert."""
        total, number = self.full_snapshot.total, self.num_experts
        return (total - self.with_experts(1).total) / (number - 1) if number > 1 else total


@dataclass(frozen=True)
class Price:
    """Contents and price of one checkpoint of a policy that a run can resume from.

    Attributes:
        size: total size of its snapshots.
        snapshots: bytes of the busiest rank by snapshot; several form a window, one per iteration.
        k: experts of each layer that a checkpoint saves, the others being older; None for all.
        window_length: snapshots in the longest window of any stage.
        snapshots_in_memory: maximum number of snapshots that recovery needs in memory; None without windows.
        tokens_at_risk: tokens at risk right after it, in iterations, with one per iteration; None as if experts were
            saved in turn.
        interval: iterations between snapshots that this price is for; None for any.
        repeated_updates: updates of all experts that a recovery repeats with saved gradients.
        chained_bytes: maximum bytes of gradients in memory in addition to the newest states, of all ranks.
    """

    size: SnapshotSizes
    snapshots: Sequence[float] = ()
    k: int | None = None
    window_length: int = 1
    snapshots_in_memory: int | None = None
    tokens_at_risk: float | None = None
    interval: int | None = None
    repeated_updates: float = 0.0
    chained_bytes: float = 0.0


class PolicyCosts:
    """Candidate settings of a policy and their prices; without state.

    Attributes:
        doubled_setting: the setting that faults double in the simulator, if any; see :mod:`moc.policy.pec_selection`.
    """

    doubled_setting: ClassVar[str | None] = None

    def candidates(self, machine: Machine) -> Iterator[PolicySettings]:
        """Yields the settings that ``--ckpt-policy auto`` and the planner choose from; by default, only the defaults.

        Each setting corresponds to a flag of the policy that is marked ``chosen_by_auto``.
        """
        yield {}

    def price(self, machine: Machine, settings: PolicySettings) -> Price:
        """Returns the price of a checkpoint under some settings; by default, of one full snapshot.

        ``settings`` is one of :meth:`candidates`, or the settings given by a user of the simulator, possibly none.
        """
        return Price(machine.full_snapshot)

    def describe(self, settings: PolicySettings) -> str:
        """Returns a candidate's settings in readable form, without the interval."""
        return ", ".join(f"{name} {value}" for name, value in settings.items())


GRADIENTS_OFF = "off"
"""The setting of ``gradients`` that saves only states."""


def chained_expert_cost(gradient: float, max_age: int) -> float:
    """Returns the mean cost, in states, of an expert in every snapshot whose base is renewed after ``max_age``.

    Args:
        gradient: bytes of its gradients relative to its state.
        max_age: iterations after which its state is saved again.
    """
    return gradient + (1 - gradient) / (max_age + 1)


def hidden_expert_counts(machine: Machine) -> Sequence[int]:
    """Returns the numbers of experts of each layer whose copy hides; the smallest candidate if none does."""
    hidden_bytes = machine.overlap_s * machine.copy_rate
    return [
        k for k in machine.expert_counts if machine.with_experts(k).busiest <= hidden_bytes
    ] or machine.expert_counts[:1]


def selective_candidates(machine: Machine) -> Iterator[PolicySettings]:
    """Yields snapshots of the experts that hide: with states only, and if possible with gradients in place of state."""
    for k in hidden_expert_counts(machine):
        yield {"experts": k, "gradients": GRADIENTS_OFF}
        if machine.gradient_ratio is not None:
            yield {"bytes": round(k * machine.expert_bytes)}


def selective_price(machine: Machine, k: int, gradients: bool) -> Price:
    """Returns the price of a snapshot with the bytes of K experts of each layer, in the steady state.

    With gradients, every iteration takes a snapshot. They hide as states do, because training continues once they are
    in a second buffer on the device. Memory keeps as many chains as fit, at most at their maximum length. A recovery
    repeats half of that on average.

    Args:
        machine: has experts.
        k: S, the number of states with the bytes of a snapshot.
        gradients: they are used where ``machine`` allows them.
    """
    number = machine.num_experts
    if machine.gradient_ratio is None or not gradients:
        risk = None if machine.tokens_at_risk is None else machine.tokens_at_risk(k / number, 1.0)
        return Price(machine.with_experts(k), k=k, tokens_at_risk=risk)
    max_age = 4 * -(-number // k)
    cost = chained_expert_cost(machine.gradient_ratio, max_age)
    if machine.tokens_at_risk is None:
        risk = steady_risk([1 / number] * number, k, cost)  # as if equally busy
    else:
        risk = machine.tokens_at_risk(k / number, cost)
    share = min(1.0, k / (cost * number))
    size = machine.with_experts(min(k, math.ceil(cost * number)))
    chained = max_age * share * machine.gradient_ratio * number * machine.expert_bytes
    return Price(
        size,
        k=k,
        tokens_at_risk=risk,
        interval=1,
        repeated_updates=share * max_age / 2,
        chained_bytes=chained,
    )
