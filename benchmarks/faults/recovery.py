"""Random faults during recoveries: a worker is killed, and further faults follow before training continues."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Protocol

GUESS_S = 3.0  # assumed duration of a run's first recovery; later ones are assumed to last as long as the previous one
SHORT, LONG = 0.4, 1.6  # durations of a pause, in silence timeouts

ALONE = ("controller", "controller pauses", "controller pauses for long", "replica server", "worker")
SEVERAL = (*ALONE, "replica server pauses", "zygote", "zygote pauses")
ELECTED = (*SEVERAL, "controllers", "controllers pause for long", "launcher")
"""Faults during a recovery: on one node, on several nodes, and on several with three candidates for the controller.
With candidates, ``controller`` is one of them, and ``controllers`` are all.  Losing its forkserver loses a node."""
LOSSES = ("launcher", "zygote")


@dataclass(frozen=True)
class During:
    """A fault during a recovery."""

    action: str  # one of :data:`ELECTED`
    share: float  # time of the fault, as a share of the duration of a recovery
    rank: int  # rank of the worker, for ``worker``
    node: int  # node of the process, for all other actions except ``controllers``

    def __str__(self) -> str:
        whose = {"worker": f" {self.rank}", "controllers": ""}.get(self.action.split()[0], f" {self.node}")
        return f"{self.action.replace(' ', '_')}{whose} at {self.share:.2f}, recovery"


@dataclass(frozen=True)
class Trouble:
    """A worker that is killed when an iteration is complete, and further faults until training continues."""

    iteration: int
    rank: int
    during: tuple[During, ...]


class Disturbed(Protocol):
    """Interface for injecting faults into a run; see :class:`benchmarks.faults.run.Run`."""

    def reached(self) -> int: ...

    def kill_worker(self, rank: int) -> bool: ...

    def disturb_recovery(self, what: During) -> bool: ...


def troubles(
    chance: random.Random, size: int, nodes: int, iterations: int, every: int = 4, candidates: int = 1
) -> tuple[Trouble, ...]:
    """Draws the faults of a run's recoveries, except in the last iterations; at most one node is lost in a recovery."""
    drawn = []
    possible = ELECTED if candidates > 1 else SEVERAL if nodes > 1 else ALONE
    for iteration in range(2, iterations - 4, every):
        during = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            lost = any(one.action in LOSSES for one in during)
            action = chance.choice([action for action in possible if not (lost and action in LOSSES)])
            share, rank = chance.random(), chance.randrange(size)
            during.append(During(action, share, rank, _node(action, chance, nodes, candidates)))
        at = iteration + chance.randrange(every // 2)
        drawn.append(Trouble(at, chance.randrange(size), tuple(sorted(during, key=lambda one: one.share))))
    return tuple(drawn)


def _node(action: str, chance: random.Random, nodes: int, candidates: int) -> int:
    """Returns the node of the process; with one candidate, the first node has the controller and must not be lost."""
    if candidates > 1:
        return chance.randrange(max(nodes, candidates))
    if action.startswith("zygote"):
        return nodes - 1
    return 0 if action.startswith("controller") else chance.randrange(nodes)


class Recoveries:
    """Injects the planned faults into the recoveries of a run; ``done`` lists the injected faults.

    ``seconds`` lists the duration of each recovery, from the kill to a further iteration.
    """

    def __init__(self, planned: tuple[Trouble, ...]):
        self._waiting, self._during, self._begun, self._from = list(planned), [], 0.0, 0
        self._recovering, self.done, self.seconds = False, [], []

    def look(self, run: Disturbed) -> None:
        """Injects the faults that are due."""
        if self._recovering:
            self._go_on(run)
        elif self._waiting and run.reached() >= self._waiting[0].iteration:
            trouble = self._waiting.pop(0)
            if run.kill_worker(trouble.rank):
                self._begun, self._from, self._during = time.monotonic(), run.reached(), list(trouble.during)
                self._recovering = True
                self.done.append(f"kill {trouble.rank} at {trouble.iteration}, outside")

    def _go_on(self, run: Disturbed) -> None:
        usual, spent = self.seconds[-1] if self.seconds else GUESS_S, time.monotonic() - self._begun
        while self._during and spent >= self._during[0].share * usual:
            if run.disturb_recovery(what := self._during.pop(0)):
                self.done.append(str(what))
        if run.reached() > self._from:
            self.seconds.append(round(spent, 2))
            self._recovering = False
