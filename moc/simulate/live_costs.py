"""Predicts each policy's cost for a live run from the run's own measurements: ``--ckpt-policy auto``.

The recoveries are the program's own: snapshots go to ``--ckpt-tier``, and all workers roll back together.  Times to
detect a fault and to restart are omitted, since they are the same for every choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy

from moc.policy import POLICIES, policy_by_flag
from moc.policy.costs import Machine, Price, SnapshotSizes
from moc.policy.interface import Load
from moc.policy.pec_selection import candidate_expert_counts
from moc.policy.tokens_at_risk import risk_by_share
from moc.policy.windows import OperatorBytes, order_operators
from moc.sharding import ParallelLayout
from moc.simulate import SimulationError
from moc.simulate.closed_form import at_interval, best_interval, longest
from moc.simulate.cost import split_stages
from moc.simulate.planner import Candidate
from moc.simulate.planner import every_candidate as every_candidate
from moc.simulate.planner import priced as priced
from moc.simulate.policies import Options, Weighed, sparse_replay
from moc.simulate.policy_costs import SimulatedCosts, Traffic, at_risk
from moc.simulate.sizes import MIXED, StateBytes, full_sizes, pec_sizes
from moc.state.operators import Operator
from moc.store.host_memory import most_buffers, most_copies, reserved_bytes, spare_buffers

_TIERS = ("disk", "memory", "peers")

_HEADROOM = 1.25
"""Time between two writes to storage, relative to the mean time of one; with less, every other write would be late."""

_SELDOM = 10
"""Minimum iterations between snapshots in storage if snapshots in memory have gradients."""

NAMES = tuple(POLICIES)
"""Policies that can be priced."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that the busiest rank saves.

    Attributes:
        full: bytes of everything.
        by_k: bytes with K experts of each layer, for the candidates of K; the largest K is all experts; empty without
            experts.
        stages: bytes of each operator, by pipeline stage, in the save order of sparse snapshots.
        gradient: bytes of an expert's gradients, relative to its state; None if no snapshot may have gradients.
    """

    full: float
    by_k: Mapping[int, float]
    stages: Sequence[Sequence[OperatorBytes]]
    gradient: float | None = None

    def with_experts(self, k: int) -> float:
        """Returns the bytes with K experts of each layer; interpolates a K between two candidates."""
        numbers = sorted(self.by_k)
        return float(numpy.interp(k, numbers, [self.by_k[number] for number in numbers]))


@dataclass(frozen=True)
class Running:
    """Live run, in terms of its snapshots.  Rates are in bytes per second.

    Attributes:
        tier: tier where snapshots are durable: ``disk``, ``memory`` or ``peers``.
        nodes: nodes of the job.
        ranks: ranks per node.
        saved: sizes.
        iteration_s: seconds of an iteration.
        forward_backward_s: the part of it before the update, which can hide a copy.
        copy_rate: from a rank to host memory.
        write_rate: from a rank to storage while all ranks write; reading is assumed to be equally fast.
        replicate_rate: to a node from other nodes; only for the tier ``peers``.
        loads: tokens given to each expert since training began, by layer; None if they are not counted.

    Raises:
        ValueError: a value that must be positive is not.
    """

    tier: str
    nodes: int
    ranks: int
    saved: SavedBytes
    iteration_s: float
    forward_backward_s: float
    copy_rate: float
    write_rate: float
    replicate_rate: float = math.inf
    loads: Load | None = None

    def __post_init__(self):
        if self.tier not in _TIERS:
            raise SimulationError(
                f"there is no tier {self.tier!r}. Fix: choose one of {', '.join(_TIERS)}",
                code="value-not-a-choice",
            )
        for name in (field.name for field in dataclasses.fields(self) if field.name not in ("tier", "saved", "loads")):
            if not getattr(self, name) > 0:
                raise SimulationError(
                    f"{name} cannot be {getattr(self, name)}. Fix: give a number above 0",
                    code="value-out-of-range",
                )

    def iterations(self, seconds: float) -> int:
        """Returns the iterations in these seconds, rounded up; at least one, since snapshots count after a commit."""
        return max(1, math.ceil(seconds / self.iteration_s))

    def persist_s(self, nbytes: float) -> float:
        """Returns the seconds between two writes of a rank's bytes that storage sustains, although rates vary."""
        return _HEADROOM * nbytes / self.write_rate

    def safe_s(self, nbytes: float, replicas: int) -> float:
        """Returns the seconds from the copy of a rank's bytes until they are durable in the tier."""
        if self.tier == "peers":
            return replicas * self.ranks * nbytes / self.replicate_rate
        return nbytes / self.write_rate if self.tier == "disk" else 0.0

    @cached_property
    def machine(self) -> Machine:
        """Machine for the prices of policies; losing a node also loses its snapshots.

        A snapshot hides if copy (and, on disk, write) fit an iteration.
        """
        rate, ranks = self.copy_rate, self.ranks * self.nodes
        if self.tier == "disk":
            rate = min(rate, self.write_rate * self.iteration_s / self.forward_backward_s)
        return Machine(
            ranks=ranks,
            full_snapshot=SnapshotSizes(self.saved.full, ranks * self.saved.full),
            with_experts=lambda k: SnapshotSizes(nbytes := self.saved.with_experts(k), ranks * nbytes),
            stages=self.saved.stages,
            overlap_s=self.forward_backward_s,
            copy_rate=rate,
            expert_counts=sorted(self.saved.by_k),
            tokens_at_risk=None if self.loads is None else risk_by_share([self.loads]),
        )

    def machine_with(self, options: Options) -> Machine:
        """Returns the machine with these copies; with a snapshot in every iteration, they may have gradients."""
        may = options.replicas and options.interval in (None, 1)
        return dataclasses.replace(self.machine, gradient_ratio=self.saved.gradient) if may else self.machine

    def price(self, name: str, options: Options) -> Price:
        """Returns the price of a policy."""
        return POLICIES[name].costs.price(self.machine_with(options), options.settings)

    def offered(self, name: str, basic: Options, replicas: Sequence[int]) -> Iterator[Options]:
        """Yields :meth:`moc.simulate.planner.Priced.offered`, without settings whose snapshots are too slow."""
        for number in replicas if self.tier == "peers" else (0,):
            options = dataclasses.replace(basic, replicas=number)
            for settings in POLICIES[name].costs.candidates(self.machine_with(options)):
                candidate_options = options.with_settings(settings)
                interval = self.price(name, candidate_options).interval
                if interval is None or shortest_interval(self, name, candidate_options) <= interval:
                    yield candidate_options

    def weighed(self, name: str, options: Options) -> Weighed:
        """Returns :meth:`moc.simulate.planner.Priced.weighed`, including the persist interval."""
        if POLICIES[name].can_replay:
            saving, plt = _windows(self, name, options), 0.0
        else:
            saving, plt = _at_interval(self, name, options)
        price = self.price(name, options)
        persist_interval = _persist_interval(self, saving, price)
        options = dataclasses.replace(options, interval=saving.interval, persist_interval=persist_interval)
        saving = dataclasses.replace(
            saving, survives=options.replicas, beyond=_from_storage(self, saving, persist_interval)
        )
        host = host_bytes(self.tier, self.ranks, self.saved.full, options.replicas, price)
        host += (1 + options.replicas) * (self.ranks * _retained_bytes(self, price) + price.chained_bytes / self.nodes)
        return Weighed(options, saving, plt, host)


def saved_by_rules(
    operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes = MIXED, gradients: bool = False
) -> SavedBytes:
    """Returns sizes by the sharding rules, for a model that is not loaded; ``gradients`` if snapshots may have some."""
    stages, compute = [], dataclasses.replace(state, master=0, moments=0)
    stage_layout = dataclasses.replace(layout, world=layout.world // layout.pp, pp=1, vpp=1)
    for stage in split_stages(operators, layout.pp):
        parameters = sum(operator.parameters for operator in stage)
        sizes = [full_sizes(stage, stage_layout, part).busiest / parameters for part in (state, compute)]
        ordered = order_operators(stage, None, layout.ep)
        stages.append([OperatorBytes(*(size * operator.parameters for size in sizes)) for operator in ordered])
    experts = len({operator.expert for operator in operators if operator.expert is not None})
    by_k = {k: pec_sizes(operators, layout, k, state).busiest for k in candidate_expert_counts(experts)}
    gradient = state.gradient if gradients else None
    return SavedBytes(full_sizes(operators, layout, state).busiest, by_k, stages, gradient)


def host_bytes(tier: str, ranks: int, full: float, replicas: int, price: Price | None = None) -> float:
    """Returns the bytes of a node's memory for its snapshots, and for copies of other nodes' snapshots.

    Args:
        tier: tier where snapshots are durable.
        ranks: ranks per node.
        full: bytes of a rank's full snapshot.
        replicas: other nodes that keep copies.
        price: price of the policy; None for full snapshots.
    """
    spare = spare_buffers(tier)
    if tier == "disk":
        return ranks * full * spare
    retained, window, snapshot = 1, 1, None
    if price is not None and price.snapshots_in_memory is not None and price.window_length > 1:
        retained, window, snapshot = price.snapshots_in_memory, price.window_length, max(price.snapshots)
    own = reserved_bytes(most_buffers(retained, window, spare, stores=True), full, snapshot)
    return ranks * (own + replicas * reserved_bytes(most_copies(retained, spare), full, snapshot))


def flags_of_candidate(candidate: Candidate) -> dict[str, object]:
    """Returns the training flags of a candidate, by name with underscores."""
    options, kind = candidate.options, POLICIES[candidate.saving.name]
    flags: dict[str, object] = {"ckpt_policy": kind.name}
    if not kind.can_replay:  # a window's interval is its length
        flags["snapshot_interval"] = str(options.interval)
    kinds = {flag.name: flag.value_type for flag in kind.flags.specs}
    for name, value in options.settings.items():
        flags[f"{kind.name}_{name}"] = kinds[f"{kind.name}_{name}"](value)
    if options.persist_interval is not None:
        flags["persist_interval"] = options.persist_interval
    return flags | ({"replicas": options.replicas} if options.replicas else {})


def options_of(flags: Mapping[str, Any], mtbf_s: float) -> Options:
    """Returns the inverse of :func:`flags_of_candidate`, for :func:`~moc.simulate.planner.priced`."""
    interval, policy_of_flag = flags.get("snapshot_interval"), policy_by_flag()
    fixed, replicas = None if interval is None else int(interval), int(flags.get("replicas", 0))
    basic = Options(interval=fixed, mtbf_s=mtbf_s, dynamic=False, replicas=replicas)
    settings = {
        name.removeprefix(f"{policy_of_flag[name].name}_"): int(value) if str(value).isdecimal() else value
        for name, value in flags.items()
        if name in policy_of_flag
    }
    return basic.with_settings(settings)


def _at_interval(run: Running, name: str, options: Options) -> tuple[SimulatedCosts, float]:
    """Returns costs of snapshots, full or with some experts of each layer, at an interval; and the expected PLT."""
    price = run.price(name, options)
    nbytes, k, num_experts = price.size.busiest, price.k, run.machine.num_experts
    fewer = k is not None and k < num_experts
    copy_s, safe_s = nbytes / run.copy_rate, run.safe_s(nbytes, options.replicas)
    update_s = run.iteration_s - run.forward_backward_s
    stall_s = max(0.0, copy_s - run.forward_backward_s)
    saving = SimulatedCosts(
        name=name,
        interval=1,
        stall_s=stall_s,
        lag=run.iterations(copy_s + safe_s),
        restart_s=_load_s(run, run.saved.full) + price.repeated_updates * update_s,
        replay_s=run.iteration_s + stall_s,
        traffic=_traffic(run, price, options.replicas),
        exact=not fewer,
        at_risk=at_risk(price, num_experts),
    )
    least = shortest_interval(run, name, options)
    interval = options.interval or price.interval or best_interval(saving, run.iteration_s, options.mtbf_s, least)
    if k is None or not fewer:
        return at_interval(saving, interval, run.iteration_s), 0.0
    # any lost memory leaves copies, or every snapshot's experts in storage, which is equally recent
    rate = run.iteration_s / options.mtbf_s
    plt_per_iteration = rate * saving.at_risk
    if not (options.interval or price.interval):
        interval = longest(least, interval, plt_per_iteration, options.plt_limit)
    return at_interval(saving, interval, run.iteration_s), interval * plt_per_iteration


def shortest_interval(run: Running, name: str, options: Options) -> int:
    """Returns the iterations until the next snapshot can start, for a policy without windows."""
    price = run.price(name, options)
    nbytes = price.size.busiest
    copy_s, write_s, safe_s = nbytes / run.copy_rate, run.persist_s(nbytes), run.safe_s(nbytes, options.replicas)
    if run.tier == "disk":
        return run.iterations(copy_s + nbytes / run.write_rate)
    # states of fewer experts are also written to storage, which holds the other experts
    return run.iterations(safe_s if price.k is None or price.interval else max(safe_s, write_s))


def _windows(run: Running, name: str, options: Options) -> SimulatedCosts:
    """Returns costs of saving each operator once per window; all workers replay (MoEvement, section 3.3)."""
    price = run.price(name, options)
    window, snapshots, nbytes = price.window_length, price.snapshots, price.size.busiest
    copying_s = sum(max(0.0, window_bytes / run.copy_rate - run.forward_backward_s) for window_bytes in snapshots)
    safe_s = run.safe_s(nbytes, options.replicas)
    stall_s = max(copying_s, safe_s - window * run.iteration_s)
    last_s = snapshots[-1] / run.copy_rate + run.safe_s(snapshots[-1], options.replicas)
    traffic = _traffic(run, price, options.replicas)
    saving = SimulatedCosts(name=name, stall_s=stall_s, restart_s=_load_s(run, nbytes), traffic=traffic)
    saving = sparse_replay(saving, window, run.iteration_s)
    return dataclasses.replace(saving, lag=window + run.iterations(last_s), local=False)


def _retained_bytes(run: Running, price: Price) -> float:
    """Returns a rank's bytes in memory besides its buffers: experts, also of snapshots not known to be durable."""
    num_experts = run.machine.num_experts
    if run.tier == "disk" or price.k is None or price.k >= num_experts:
        return 0.0
    expert = (run.saved.full - run.saved.with_experts(1)) / (num_experts - 1)
    return expert * (num_experts + (spare_buffers(run.tier) - 1) * min(price.k, num_experts - price.k))


def _load_s(run: Running, nbytes: float) -> float:
    return nbytes / (run.write_rate if run.tier == "disk" else run.copy_rate)


def _traffic(run: Running, price: Price, replicas: int) -> Traffic:
    total = price.size.total
    return Traffic(host=total, network=replicas * total, storage=total if run.tier == "disk" else 0.0)


def _persist_interval(run: Running, saving: SimulatedCosts, price: Price) -> int | None:
    """Returns the shortest persist interval that storage sustains, for a tier in memory; None for disk.

    With fewer experts every snapshot is persisted.  If a snapshot would have gradients, storage takes half of the
    budget for states.  Such snapshots are persisted so rarely that chains are hardly affected.
    """
    if run.tier == "disk":
        return None
    rank_bytes = saving.traffic.host / (run.ranks * run.nodes)  # of a window, all its snapshots
    persist_interval = run.iterations(run.persist_s(rank_bytes))
    if price.interval:
        return max(_SELDOM, persist_interval)
    return saving.interval if not saving.exact else math.ceil(persist_interval / saving.interval) * saving.interval


def _from_storage(run: Running, saving: SimulatedCosts, persist_interval: int | None) -> SimulatedCosts | None:
    """Returns the costs of recovery from storage if memory is lost; None if recovery is always from storage."""
    if persist_interval is None:
        return None
    write_s = run.saved.full / run.write_rate
    return dataclasses.replace(
        saving,
        interval=persist_interval,
        lag=saving.lag + run.iterations(write_s),
        restart_s=write_s,
        survives=0,
        beyond=None,
    )
