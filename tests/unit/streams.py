"""A stream that tests move."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Mark:
    """A place on a stream that a test moves."""

    at: float | None = None

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end_event: Mark) -> float:
        return 1e3 * (end_event.at - self.at)


class Stream:
    """A stream, and the marks on it."""

    def __init__(self):
        self.marks: list[Mark] = []

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def reach(self, *moments: float) -> None:
        for moment in moments:
            next(mark for mark in self.marks if mark.at is None).at = moment
