"""Chooses a policy for a cluster by the closed form's expectation of every candidate within the limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moc.policy import POLICIES as REGISTERED
from moc.policy.pec_selection import PLT_LIMIT
from moc.simulate import SimulationError
from moc.simulate.closed_form import expected_ettr, recovery_s
from moc.simulate.policies import POLICIES, Options, Setup, Weighed, checkfreq
from moc.simulate.policy_costs import SimulatedCosts

NEAR = 1e-3
"""ETTR difference up to which candidates count as equal."""


@dataclass(frozen=True)
class PlanLimits:
    """Limits on the choice.

    Attributes:
        exact_only: only exact policies, after whose recovery the run is bit-identical.
        host_bytes: bytes of a node's memory for checkpoints and logs; None for no limit.
        plt: highest expected proportion of lost tokens (MoC, section 3.1.2).
        plt_by_policy: the same for single policies.
        policies: the policies to choose from.
        replicas: the numbers of copies in peers' memory to choose from.
        rarer: failures per failure that needs a checkpoint.
        interval: iterations between snapshots of policies without windows; None for the best.
    """

    exact_only: bool = False
    host_bytes: float | None = None
    plt: float = PLT_LIMIT
    plt_by_policy: Mapping[str, float] = field(default_factory=dict)
    policies: tuple[str, ...] = (checkfreq.__name__, *REGISTERED)
    replicas: tuple[int, ...] = (2, 1)
    rarer: float = 1.0
    interval: int | None = None

    def __post_init__(self):
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            raise SimulationError(
                f"there is no policy {', '.join(unknown)!r}. Fix: choose from {', '.join(POLICIES)}",
                code="value-not-a-choice",
            )

    def plt_of(self, policy: str) -> float:
        """Returns the highest allowed proportion of lost tokens of a policy."""
        return self.plt_by_policy.get(policy, self.plt)


@dataclass(frozen=True)
class Candidate:
    """Priced policy (:class:`~moc.simulate.policies.Weighed`) with its expected ETTR."""

    options: Options
    saving: SimulatedCosts
    ettr: float
    plt: float
    host_bytes: float

    @property
    def survives(self) -> float:
        """Simultaneous node losses that the normal recovery survives."""
        return math.inf if self.saving.beyond is None else self.saving.survives

    @property
    def name(self) -> str:
        """Policy with its chosen settings."""
        kind = REGISTERED.get(self.saving.name)
        if kind is not None and kind.can_replay:
            details = [f"window {self.saving.interval}"]
        else:
            settings = kind.costs.describe(self.options.settings) if kind is not None else ""
            details = [settings, f"interval {self.saving.interval}"]
        details.append(f"{self.options.replicas} replicas" if self.saving.traffic.network else "")
        return ", ".join(filter(None, (self.saving.name, *details)))


class Priced(Protocol):
    """Cluster (:class:`~moc.simulate.policies.Setup`) or live run (:mod:`moc.simulate.live_costs`)."""

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration without a snapshot."""
        ...

    def offered(self, name: str, basic: Options, replicas: Sequence[int]) -> Iterator[Options]:
        """Yields the candidate settings of a policy, with each number of replicas that applies here."""
        ...

    def weighed(self, name: str, options: Options) -> Weighed:
        """Returns the costs of a policy with these settings."""
        ...


@dataclass(frozen=True)
class PolicyChoice:
    """Best candidate, the best one of each other policy by descending ETTR, and the reason in a few sentences."""

    best: Candidate
    alternatives: tuple[Candidate, ...]
    reason: str


def plan(setup: Setup, mtbf_s: float, limits: PlanLimits | None = None) -> PolicyChoice:
    """Returns the best candidate on a cluster (:func:`best_of`); by default, lost tokens are limited."""
    limits = limits or PlanLimits()
    return best_of(every_candidate(setup, mtbf_s, limits), setup.timing.iteration_s, mtbf_s, limits)


def best_of(candidates: Iterable[Candidate], iteration_s: float, mtbf_s: float, limits: PlanLimits) -> PolicyChoice:
    """Returns the candidate with the highest expected ETTR.

    Candidates within a tenth of a percentage point are ranked by exactness, then by survived node losses, expected lost
    tokens, and host memory.

    Raises:
        ValueError: no candidate is within the limits.
    """
    allowed = [candidate for candidate in candidates if keeps_to(candidate, limits)]
    if not allowed:
        raise SimulationError(
            "no policy keeps to all limits. Fix: allow more host memory, or more policies",
            code="limits-too-strict",
        )
    best_ettr = max(candidate.ettr for candidate in allowed)
    near = [candidate for candidate in allowed if candidate.ettr >= best_ettr - NEAR]
    best = min(near, key=lambda f: (not f.saving.exact, -f.survives, f.plt, f.host_bytes, -f.ettr))
    alternatives = []
    for name in limits.policies:
        of_policy = [candidate for candidate in allowed if candidate.saving.name == name != best.saving.name]
        alternatives += [max(of_policy, key=lambda candidate: candidate.ettr)] if of_policy else []
    alternatives.sort(key=lambda candidate: -candidate.ettr)
    return PolicyChoice(
        best, tuple(alternatives), " ".join(_reasons(iteration_s, limits.rarer * mtbf_s, best, alternatives))
    )


def every_candidate(on: Priced, mtbf_s: float, limits: PlanLimits) -> Iterator[Candidate]:
    """Yields all settings of the policies in the limits, even beyond the other limits.

    Intervals stay within the limit on lost tokens if they can.
    """
    for name in limits.policies:
        rarer_s, plt = limits.rarer * mtbf_s, limits.plt_of(name)
        basic = Options(interval=limits.interval, mtbf_s=rarer_s, dynamic=False, plt_limit=plt)
        for options in on.offered(name, basic, limits.replicas):
            yield priced(on, name, options)


def priced(on: Priced, name: str, options: Options) -> Candidate:
    """Returns a policy with some settings as a candidate with its expected ETTR; open settings are filled in.

    Without ``interval`` the best is chosen, or with fewer experts one short enough for ``plt_limit``.
    """
    weighed = on.weighed(name, options)
    return Candidate(ettr=expected_ettr(weighed.saving, on.iteration_s, options.mtbf_s), **vars(weighed))


def keeps_to(candidate: Candidate, limits: PlanLimits) -> bool:
    """Returns whether a candidate is within the limits."""
    return (
        (candidate.saving.exact or not limits.exact_only)
        and candidate.plt <= limits.plt_of(candidate.saving.name)
        and (limits.host_bytes is None or candidate.host_bytes <= limits.host_bytes)
    )


def _reasons(iteration_s: float, mtbf_s: float, best: Candidate, alternatives: list[Candidate]) -> Iterator[str]:
    saving = best.saving
    yield (
        f"{best.name}: saving adds {100 * saving.per_iteration_s() / iteration_s:.2g} % to an iteration of "
        f"{iteration_s:.3g} s, and each failure costs {recovery_s(saving):.3g} s of the {mtbf_s:.4g} s between two, "
        f"which leaves an ETTR of {best.ettr:.3f}."
    )
    if best.plt:
        yield f"Failures are expected to lose {100 * best.plt:.2g} % of the tokens of experts."
    if alternatives:
        second = alternatives[0]
        second_s = recovery_s(second.saving)
        yield f"The next best, {second.name}, has ETTR {second.ettr:.3f}: a failure costs it {second_s:.3g} s."
