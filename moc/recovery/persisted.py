"""Computes the state that a run finds in storage if all memory is lost, and its age; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moc.policy import Policy, recovers_exactly
from moc.recovery.sources import STORAGE, AvailableCheckpoint, recoveries
from moc.state.operators import Detail, Operator


@dataclass(frozen=True)
class Persisted:
    """State that a run would resume with if all memory were lost.

    Attributes:
        iteration: that it would resume from; 0 if storage has no recovery path.
        learned: by operator, the last iteration whose update its state has; empty without a recovery path.
    """

    iteration: int = 0
    learned: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, held: Iterable[AvailableCheckpoint], policy: Policy) -> Persisted:
        """Finds the state among checkpoints; tiers other than storage are ignored."""
        stored = [one for one in held if one.tier == STORAGE]
        way = next(recoveries(stored, policy.operators, recovers_exactly(policy)), None)
        if way is None:
            return cls()
        return cls(way.iteration, {one.name: way.learned_until(one.name) for one in policy.operators})


@dataclass(frozen=True)
class Promise:
    """Maximum age, in iterations, of an operator's newest state in storage while storage keeps up.

    Attributes:
        state: of dense operators, or of all operators if the policy is exact.
        experts: of experts; None if the policy promises nothing.
    """

    state: int
    experts: int | None

    @classmethod
    def of(cls, policy: Policy, every: int, outstanding: int, commits: int) -> Promise:
        """Returns the promise of a policy.

        Storage keeps up if it writes each snapshot (with windows: each window) before the next one is due. A state
        waits for ``storage.cycle`` snapshots. The last of them may follow outstanding ones, ends with its window, and
        is known to be committed after some commit all-reduces.

        Args:
            policy: with the current settings.
            every: iterations between snapshots for storage.
            outstanding: snapshots that may be written to storage at the same time.
            commits: iterations until a snapshot is known to be committed if its write takes no time.
        """
        apart = policy.schedule.iterations_apart
        step = -(-max(every, apart) // apart) * apart
        late = 2 * policy.schedule.window_length + commits
        cycle = policy.storage.cycle
        return cls((1 + outstanding) * step + late, None if cycle is None else (cycle + outstanding) * step + late)


def overdue(
    persisted: Persisted, promise: Promise, operators: Sequence[Operator], iteration: int, since: int
) -> list[str]:
    """Returns the operators whose newest state in storage is older than promised, in model order.

    Args:
        persisted: state in storage.
        promise: of the policy.
        operators: of the model.
        iteration: iterations completed.
        since: iteration of the first snapshot that was due after this start.
    """
    found = []
    for one in operators:
        most = promise.state if one.place is None else promise.experts
        if most is not None and iteration - max(since, persisted.learned.get(one.name, 0)) > most:
            found.append(one.name)
    return found


def newest_full(held: Iterable[AvailableCheckpoint]) -> dict[str, int]:
    """Returns, by operator, the iteration of its newest full save in some checkpoints; omits operators without one."""
    found: dict[str, int] = {}
    for one in held:
        for name, detail in one.operators.items():
            if detail == Detail.FULL.value:
                found[name] = max(found.get(name, 0), one.iteration)
    return found
