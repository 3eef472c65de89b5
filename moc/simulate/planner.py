"""Which policy to use on a cluster: what the closed form expects of every one that keeps to the limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moc.policy.adaptive import candidates, uniform_plt
from moc.policy.dynamic_k import PLT_LIMIT
from moc.simulate.closed_form import best_interval, expected_ettr, recovery_s
from moc.simulate.policies import POLICIES, Options, Setup
from moc.simulate.saving import Saving

NEAR = 1e-3
"""Of ETTR; what is so near counts as equal."""


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to.

    Attributes:
        exact_only: after a recovery, the run must be what it would have been.
        host_bytes: of a node's memory for checkpoints and logs; None for any.
        plt: the expected proportion of lost tokens must not be above it (MoC, section 3.1.2).
        policies: that may be chosen.
        replicas: numbers of copies in peers' memory that may be chosen.
    """

    exact_only: bool = False
    host_bytes: float | None = None
    plt: float = PLT_LIMIT
    policies: tuple[str, ...] = ("checkfreq", "full", "pec", "sparse")
    replicas: tuple[int, ...] = (2, 1)

    def __post_init__(self):
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            raise ValueError(f"there is no policy {', '.join(unknown)!r}: choose from {', '.join(POLICIES)}")


@dataclass(frozen=True)
class Candidate:
    """A policy with its settings.

    Attributes:
        options: that give it.
        saving: how it saves.
        ettr: expected.
        plt: expected.
        host_bytes: in a node's memory.
    """

    options: Options
    saving: Saving
    ettr: float
    plt: float
    host_bytes: float

    @property
    def survives(self) -> float:
        """Nodes that may be lost at once without another way back than the usual one."""
        return math.inf if self.saving.beyond is None else self.saving.survives

    @property
    def name(self) -> str:
        """The policy with what was chosen for it."""
        text = f"{self.saving.name}, "
        if self.saving.name == "sparse":
            text += f"window {self.saving.interval}"
        else:
            k = f"K {self.options.k}, " if self.saving.name == "pec" else ""
            text += f"{k}interval {self.saving.interval}"
        return text + (f", {self.options.replicas} replicas" if self.saving.traffic.network else "")


@dataclass(frozen=True)
class Plan:
    """What to use.

    Attributes:
        best: the candidate to take.
        others: the best of each other policy, in order.
        reason: why, in a few sentences.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    reason: str


def plan(setup: Setup, mtbf_s: float, limits: Limits | None = None) -> Plan:
    """The best of all candidates on a cluster: see :func:`best_of`.

    Args:
        setup: model and cluster.
        mtbf_s: mean seconds from one failure of the job to the next.
        limits: what to keep to; by default the limit on lost tokens alone.

    Raises:
        ValueError: nothing keeps to the limits.
    """
    limits = limits or Limits()
    return best_of(every_candidate(setup, mtbf_s, limits), setup.timing.iteration_s, mtbf_s, limits)


def best_of(candidates: Iterable[Candidate], iteration_s: float, mtbf_s: float, limits: Limits) -> Plan:
    """The candidate with the highest expected ETTR.

    Of those within a tenth of a point an exact one is taken first, then the one that survives the loss of most nodes,
    then the one that is expected to lose fewest tokens, then the one that leaves most host memory.

    Args:
        candidates: that there are.
        iteration_s: seconds of an iteration in which nothing is saved.
        mtbf_s: mean seconds from one failure of the job to the next.
        limits: what to keep to.

    Raises:
        ValueError: nothing keeps to the limits.
    """
    every = [found for found in candidates if keeps_to(found, limits)]
    if not every:
        raise ValueError("no policy keeps to all limits: allow more host memory, or more policies")
    most = max(found.ettr for found in every)
    near = [found for found in every if found.ettr >= most - NEAR]
    best = min(near, key=_rank)
    others = []
    for name in limits.policies:
        of_policy = [found for found in every if found.saving.name == name != best.saving.name]
        others += [max(of_policy, key=lambda found: found.ettr)] if of_policy else []
    others.sort(key=lambda found: -found.ettr)
    return Plan(best, tuple(others), " ".join(_reasons(iteration_s, mtbf_s, best, others)))


def _rank(found: Candidate) -> tuple:
    return not found.saving.exact, -found.survives, found.plt, found.host_bytes, -found.ettr


def every_candidate(setup: Setup, mtbf_s: float, limits: Limits) -> Iterator[Candidate]:
    """All settings of all policies that the limits name, whether or not they keep to the other limits."""
    for name in limits.policies:
        for options in _options(setup, mtbf_s, limits, name):
            saving = POLICIES[name](setup, options).saving
            rate = setup.timing.iteration_s / mtbf_s
            lost = 0.0 if saving.exact else _plt(setup, options, saving, rate)
            host = saving.host_bytes / setup.cluster.nodes
            yield Candidate(options, saving, expected_ettr(saving, setup.timing.iteration_s, mtbf_s), lost, host)


def _options(setup: Setup, mtbf_s: float, limits: Limits, name: str) -> Iterator[Options]:
    basic = Options(mtbf_s=mtbf_s, dynamic=False)
    if name in ("none", "blocking", "checkfreq", "elastic"):
        yield dataclasses.replace(basic, replicas=0) if name != "elastic" else basic
        return
    for replicas in limits.replicas:
        options = dataclasses.replace(basic, replicas=replicas)
        if name == "sparse":
            found = POLICIES[name](setup, options).saving.interval
            for window in range(1, found + 2):
                yield dataclasses.replace(options, window=window)
        elif name == "pec" and setup.num_experts:
            for k in candidates(setup.num_experts)[:-1]:
                yield _at_best_interval(setup, dataclasses.replace(options, k=k, interval=1), limits)
        elif name == "full":
            yield options


def _at_best_interval(setup: Setup, options: Options, limits: Limits) -> Options:
    iteration_s = setup.timing.iteration_s
    saving = POLICIES["pec"](setup, options).saving
    best = best_interval(saving, iteration_s, options.mtbf_s)
    of_one = _plt(setup, options, saving, iteration_s / options.mtbf_s)
    return dataclasses.replace(options, interval=longest(1, best, of_one, limits.plt))


def longest(least: int, best: int, plt_of_one: float, limit: float) -> int:
    """The interval with the least overhead of those that keep to a limit on lost tokens, which grow with it.

    Args:
        least: the shortest that is possible; taken where even that passes the limit.
        best: the one with the least overhead of all.
        plt_of_one: expected proportion of lost tokens at an interval of one iteration.
        limit: on this proportion.
    """
    return max(least, min(best, int(limit / plt_of_one))) if plt_of_one > 0 else best


def _plt(setup: Setup, options: Options, saving: Saving, faults_per_iteration: float) -> float:
    lost = 1 / setup.cluster.nodes
    return uniform_plt(setup.num_experts, faults_per_iteration, lost, options.k, options.k, saving.interval)


def keeps_to(found: Candidate, limits: Limits) -> bool:
    """Whether a candidate may be chosen."""
    return (
        (found.saving.exact or not limits.exact_only)
        and found.plt <= limits.plt
        and (limits.host_bytes is None or found.host_bytes <= limits.host_bytes)
    )


def _reasons(iteration_s: float, mtbf_s: float, best: Candidate, others: list[Candidate]) -> Iterator[str]:
    saving = best.saving
    yield (
        f"{best.name}: saving adds {100 * saving.per_iteration_s() / iteration_s:.2g} % to an iteration of "
        f"{iteration_s:.3g} s, and each failure costs {recovery_s(saving):.3g} s of the {mtbf_s:.4g} s between two, "
        f"which leaves an ETTR of {best.ettr:.3f}."
    )
    if best.plt:
        yield f"Failures are expected to lose {100 * best.plt:.2g} % of the tokens of experts."
    if others:
        next_s = recovery_s(others[0].saving)
        yield f"The next best, {others[0].name}, comes to {others[0].ettr:.3f}: a failure costs it {next_s:.3g} s."
