"""Runs several threads in turns, each from one thing that it does to files to the next, in an order that is given."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from tests.unit.store.kills import WATCHED

_LIMIT_S = 60.0
_gates: dict[int, Callable[[str], None]] = {}


def _hook(event: str, arguments: tuple) -> None:
    gate = _gates.get(threading.get_ident())
    if gate is not None and event in WATCHED and any(isinstance(a, (str, os.PathLike)) for a in arguments):
        gate(f"{event} {arguments[0]}")


sys.addaudithook(_hook)  # for good: there is no way to take one away


class Actor:
    """What one of several does, as far as it is let.

    Attributes:
        result: what it has returned, when it has ended.
        error: what it has raised.
        steps: how many there were so far.
        at: before what it waits.
    """

    def __init__(self, action: Callable):
        self.result, self.error, self.steps, self.at = None, None, 0, ""
        self._action, self._over = action, False
        self._may, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._until_it_waits()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def step(self, count: int | None = 1) -> None:
        """Lets it do so many steps, or all that are left."""
        while not self._over and count != 0:
            self._may.release()
            self._until_it_waits()
            self.steps += 1
            count = None if count is None else count - 1

    def _until_it_waits(self) -> None:
        assert self._waits.acquire(timeout=_LIMIT_S), f"it hangs after {self.at}"

    def _run(self) -> None:
        _gates[threading.get_ident()] = self._wait
        self._wait("begin")
        try:
            self.result = self._action()
        except Exception as error:
            self.error = error
        finally:
            del _gates[threading.get_ident()]
            self._over = True
            self._waits.release()

    def _wait(self, at: str) -> None:
        self.at = at
        self._waits.release()
        assert self._may.acquire(timeout=_LIMIT_S)


def in_turns(actions: Sequence[Callable], order: Sequence[int]) -> list[Actor]:
    """Runs actions step by step in an order of their numbers, and what is left of them to the end, one by one."""
    actors = [Actor(action) for action in actions]
    for number in order:
        actors[number].step()
    for actor in actors:
        actor.step(None)
    return actors
