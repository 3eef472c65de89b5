"""What is done to a job at random moments of a recovery: a worker is killed, and more follows before all go on."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Protocol

GUESS_S = 3.0  # how long the first recovery of a run is thought to take; later ones as long as the one before
SHORT, LONG = 0.4, 1.6  # how long something is paused, in silence timeouts

ALONE = ("controller", "controller pauses", "controller pauses for long", "replica server", "worker")
SEVERAL = (*ALONE, "replica server pauses", "zygote", "zygote pauses")
ELECTED = (*SEVERAL, "controllers", "controllers pause for long", "launcher")
"""What can happen during a recovery, on one node, on several, and on several of which three have candidates for the
controller: ``controller`` is one of these then, and ``controllers`` are all.  Without its zygote a node is lost."""
LOSSES = ("launcher", "zygote")


@dataclass(frozen=True)
class During:
    """Something that happens while a job recovers."""

    action: str  # one of :data:`SEVERAL`
    share: float  # when, as a share of how long a recovery takes
    rank: int  # of the worker, for ``worker``
    node: int  # whose process, of all other actions but ``controllers``

    def __str__(self) -> str:
        whose = {"worker": f" {self.rank}", "controllers": ""}.get(self.action.split()[0], f" {self.node}")
        return f"{self.action.replace(' ', '_')}{whose} at {self.share:.2f}, recovery"


@dataclass(frozen=True)
class Trouble:
    """A worker that is killed when an iteration is complete, and what else happens until all go on."""

    iteration: int
    rank: int
    during: tuple[During, ...]


class Disturbed(Protocol):
    """A run, as far as it is met in its recoveries; see :class:`benchmarks.faults.run.Run`."""

    def reached(self) -> int: ...

    def kill_worker(self, rank: int) -> bool: ...

    def disturb_recovery(self, what: During) -> bool: ...


def troubles(
    chance: random.Random, size: int, nodes: int, iterations: int, every: int = 4, candidates: int = 1
) -> tuple[Trouble, ...]:
    """What happens in the recoveries of a run but the last iterations; of candidates' nodes one at a time is lost."""
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
    """Whose process: of one candidate's nodes, the first cannot be lost, and has the controller."""
    if candidates > 1:
        return chance.randrange(max(nodes, candidates))
    if action.startswith("zygote"):
        return nodes - 1
    return 0 if action.startswith("controller") else chance.randrange(nodes)


class Recoveries:
    """Meets a run in its recoveries, as planned; ``done`` is what has happened.

    ``seconds`` are those of each recovery, from the kill to a further iteration.
    """

    def __init__(self, planned: tuple[Trouble, ...]):
        self._waiting, self._during, self._begun, self._from = list(planned), [], 0.0, 0
        self._recovering, self.done, self.seconds = False, [], []

    def look(self, run: Disturbed) -> None:
        """Does what is due."""
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
