"""What crosses pipeline stages where nothing of it is logged."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from moc.policy import SnapshotPlan


class NoTap:
    """A :class:`moc.session.engine.PipelineTap` that logs nothing."""

    gauges: Mapping[str, float] = MappingProxyType({})
    feeds: Mapping[int, Collection[int]] = MappingProxyType({})

    def open(self, memory: Path) -> None:
        """Makes nothing."""

    def ballot(self) -> dict[str, float]:
        """Contributes nothing."""
        return {}

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """Needs nothing of it."""

    def on_stored(self, plan: SnapshotPlan) -> None:
        """Has nothing that was needed before."""

    def close(self) -> None:
        """Has nothing under way."""

    def delete(self) -> None:
        """Has no logs."""

    def kept(self) -> list[int]:
        """No iteration."""
        return []

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        """No iteration."""
        return []

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Has sent nothing."""

    @contextlib.contextmanager
    def replaying(self, stages: Collection[int]) -> Iterator[None]:
        """All stages compute, as ever."""
        yield
