"""What each policy would cost a run that trains, from what that run has measured: ``--ckpt-policy auto``.

These are the program's own ways: snapshots go where ``--ckpt-tier`` says, and all workers come back together.  What it
takes to notice a fault and to start again is left out, since it is the same whatever is chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moc.policy import POLICIES, owners
from moc.policy.adaptive import candidates, uniform_plt
from moc.policy.prices import Machine, Price, Sizes
from moc.policy.window import OperatorBytes, order_operators
from moc.sharding import Layout
from moc.simulate.closed_form import at_interval, best_interval, longest
from moc.simulate.planner import Candidate
from moc.simulate.planner import every_candidate as every_candidate
from moc.simulate.planner import priced as priced
from moc.simulate.policies import Options, Weighed, sparse_replay
from moc.simulate.policy_costs import PolicyCosts, Traffic
from moc.simulate.sizes import MIXED, StateBytes, full_sizes, pec_sizes
from moc.simulate.stages import split_stages
from moc.state.operators import Operator

_BUFFERS = {"disk": 2, "memory": 3, "peers": 4}
_COPIES = 3
"""Of each node that a node keeps copies of: the newest safe one, one on its way, one that is about to be given up."""

NAMES = tuple(POLICIES)
"""The policies that can be reckoned with."""


@dataclass(frozen=True)
class Saved:
    """Bytes that the rank saves which saves the most.

    Attributes:
        full: of everything.
        by_k: with K experts of each layer, by K; the largest is all of them; empty without experts.
        stages: of each operator, by pipeline stage, in the order in which sparse snapshots save them.
    """

    full: float
    by_k: Mapping[int, float]
    stages: Sequence[Sequence[OperatorBytes]]


@dataclass(frozen=True)
class Running:
    """A run, as far as snapshots are concerned.  Rates are in bytes per second.

    Attributes:
        tier: where snapshots are safe: ``disk``, ``memory`` or ``peers``.
        nodes: of the job.
        ranks: of a node.
        saved: sizes.
        iteration_s: seconds of an iteration.
        forward_backward_s: of these, before the update; a copy can hide in them.
        copy_rate: from a rank to host memory.
        write_rate: of a rank to storage, when all write; reading is taken to be as fast.
        replicate_rate: of a node from other nodes; with peers only.

    Raises:
        ValueError: something that must be positive is not.
    """

    tier: str
    nodes: int
    ranks: int
    saved: Saved
    iteration_s: float
    forward_backward_s: float
    copy_rate: float
    write_rate: float
    replicate_rate: float = math.inf

    def __post_init__(self):
        if self.tier not in _BUFFERS:
            raise ValueError(f"there is no tier {self.tier!r}: choose one of {', '.join(_BUFFERS)}")
        for name in (field.name for field in dataclasses.fields(self) if field.name not in ("tier", "saved")):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    def iterations(self, seconds: float) -> int:
        """That pass in so many seconds, rounded up; at least one, since what was saved counts with a vote."""
        return max(1, math.ceil(seconds / self.iteration_s))

    def safe_s(self, nbytes: float, replicas: int) -> float:
        """Seconds from the copy of a rank's bytes until they outlive what the tier promises."""
        if self.tier == "peers":
            return replicas * self.ranks * nbytes / self.replicate_rate
        return nbytes / self.write_rate if self.tier == "disk" else 0.0

    @cached_property
    def machine(self) -> Machine:
        """What policies are priced for; snapshots hide that are copied beside an iteration, and written if need be."""
        rate, ranks = self.copy_rate, self.ranks * self.nodes
        if self.tier == "disk":
            rate = min(rate, self.write_rate * self.iteration_s / self.forward_backward_s)
        return Machine(
            ranks=ranks,
            everything=Sizes(self.saved.full, ranks * self.saved.full),
            with_experts=lambda k: Sizes(self.saved.by_k[k], ranks * self.saved.by_k[k]),
            stages=self.saved.stages,
            hidden_s=self.forward_backward_s,
            rate=rate,
            ks=sorted(self.saved.by_k),
        )

    def price(self, name: str, options: Options) -> Price:
        """Of a policy."""
        return POLICIES[name].price(self.machine, options.settings)

    def offered(self, name: str, basic: Options, replicas: Sequence[int]) -> Iterator[Options]:
        """As :meth:`moc.simulate.planner.Priced.offered`."""
        for number in replicas if self.tier == "peers" else (0,):
            options = dataclasses.replace(basic, replicas=number)
            for settings in POLICIES[name].candidates(self.machine):
                yield options.with_settings(settings)

    def weighed(self, name: str, options: Options) -> Weighed:
        """As :meth:`moc.simulate.planner.Priced.weighed`, with the persist interval too."""
        if POLICIES[name].replays:
            saving, plt = _windows(self, name, options), 0.0
        else:
            saving, plt = _at_interval(self, name, options)
        every = _persist_interval(self, saving)
        options = dataclasses.replace(options, interval=saving.interval, persist_interval=every)
        saving = dataclasses.replace(saving, survives=options.replicas, beyond=_from_storage(self, saving, every))
        window = _of_rank(self, saving) if POLICIES[name].replays else None
        host = host_bytes(self.tier, self.ranks, self.saved.full, options.replicas, window)
        return Weighed(options, saving, plt, host)


def saved_by_rules(operators: Sequence[Operator], layout: Layout, state: StateBytes = MIXED) -> Saved:
    """What the sharding rules give, for a model that is not at hand.

    Args:
        operators: of the unpartitioned model.
        layout: where the ranks stand.
        state: bytes of each parameter.
    """
    stages, compute = [], dataclasses.replace(state, master=0, moments=0)
    alone = dataclasses.replace(layout, world=layout.world // layout.pp, pp=1, vpp=1)
    for stage in split_stages(operators, layout.pp):
        parameters = sum(operator.parameters for operator in stage)
        sizes = [full_sizes(stage, alone, part).busiest / parameters for part in (state, compute)]
        ordered = order_operators(stage, None, layout.ep)
        stages.append([OperatorBytes(*(size * operator.parameters for size in sizes)) for operator in ordered])
    experts = len({operator.expert for operator in operators if operator.expert is not None})
    by_k = {k: pec_sizes(operators, layout, k, state).busiest for k in candidates(experts)}
    return Saved(full_sizes(operators, layout, state).busiest, by_k, stages)


def host_bytes(tier: str, ranks: int, full: float, replicas: int, window: float | None = None) -> float:
    """Bytes of a node's memory for snapshots.

    Buffers are made for a snapshot of everything.  Of windows, memory has one of these, the newest whole window and
    the one under way.

    Args:
        tier: as in :class:`Running`.
        ranks: of the node.
        full: bytes of everything that a rank saves.
        replicas: other nodes that keep copies of each node's snapshots.
        window: bytes of all snapshots of a window of a rank, if there are windows.
    """
    if window is not None and tier != "disk":
        return ranks * (full + (2 + _COPIES * replicas) * window)
    return ranks * full * (_BUFFERS[tier] + _COPIES * replicas)


def flags_of_candidate(found: Candidate) -> dict[str, object]:
    """The flags of training that give it, by their names with underscores."""
    options, kind = found.options, POLICIES[found.saving.name]
    flags: dict[str, object] = {"ckpt_policy": kind.name}
    if not kind.replays:  # a window is what its interval is
        flags["snapshot_interval"] = str(options.interval)
    kinds = {flag.name: flag.kind for flag in kind.flags}
    for name, value in options.settings.items():
        flags[f"{kind.name}_{name}"] = kinds[f"{kind.name}_{name}"](value)
    if options.persist_interval is not None:
        flags["persist_interval"] = options.persist_interval
    return flags | ({"replicas": options.replicas} if options.replicas else {})


def options_of(flags: Mapping[str, Any], mtbf_s: float) -> Options:
    """The inverse of :func:`flags_of_candidate`, for :func:`~moc.simulate.planner.priced`."""
    interval, whose = flags.get("snapshot_interval"), owners()
    basic = Options(
        interval=None if interval is None else int(interval),
        mtbf_s=mtbf_s,
        dynamic=False,
        replicas=int(flags.get("replicas", 0)),
    )
    settings = {
        name.removeprefix(f"{whose[name].name}_"): int(value) if str(value).isdecimal() else value
        for name, value in flags.items()
        if name in whose
    }
    return basic.with_settings(settings)


def _at_interval(run: Running, name: str, options: Options) -> tuple[PolicyCosts, float]:
    """Everything, or some experts of each layer, every so many iterations; and the PLT to expect."""
    price = run.price(name, options)
    nbytes, k, most = price.size.busiest, price.k, max(run.saved.by_k)
    fewer = k is not None and k < most
    copy_s, safe_s = nbytes / run.copy_rate, run.safe_s(nbytes, options.replicas)
    stall_s = max(0.0, copy_s - run.forward_backward_s)
    saving = PolicyCosts(
        name=name,
        interval=1,
        stall_s=stall_s,
        lag=run.iterations(copy_s + safe_s),
        restart_s=_load_s(run, run.saved.full),
        replay_s=run.iteration_s + stall_s,
        traffic=_traffic(run, price, options.replicas),
        exact=not fewer,
    )
    least = shortest_interval(run, name, options)
    interval = options.interval or best_interval(saving, run.iteration_s, options.mtbf_s, least)
    if k is None or not fewer:
        return at_interval(saving, interval, run.iteration_s), 0.0
    # Whatever memory is lost: all experts of a snapshot go on to storage, so that has them as new.
    rate = run.iteration_s / options.mtbf_s
    of_one = uniform_plt(most, rate, 1.0, k, k, 1)
    if not options.interval:
        interval = longest(least, interval, of_one, options.plt_limit)
    return at_interval(saving, interval, run.iteration_s), interval * of_one


def shortest_interval(run: Running, name: str, options: Options) -> int:
    """Iterations until the next snapshot can begin, of a policy whose snapshots are no windows."""
    price = run.price(name, options)
    nbytes = price.size.busiest
    copy_s, write_s, safe_s = nbytes / run.copy_rate, nbytes / run.write_rate, run.safe_s(nbytes, options.replicas)
    if run.tier == "disk":
        return run.iterations(copy_s + write_s)
    # of fewer experts, what goes to memory goes on to storage too, where the others are
    return run.iterations(safe_s if price.k is None else max(safe_s, write_s))


def _windows(run: Running, name: str, options: Options) -> PolicyCosts:
    """Each operator once in a window, some of them in each iteration; all workers replay (MoEvement, section 3.3)."""
    price = run.price(name, options)
    window, snapshots, nbytes = price.length, price.snapshots, price.size.busiest
    copying_s = sum(max(0.0, one / run.copy_rate - run.forward_backward_s) for one in snapshots)
    safe_s = run.safe_s(nbytes, options.replicas)
    stall_s = max(copying_s, safe_s - window * run.iteration_s)
    last_s = snapshots[-1] / run.copy_rate + run.safe_s(snapshots[-1], options.replicas)
    saving = PolicyCosts(
        name=name,
        stall_s=stall_s,
        restart_s=_load_s(run, nbytes),
        traffic=_traffic(run, price, options.replicas),
    )
    saving = sparse_replay(saving, window, run.iteration_s)
    return dataclasses.replace(saving, lag=window + run.iterations(last_s), local=False)


def _load_s(run: Running, nbytes: float) -> float:
    return nbytes / (run.write_rate if run.tier == "disk" else run.copy_rate)


def _traffic(run: Running, price: Price, replicas: int) -> Traffic:
    total = price.size.total
    return Traffic(host=total, network=replicas * total, storage=total if run.tier == "disk" else 0.0)


def _of_rank(run: Running, saving: PolicyCosts) -> float:
    """Bytes of a checkpoint of one rank; of a window, of all of its snapshots."""
    return saving.traffic.host / (run.ranks * run.nodes)


def _persist_interval(run: Running, saving: PolicyCosts) -> int | None:
    """With a tier above storage: snapshots go there as often as it can follow."""
    if run.tier == "disk":
        return None
    every = run.iterations(_of_rank(run, saving) / run.write_rate)
    return saving.interval if not saving.exact else math.ceil(every / saving.interval) * saving.interval


def _from_storage(run: Running, saving: PolicyCosts, every: int | None) -> PolicyCosts | None:
    """How the run comes back where memory is lost; None where it always comes back from storage."""
    if every is None:
        return None
    write_s = run.saved.full / run.write_rate
    return dataclasses.replace(
        saving, interval=every, lag=saving.lag + run.iterations(write_s), restart_s=write_s, survives=0, beyond=None
    )
