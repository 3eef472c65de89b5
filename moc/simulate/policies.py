"""Computes the costs of policies on a cluster, with sizes from their sharding rules and windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import fmean
from typing import Any

from moc.policy import POLICIES as REGISTERED
from moc.policy import RegisteredPolicy
from moc.policy.costs import Machine, PolicySettings, Price, SnapshotSizes
from moc.policy.expert_selection import CountsByLayer
from moc.policy.pec_selection import PLT_LIMIT, DynamicK, candidate_expert_counts
from moc.policy.tokens_at_risk import risk_by_share
from moc.policy.windows import OperatorBytes
from moc.recovery.copy_placement import place_copies
from moc.sharding import ParallelLayout
from moc.simulate import SimulationError
from moc.simulate.closed_form import at_interval, best_interval, capped_interval, longest
from moc.simulate.cost import Cluster, Timing, Work
from moc.simulate.elastic import ElasticCosts, ElasticSettings, elastic_members
from moc.simulate.policy_costs import (
    NEVER,
    CompletePipelines,
    PecStrategy,
    RecoveryCosts,
    SimulatedCosts,
    Strategy,
    Traffic,
    VaryingNodes,
    at_risk,
    program_recovery,
)
from moc.simulate.sizes import MIXED, OperatorSize, StateBytes, busiest_operator_bytes, full_sizes, pec_sizes
from moc.state.operators import Operator

_NAMED = ("k", "window")  # settings of policies that are fields of Options


@dataclass(frozen=True)
class Options:
    """Settings that a user can fix.

    Attributes:
        interval: iterations between checkpoints; None for the best, or the policy's own rule.
        mtbf_s: MTBF that determines intervals.
        k: experts of each layer in a partial checkpoint; None for one in eight.
        dynamic: raise K when faults have used up its share of ``plt_limit``.
        plt_limit: see ``moc.policy.pec_selection``.
        window: W; None for Algorithm 1's.
        replicas: copies in peers' memory.
        persist_interval: iterations between checkpoints in storage; None for the shortest possible.
        own: further settings of a policy.
    """

    interval: int | None = None
    mtbf_s: float = 3600.0
    k: int | None = None
    dynamic: bool = True
    plt_limit: float = PLT_LIMIT
    window: int | None = None
    replicas: int = 2
    persist_interval: int | None = None
    own: PolicySettings = field(default_factory=dict, hash=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The policy's own settings."""
        fixed = {name: getattr(self, name) for name in _NAMED if getattr(self, name) is not None}
        return fixed | dict(self.own)

    def with_settings(self, settings: PolicySettings) -> Options:
        """Returns a copy with other policy settings."""
        named = {name: value for name, value in settings.items() if name in _NAMED}
        unnamed = {name: value for name, value in settings.items() if name not in _NAMED}
        return dataclasses.replace(self, **named, own={**self.own, **unnamed})


_VERSIONS = 2  # one complete checkpoint, and one in progress (MoEvement, section 3.2)
_B_WEIGHT = 1 / 3  # share of forward and backward that a frozen operator skips (MoEvement, sections 3.5 and 5.6)
_CAP = 0.03  # CheckFreq's (MoEvement, section 5.2)

SNAPSHOT_OVERHEAD = 0.02
"""Share of an iteration that a snapshot costs even if its copy is hidden: MoEvement's maximum (section 5.2).

MoEvement has 0.6 to 2.2 percent in Table 3.  This project measured -0.0 and +1.5 percent on a CPU, and +2.6 for full
snapshots in every iteration (docs/results).
"""


@dataclass(frozen=True)
class Setup:
    """Model on a cluster.

    Attributes:
        operators: operators of the unpartitioned model.
        state: bytes of each parameter.
        total_iterations: iterations of the full training.
        overhead: minimum cost of a snapshot, as a share of an iteration, even if its copy is hidden.
        program: measured costs of this program's recovery, which policies then use; None for the papers' recoveries.
        loads: by iteration and layer, tokens of each expert in some run of such a model; empty if unknown.
        members: MIN, MAX and the wait for more nodes of a job that continues with fewer; by default MIN is half of all.
        shrinks: policies other than ``elastic`` also continue with fewer nodes, after a restart of all workers.
        elastic: further settings of an elastic job.
    """

    operators: Sequence[Operator]
    layout: ParallelLayout
    cluster: Cluster
    timing: Timing
    work: Work = Work()
    state: StateBytes = MIXED
    total_iterations: int = 100_000
    overhead: float = SNAPSHOT_OVERHEAD
    program: RecoveryCosts | None = None
    loads: Sequence[CountsByLayer] = ()
    members: VaryingNodes | None = None
    shrinks: bool = False
    elastic: ElasticSettings = field(default_factory=ElasticSettings)

    def __post_init__(self):
        if not 0 <= self.overhead < math.inf:
            raise SimulationError(
                f"a snapshot cannot cost {self.overhead} of an iteration. Fix: give a share from 0, such as 0.02",
                code="value-out-of-range",
            )

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return 1 + max((o.expert for o in self.operators if o.expert is not None), default=-1)

    @cached_property
    def varying(self) -> VaryingNodes:
        """Nodes of a job that continues with fewer."""
        nodes = self.cluster.nodes
        return self.members or VaryingNodes(-(-nodes // 2), nodes)

    @cached_property
    def full(self) -> SnapshotSizes:
        """Sizes of a full snapshot."""
        return full_sizes(self.operators, self.layout, self.state)

    @cached_property
    def by_operator(self) -> list[OperatorSize]:
        """Operator sizes of the busiest rank."""
        return busiest_operator_bytes(self.operators, self.layout, self.state)

    def stall_s(self, nbytes: float) -> float:
        """Returns the seconds that a snapshot adds to an iteration.

        They are the part of the copy that forward and backward do not hide (MoC, eq. 10), and at least ``overhead``:
        even a hidden copy costs something.

        Args:
            nbytes: bytes of a rank's copy.
        """
        exposed_s = nbytes / self.cluster.host_bandwidth - self.timing.forward_backward_s
        return max(self.overhead * self.timing.iteration_s, exposed_s)

    @property
    def network_rate(self) -> float:
        """Bytes per second from one rank to other nodes, while all ranks of its node send."""
        return self.cluster.inter_bandwidth / self.cluster.gpus_per_node

    def iterations(self, seconds: float) -> float:
        """Returns the iterations in this many seconds."""
        return seconds / self.timing.iteration_s

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration without a snapshot."""
        return self.timing.iteration_s

    @cached_property
    def _with_experts(self) -> Callable[[int], SnapshotSizes]:
        return cache(lambda k: pec_sizes(self.operators, self.layout, k, self.state))

    @cached_property
    def _at_risk(self) -> Callable[[float, float], float] | None:
        return risk_by_share(self.loads)

    def machine(self, replicas: int, interval: int | None = None) -> Machine:
        """Returns the machine for the prices of policies, with this many copies in peers' memory.

        Gradients may replace state if a snapshot is taken in every iteration, and copied.
        """
        rate = self.cluster.host_bandwidth
        return Machine(
            ranks=self.layout.world,
            full_snapshot=self.full,
            with_experts=self._with_experts,
            # the busiest rank's operators, which bound all others
            stages=[[OperatorBytes(nbytes.full, nbytes.compute) for nbytes in self.by_operator]],
            overlap_s=self.timing.forward_backward_s,
            copy_rate=min(rate, self.network_rate / replicas) if replicas else rate,
            expert_counts=candidate_expert_counts(self.num_experts),
            tokens_at_risk=self._at_risk,
            gradient_ratio=self.state.gradient if replicas and interval in (None, 1) else None,
        )

    def price(self, kind: RegisteredPolicy, options: Options) -> Price:
        """Returns the price of a training policy."""
        return kind.costs.price(self.machine(options.replicas, options.interval), options.settings)

    def offered(self, name: str, basic: Options, replicas: Sequence[int]) -> Iterator[Options]:
        """Yields :meth:`moc.simulate.planner.Priced.offered`; systems for comparison have no settings."""
        if name not in REGISTERED:
            yield basic if name == elastic.__name__ else dataclasses.replace(basic, replicas=0)
            return
        for number in replicas:
            options = dataclasses.replace(basic, replicas=number)
            for settings in REGISTERED[name].costs.candidates(self.machine(number)):
                yield options.with_settings(settings)

    def weighed(self, name: str, options: Options) -> Weighed:
        """Returns :meth:`moc.simulate.planner.Priced.weighed`."""
        price = self.price(REGISTERED[name], options) if name in REGISTERED else None
        if price is not None and price.interval is not None:
            options = dataclasses.replace(options, interval=price.interval)
        k = None if price is None else price.k
        chosen_interval = 1 if k is not None and options.interval is None else options.interval
        saving = POLICIES[name](self, dataclasses.replace(options, interval=chosen_interval)).saving

        def plt(interval: int) -> float:
            return self.iteration_s / options.mtbf_s * interval * saving.at_risk

        if k is not None and options.interval is None:
            best = best_interval(saving, self.iteration_s, options.mtbf_s)
            options = dataclasses.replace(options, interval=longest(1, best, plt(1), options.plt_limit))
            saving = POLICIES[name](self, options).saving
        lost = 0.0 if saving.exact else plt(saving.interval)
        return Weighed(options, saving, lost, saving.host_bytes / self.cluster.nodes)


@dataclass(frozen=True)
class Weighed:
    """Policy with settings, costs, expected proportion of lost tokens, and bytes in a node's memory."""

    options: Options
    saving: SimulatedCosts
    plt: float
    host_bytes: float


def none(setup: Setup, options: Options) -> Strategy:
    """Saves no checkpoints: a failure loses everything."""
    return Strategy(_rollback_costs(setup, "none", interval=NEVER))


def blocking(setup: Setup, options: Options) -> Strategy:
    """Lets training wait until the full state is in storage, as in Megatron-DeepSpeed."""
    sizes = setup.full
    stall_s = sizes.busiest / setup.cluster.host_bandwidth + sizes.total / setup.cluster.storage_bandwidth
    saving = _rollback_costs(setup, "blocking", stall_s, load_s=sizes.total / setup.cluster.storage_bandwidth)
    saving = dataclasses.replace(saving, traffic=Traffic(host=sizes.total, storage=sizes.total))
    return Strategy(_at_best_interval(setup, options, saving, 1))


def checkfreq(setup: Setup, options: Options) -> Strategy:
    """Takes snapshots in the background, then writes them; the interval caps the overhead at 3 % (CheckFreq)."""
    stall_s, min_interval = setup.stall_s(setup.full.busiest), math.ceil(setup.iterations(_write_s(setup)))
    interval = options.interval or capped_interval(stall_s, setup.iteration_s, _CAP, min_interval)
    return Strategy(_to_storage(setup, "checkfreq", interval))


def sparse_replay(saving: SimulatedCosts, window: int, replay_s: float) -> SimulatedCosts:
    """Returns costs with a window: a lost stage replays its W iterations and all later ones (MoEvement, 3.6).

    ``saving`` has the other costs; ``replay_s`` is for one iteration of only this stage, without frozen operators.
    """
    frozen = (window - 1) / (2 * window)  # mean share of frozen operators during a conversion
    return dataclasses.replace(
        saving,
        interval=window,
        lag=window,
        replay_s=replay_s,
        conversion_s=replay_s * (1 - frozen * _B_WEIGHT),
        conversion=window,
        local=True,
    )


def elastic(setup: Setup, options: Options) -> Strategy:
    """Replicates experts, and continues training with the remaining nodes (Lazarus).

    Background checkpoints cover losses that destroy an expert.  Their interval is the best for an MTBF that is divided
    by the share of these losses.
    """
    settings, nodes = setup.elastic, setup.cluster.nodes
    members = elastic_members(
        setup.operators,
        setup.layout,
        _micro_batches(setup),
        setup.work.topk,
        setup.loads,
        settings,
        setup.varying,
        setup.cluster.gpus_per_node,
    )
    fatal = fmean(1 - members.survival(nodes, min(lost, nodes)) for lost in settings.losses)
    training_s = setup.total_iterations * setup.iteration_s
    rare = dataclasses.replace(options, mtbf_s=min(training_s, options.mtbf_s / fatal) if fatal else training_s)
    stored = _to_storage(setup, elastic.__name__, 1)
    stored = _at_best_interval(setup, rare, stored, math.ceil(setup.iterations(_write_s(setup))))
    saving = ElasticCosts(
        name=elastic.__name__,
        interval=1,
        stall_s=stored.per_iteration_s(),
        restart_s=_detect_s(setup) + settings.regroup_s,
        replay_s=setup.iteration_s,
        survives=next(n - 1 for n in range(1, nodes + 2) if members.survival(nodes, n) < 1),
        beyond=dataclasses.replace(stored, why="an expert was lost"),
        members=members,
        traffic=Traffic().after(1 / stored.interval, stored.traffic),
        host_bytes=stored.host_bytes,
    )
    return Strategy(saving)


def _strategy_of(kind: RegisteredPolicy) -> Callable[[Setup, Options], Strategy]:
    """Returns a function that builds the strategy of a training policy from its own price."""

    def strategy(setup: Setup, options: Options) -> Strategy:
        if kind.can_replay:
            return Strategy(_windows(setup, options, kind))
        price = setup.price(kind, options)
        if price.k is None:
            options = dataclasses.replace(options, interval=price.interval or options.interval)
            min_interval = math.ceil(setup.iterations(_replicate_s(setup, options, price.size.busiest)))
            return Strategy(
                _at_best_interval(setup, options, _in_memory(setup, options, kind.name, price), min_interval)
            )
        return _partial(setup, options, kind, price.k)

    return strategy


POLICIES: dict[str, Callable[[Setup, Options], Strategy]] = {
    **{system.__name__: system for system in (none, blocking, checkfreq)},
    **{name: _strategy_of(kind) for name, kind in REGISTERED.items()},
    elastic.__name__: elastic,
}
"""Training policies, and systems for comparison, by name."""


def _rollback_costs(
    setup: Setup, name: str, stall_s: float = 0.0, interval: int = 1, lag: float = 0, load_s: float = 0.0
) -> SimulatedCosts:
    """Returns costs with a global rollback."""
    cluster, iteration_s = setup.cluster, setup.timing.iteration_s
    saving = SimulatedCosts(name, interval=interval, stall_s=stall_s, lag=lag)
    if setup.program is not None:
        saving = program_recovery(saving, setup.program, iteration_s, lag)
    else:
        saving = dataclasses.replace(
            saving,
            restart_s=cluster.detect_s + cluster.restart_s + load_s,
            replay_s=cluster.replay_slowdown * (iteration_s + saving.per_iteration_s()),
        )
    return dataclasses.replace(saving, members=_complete_pipelines(setup, saving)) if setup.shrinks else saving


def _complete_pipelines(setup: Setup, saving: SimulatedCosts) -> VaryingNodes:
    """Returns the members of a job whose workers save, and restart from storage, when nodes arrive."""
    members, layout, work = setup.varying, setup.layout, setup.work
    return CompletePipelines(
        members.least,
        members.most,
        members.grow_wait_s,
        grow_s=_write_s(setup) + saving.restart_s - _detect_s(setup),
        work=dataclasses.replace(work, pipelines=work.pipelines or layout.dp),
        stages=layout.pp,
        vpp=layout.vpp,
    )


def _detect_s(setup: Setup) -> float:
    return setup.cluster.detect_s if setup.program is None else setup.program.detect_s


def _write_s(setup: Setup) -> float:
    return setup.full.total / setup.cluster.storage_bandwidth


def _micro_batches(setup: Setup) -> int:
    """Returns the micro batches of all data-parallel ranks together, where each of them has its own."""
    pipelines = setup.work.pipelines or setup.layout.dp
    return setup.work.global_batch * setup.layout.dp // (setup.work.micro_batch * pipelines)


def _to_storage(setup: Setup, name: str, interval: int) -> SimulatedCosts:
    """Returns costs of full snapshots in the background that are then written to storage."""
    sizes, write_s = setup.full, _write_s(setup)
    lag = setup.iterations(_copy_s(setup, sizes) + write_s)
    saving = _rollback_costs(setup, name, setup.stall_s(sizes.busiest), interval, lag, write_s)
    traffic = Traffic(host=sizes.total, storage=sizes.total)
    return dataclasses.replace(saving, traffic=traffic, host_bytes=sizes.total)


def _in_memory(setup: Setup, options: Options, name: str, price: Price) -> SimulatedCosts:
    """Returns costs with checkpoints in own and peers' memory, as in Gemini, with buffers for the full state."""
    sizes = price.size
    host_bytes = _VERSIONS * setup.full.total + price.chained_bytes
    if price.snapshots_in_memory is not None:  # and one in progress
        host_bytes = (price.snapshots_in_memory + 1) * sizes.total
    stall_s = setup.stall_s(sizes.busiest)
    lag = setup.iterations(_copy_s(setup, sizes) + _replicate_s(setup, options, sizes.busiest))
    saving = _rollback_costs(setup, name, stall_s, options.interval or 1, lag, setup.full.busiest / setup.network_rate)
    saving = dataclasses.replace(
        saving,
        traffic=Traffic(host=sizes.total, network=options.replicas * sizes.total),
        host_bytes=(1 + options.replicas) * host_bytes,
        restart_s=saving.restart_s + price.repeated_updates * setup.timing.update_s,
        exact=price.k in (None, setup.num_experts),
        at_risk=at_risk(price, setup.num_experts),
    )
    return _with_storage(setup, options, saving)


def _partial(setup: Setup, options: Options, kind: RegisteredPolicy, k: int) -> Strategy:
    """Returns a strategy of some experts of each layer at a time, in every iteration by default."""
    by_k, key, count, doubled = {}, k, setup.num_experts, kind.costs.doubled_setting
    while key not in by_k:
        doubled_options = options if doubled is None else options.with_settings({doubled: key})
        by_k[key] = _in_memory(setup, options, kind.name, setup.price(kind, doubled_options))
        key = k if doubled is None else min(2 * key, count)
    fixed = doubled is None or not options.dynamic
    return PecStrategy(by_k, DynamicK(k, count, options.plt_limit), setup.total_iterations, fixed=fixed)


def _windows(setup: Setup, options: Options, kind: RegisteredPolicy) -> SimulatedCosts:
    """Returns costs of saving every operator once per window; only lost stages replay (MoEvement)."""
    timing, cluster, price = setup.timing, setup.cluster, setup.price(kind, options)
    window, largest, window_bytes = price.window_length, max(price.snapshots), price.size.total
    logs = _log_bytes(setup)
    saving = SimulatedCosts(
        name=kind.name,
        stall_s=window * setup.stall_s(largest),
        restart_s=cluster.detect_s + price.size.busiest / setup.network_rate,
        traffic=Traffic(host=window_bytes + logs * window, network=options.replicas * window_bytes),
        host_bytes=_VERSIONS * (window_bytes * (1 + options.replicas) + logs * window),
    )
    saving = sparse_replay(saving, window, timing.iteration_s * timing.without_bubbles)
    if setup.program is not None:
        lag = setup.iterations(largest / cluster.host_bandwidth + _replicate_s(setup, options, largest))
        saving = program_recovery(saving, setup.program, timing.iteration_s, lag, sparse=True)
    return _with_storage(setup, options, saving)


def _with_storage(setup: Setup, options: Options, saving: SimulatedCosts) -> SimulatedCosts:
    """Adds recovery from the newest checkpoint in storage, for losses that memory does not survive.

    A snapshot in memory is complete only with the nodes that wrote it, so other numbers of nodes use the one in
    storage.
    """
    write_s = _write_s(setup)
    interval = options.persist_interval or max(1, math.ceil(setup.iterations(write_s)))
    beyond = _rollback_costs(setup, saving.name, 0.0, interval, setup.iterations(write_s), write_s)
    nodes = setup.cluster.nodes
    copies = place_copies(nodes, min(options.replicas, nodes - 1))
    changed = dataclasses.replace(beyond, why="other number of nodes") if setup.shrinks else None
    beyond = dataclasses.replace(beyond, why="no copy was left")
    saving = dataclasses.replace(saving, members=beyond.members, changed=changed)
    return dataclasses.replace(saving, survives=copies.replicas, copies=copies, beyond=beyond)


def _at_best_interval(setup: Setup, options: Options, saving: SimulatedCosts, min_interval: int) -> SimulatedCosts:
    iteration_s = setup.timing.iteration_s
    interval = options.interval or best_interval(saving, iteration_s, options.mtbf_s, max(1, min_interval))
    return at_interval(saving, interval, iteration_s)


def _copy_s(setup: Setup, sizes: SnapshotSizes) -> float:
    return sizes.busiest / setup.cluster.host_bandwidth


def _replicate_s(setup: Setup, options: Options, nbytes: float) -> float:
    return options.replicas * nbytes / setup.network_rate


def _log_bytes(setup: Setup) -> float:
    """Returns bytes of an iteration's log: 16-bit activations and gradients between stages (MoEvement, section 3.4)."""
    work = setup.work
    return 2 * 2 * work.global_batch * work.seq_length * work.hidden_size * (setup.layout.pp - 1)
