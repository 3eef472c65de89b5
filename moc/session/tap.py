"""The tap of a pipeline without upstream logs."""

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
        """Allocates nothing."""

    def ballot(self) -> dict[str, float]:
        """Contributes nothing."""
        return {}

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """Ignores the vote."""

    def on_stored(self, plan: SnapshotPlan) -> None:
        """Has nothing to garbage-collect."""

    def close(self) -> None:
        """Has no pending work."""

    def delete(self) -> None:
        """Has no logs."""

    def kept(self) -> list[int]:
        """Returns no iteration."""
        return []

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        """Returns no iteration."""
        return []

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends nothing."""

    @contextlib.contextmanager
    def replaying(self, stages: Collection[int]) -> Iterator[None]:
        """All stages compute, as in training."""
        yield
