"""Which policy to use on a cluster: what the closed form expects of every one that keeps to the limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moc.policy import POLICIES as REGISTERED
from moc.policy.dynamic_k import PLT_LIMIT
from moc.simulate.closed_form import expected_ettr, recovery_s
from moc.simulate.policies import POLICIES, Options, Setup, Weighed, checkfreq
from moc.simulate.policy_costs import PolicyCosts

NEAR = 1e-3
"""Of ETTR; what is so near counts as equal."""


@dataclass(frozen=True)
class PlanLimits:
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
    policies: tuple[str, ...] = (checkfreq.__name__, *REGISTERED)
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
    saving: PolicyCosts
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
        kind = REGISTERED.get(self.saving.name)
        if kind is not None and kind.replays:
            how = [f"window {self.saving.interval}"]
        else:
            settings = kind.described(self.options.settings) if kind is not None else ""
            how = [settings, f"interval {self.saving.interval}"]
        how.append(f"{self.options.replicas} replicas" if self.saving.traffic.network else "")
        return ", ".join(filter(None, (self.saving.name, *how)))


class Priced(Protocol):
    """A cluster (:class:`~moc.simulate.policies.Setup`) or a run that trains (:mod:`moc.simulate.live_costs`)."""

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration in which nothing is saved."""
        ...

    def offered(self, name: str, basic: Options, replicas: Sequence[int]) -> Iterator[Options]:
        """The settings of a policy that are worth looking at, with each number of replicas that has a meaning here."""
        ...

    def weighed(self, name: str, options: Options) -> Weighed:
        """A policy with some settings."""
        ...


@dataclass(frozen=True)
class PolicyChoice:
    """What to use.

    Attributes:
        best: the candidate to take.
        others: the best of each other policy, in order.
        reason: why, in a few sentences.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    reason: str


def plan(setup: Setup, mtbf_s: float, limits: PlanLimits | None = None) -> PolicyChoice:
    """The best of all candidates on a cluster: see :func:`best_of`.

    Args:
        setup: model and cluster.
        mtbf_s: mean seconds from one failure of the job to the next.
        limits: what to keep to; by default the limit on lost tokens alone.

    Raises:
        ValueError: nothing keeps to the limits.
    """
    limits = limits or PlanLimits()
    return best_of(every_candidate(setup, mtbf_s, limits), setup.timing.iteration_s, mtbf_s, limits)


def best_of(candidates: Iterable[Candidate], iteration_s: float, mtbf_s: float, limits: PlanLimits) -> PolicyChoice:
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
    return PolicyChoice(best, tuple(others), " ".join(_reasons(iteration_s, mtbf_s, best, others)))


def _rank(found: Candidate) -> tuple:
    return not found.saving.exact, -found.survives, found.plt, found.host_bytes, -found.ettr


def every_candidate(on: Priced, mtbf_s: float, limits: PlanLimits) -> Iterator[Candidate]:
    """All settings of all policies that the limits name, whether or not they keep to the other limits.

    Args:
        on: what they are priced on: a cluster, or a run that trains.
        mtbf_s: mean seconds from one failure of the job to the next.
        limits: policies and numbers of replicas; intervals keep to the limit on lost tokens where they can.
    """
    for name in limits.policies:
        for options in on.offered(name, Options(mtbf_s=mtbf_s, dynamic=False, plt_limit=limits.plt), limits.replicas):
            yield priced(on, name, options)


def priced(on: Priced, name: str, options: Options) -> Candidate:
    """What a policy would come to with some settings.

    Args:
        on: what it is priced on.
        name: of the policy.
        options: its settings; without ``interval`` it is the best one, or with fewer experts one that is short enough
            for ``plt_limit``.

    Returns:
        The candidate, with what was left open in its options.
    """
    weighed = on.weighed(name, options)
    return Candidate(ettr=expected_ettr(weighed.saving, on.iteration_s, options.mtbf_s), **vars(weighed))


def keeps_to(found: Candidate, limits: PlanLimits) -> bool:
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
