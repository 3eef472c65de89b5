"""What a session is told; as flags have it (``docs/how-to/keep-snapshots.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class SettingsError(ValueError):
    """Settings do not go with each other, or with the job; the message says what to change."""


@dataclass(frozen=True)
class Settings:
    """What is saved when, where snapshots go, and how.

    Attributes:
        directory: of the snapshots in storage, or a URL (``--ckpt-dir``); empty without a policy.
        train_iters: iterations of the whole training.
        policy: its name, such as ``full`` or ``sparse``; None: no snapshots are taken.
        interval: iterations between snapshots, or ``auto`` (``--snapshot-interval``).
        overhead_budget: with ``auto``, the share of training that snapshots may take.
        options: of the policy, as its constructor takes them.
        tier: where a snapshot is safe: ``disk``, ``memory`` or ``peers``.
        memory_directory: memory file system.
        nodes: by rank the name of its node, comma-separated; None: as the launcher says, or by host.
        blocking: training waits until a snapshot is safe.
        most_behind: iterations that may be completed while a snapshot is not safe; None if all may.
        keep: complete snapshots to keep in storage.
        sharding: which of several ranks that hold the same state saves it (:mod:`moc.sharding`).
        persist_interval: with a memory tier, iterations between snapshots that go to storage too; None for none.
        persists_all: every one goes there, since the policy chooses what of it does.
        replicas: other nodes that keep copies of each node's snapshots; None for as many as there are, up to two.
        replication_rate: GB/s that a node copies at, at most; None for no limit.
        upstream_logging: what crosses pipeline stages is logged.
        begin_at: iteration of the snapshot to begin with; None for the newest.
        stops: what cannot be saved in storage ends the run, in place of being tried again.
    """

    directory: str
    train_iters: int
    policy: str | None = None
    interval: str = "1"
    overhead_budget: float = 0.03
    options: Mapping[str, Any] = field(default_factory=dict)
    tier: str = "disk"
    memory_directory: str = "/dev/shm"
    nodes: str | None = None
    blocking: bool = False
    most_behind: int | None = None
    keep: int = 2
    sharding: str = "EE+AN"
    persist_interval: int | None = None
    persists_all: bool = False
    replicas: int | None = None
    replication_rate: float | None = None
    upstream_logging: bool = False
    begin_at: int | None = None
    stops: bool = False
