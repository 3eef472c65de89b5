"""What stands in the place of snapshots where none are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moc.session.participant import VoteParticipant
from moc.session.resume.survivors import LiveState, StartedSnapshot
from moc.state.record import Position, StepRecord


class NoSnapshots(VoteParticipant):
    """Without ``--ckpt-policy``."""

    gauges: Mapping[str, float] = MappingProxyType({})
    live: LiveState | None = None
    begun: Mapping[int, StartedSnapshot] = MappingProxyType({})
    record: StepRecord | None = None
    run: str | None = None
    storage_fails: bool = False
    memory_is_free: bool = False

    def completed(self, position: Position, record: StepRecord, begun: float) -> None:
        """Keeps nothing of it."""

    def take(self) -> None:
        """Takes none."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to give back."""

    def flush(self, position: Position) -> None:
        """Nothing to bring to storage."""
