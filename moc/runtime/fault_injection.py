"""Fault injection: planned or random faults, and the injector that executes them in a worker.

All workers know the same plan in advance.  A fault strikes a worker at most ``times`` times per job, even across
recoveries and restarts.  The worker creates a marker file before each strike, and skips strikes whose file exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moc.errors import UserError
from moc.fault_points import AFTER, ELASTIC, FORMER_NAMES, POINTS, RECOVERY, STEP
from moc.files.safe_directory import open_without_links

ACTIONS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP: it hangs, threads and all",
    "term": "SIGTERM: it is asked to stop, as by a batch system",
    "slow": "it sleeps for seconds=S",
    "error": "it raises an exception, as a mistake in the program would",
}
"""Fault actions, by name."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
MAX_KILLED = 3  # maximum number of workers that one random fault kills


class FaultError(UserError, ValueError):
    """The description of a fault is malformed."""


class InjectedError(Exception):
    """The exception of an injected error."""


@dataclass(frozen=True)
class Fault:
    """A fault that strikes each selected worker when it first reaches a point, starting at an iteration.

    Attributes:
        action: one of :data:`ACTIONS`.
        iteration: first iteration that it may strike, counted from 1; 0 includes the start of the job.
        ranks: ranks of the workers; empty for all workers of the node.
        node: number of the node; None for any.
        point: one of :data:`moc.fault_points.POINTS`.
        seconds: duration of ``slow``.
        times: number of strikes per worker.
    """

    action: str
    iteration: int
    ranks: tuple[int, ...] = ()
    node: int | None = None
    point: str = "start"
    seconds: float = 0.0
    times: int = 1

    def __str__(self) -> str:
        """The text that :func:`parse_faults` parses."""
        parts = [self.action]
        parts += [f"ranks={','.join(map(str, self.ranks))}"] if self.ranks else []
        parts += [f"node={self.node}"] if self.node is not None else []
        parts += [f"iteration={self.iteration}", f"point={self.point}"]
        parts += [f"seconds={self.seconds:g}"] if self.action == "slow" else []
        parts += [f"times={self.times}"] if self.times > 1 else []
        return " ".join(parts)

    def applies_to(self, rank: int, node: int) -> bool:
        """Returns whether it strikes this worker."""
        return (not self.ranks or rank in self.ranks) and self.node in (None, node)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parses faults separated by semicolons, such as ``kill rank=2 iteration=40``.

    Raises:
        ValueError: a fault is malformed; the message has the remedy.
    """
    return tuple(_parse_fault(fault_text.split()) for fault_text in text.split(";") if fault_text.strip())


def _parse_fault(tokens: list[str]) -> Fault:
    action, *settings = tokens
    if action not in ACTIONS:
        raise FaultError(
            f"{action} is no fault. Fix: begin the fault with one of {', '.join(ACTIONS)}",
            code="value-unreadable",
        )
    values = {}
    for token in settings:
        name, equals, value = token.partition("=")
        name = "ranks" if name == "rank" else name
        if not equals or name not in _PARSERS:
            raise FaultError(
                f"{token} is not understood. Fix: write {', '.join(f'{n}=' for n in _PARSERS)} behind {action}",
                code="value-unreadable",
            )
        if name in values:
            raise FaultError(
                f"{name}= is there twice. Fix: drop one",
                code="value-unreadable",
            )
        values[name] = _parse_value(name, value)
    _check_values(action, values)
    return Fault(action, **values)


def _check_values(action: str, values: dict) -> None:
    if "iteration" not in values:
        raise FaultError(
            f"{action} has no iteration. Fix: add iteration=",
            code="value-unreadable",
        )
    if "ranks" not in values and "node" not in values:
        raise FaultError(
            f"{action} has no worker or node. Fix: add rank= or node=",
            code="value-unreadable",
        )
    if (action == "slow") != ("seconds" in values):
        raise FaultError(
            "only slow takes seconds=, and needs it. Fix: set seconds= for slow only",
            code="value-unreadable",
        )
    if values.get("times") == 0 or values.get("seconds") == 0:
        raise FaultError(
            "times= and seconds= are not greater than 0. Fix: raise them",
            code="value-unreadable",
        )


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("an integer")
    return int(text)


def _parse_seconds(text: str) -> float:
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else -1.0
    if seconds < 0:
        raise ValueError("a number of seconds")
    return seconds


def _parse_point(text: str) -> str:
    point = FORMER_NAMES.get(text, text)
    if point not in POINTS:
        raise ValueError(f"one of {', '.join(POINTS)}")
    return point


_PARSERS: dict[str, Callable] = {
    "ranks": lambda text: tuple(sorted({_parse_number(rank) for rank in text.split(",")})),
    "node": _parse_number,
    "iteration": _parse_number,
    "point": _parse_point,
    "seconds": _parse_seconds,
    "times": _parse_number,
}


def _parse_value(name: str, value: str):
    try:
        return _PARSERS[name](value)
    except ValueError as wanted:
        raise FaultError(
            f"{name}= takes {wanted}, not {value or 'nothing'}. Fix: change it",
            code="value-unreadable",
        ) from None


def random_faults(mean: float, seed: int, size: int, iterations: int) -> tuple[Fault, ...]:
    """Returns faults that kill a few of ``size`` workers at random points; deterministic in its arguments.

    Gaps between faults are exponentially distributed, with a mean of ``mean`` iterations.  A fault within recovery
    follows another that triggers a recovery.
    """
    generator, faults, elapsed = random.Random(f"{seed} {size} {mean:g}"), [], 1.0
    while (elapsed := elapsed + generator.expovariate(1 / mean)) < iterations:
        point, ranks = (
            generator.choice([name for name in POINTS if name not in ELASTIC | AFTER]),
            _sample_ranks(generator, size),
        )
        if point == "committed":
            ranks = (0,)  # only rank 0 commits in storage
        if point in RECOVERY:
            initial_ranks = ranks if point == "rebuilding" else _sample_ranks(generator, size)
            faults.append(Fault("kill", int(elapsed) + 1, initial_ranks, point=generator.choice(list(STEP))))
        # a survivor may be one iteration behind the killed workers
        faults.append(Fault("kill", int(elapsed) if point in RECOVERY else int(elapsed) + 1, ranks, point=point))
    return tuple(faults)


def _sample_ranks(chance: random.Random, size: int) -> tuple[int, ...]:
    return tuple(sorted(chance.sample(range(size), chance.randint(1, min(MAX_KILLED, size)))))


class Injector:
    """Executes this worker's faults, and records the strikes and the current iteration in files.

    Args:
        faults: all faults of the plan.
        rank: rank of this worker.
        node: number of its node.
        directory: directory of the files; replacements of this worker need access.
        on_strike: callback before each strike, with ``action``, ``rank``, ``iteration`` and ``point``.
    """

    def __init__(
        self, faults: tuple[Fault, ...], rank: int, node: int, directory: Path, on_strike: Callable[[dict], None]
    ):
        self._faults: dict[str, list[Fault]] = {}
        for fault in faults:
            if fault.applies_to(rank, node):
                self._faults.setdefault(fault.point, []).append(fault)
        directory.mkdir(parents=True, exist_ok=True)
        self._rank, self._directory, self._on_strike = rank, directory, on_strike
        self._iteration_file = open_without_links(directory / f"rank_{rank:05d}", os.O_RDWR | os.O_CREAT)
        self._iteration = int.from_bytes(os.pread(self._iteration_file, 8, 0), "little")

    def reached(self, point: str, iteration: int | None = None) -> None:
        """See :func:`moc.fault_points.reach`."""
        if point == "start" and iteration is not None:
            self._iteration = iteration
            os.pwrite(self._iteration_file, iteration.to_bytes(8, "little"), 0)
        current = self._iteration if iteration is None else iteration
        for fault in self._faults.get(point, ()):
            if fault.iteration <= current and self._claim(fault):
                self._execute(fault, current)

    def _claim(self, fault: Fault) -> bool:
        """Returns whether the fault strikes now; if so, the strike is already recorded."""
        name = f"{fault.iteration}.{fault.point}.{hashlib.sha256(str(fault).encode()).hexdigest()[:8]}"
        for number in range(fault.times):
            with contextlib.suppress(FileExistsError):
                (self._directory / f"{name}.rank_{self._rank:05d}.{number}").touch(0o644, exist_ok=False)
                return True
        return False

    def _execute(self, fault: Fault, iteration: int) -> None:
        self._on_strike(dict(action=fault.action, rank=self._rank, iteration=iteration, point=fault.point))
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.action])
        elif fault.action == "slow":
            time.sleep(fault.seconds)
        else:
            raise InjectedError(f"injected: {fault}")
