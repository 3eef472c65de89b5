"""Settings of a session, as flags set them (``docs/how-to/keep-snapshots.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class SettingsError(ValueError):
    """Settings contradict each other or the job; the message says what to change."""


@dataclass(frozen=True)
class Settings:
    """What is saved when, where snapshots go, and how.

    Attributes:
        directory: of the snapshots in storage, or a URL (``--ckpt-dir``); empty without a policy.
        train_iters: iterations of the whole training.
        policy: its name, such as ``full`` or ``sparse``; None to take no snapshots.
        interval: iterations between snapshots, or ``auto`` (``--snapshot-interval``).
        overhead_budget: with ``auto``, the share of the training time that snapshots may cost.
        options: arguments of the policy's constructor.
        tier: where a snapshot is safe: ``disk``, ``memory`` or ``peers``.
        memory_directory: memory file system.
        nodes: by rank the name of its node, comma-separated; None to ask the launcher, or the host name.
        blocking: training waits until a snapshot is safe.
        most_behind: iterations that may complete while a snapshot is not safe; None for no limit.
        keep: complete snapshots to keep in storage.
        sharding: rule by which one of several replicas saves a state (:mod:`moc.sharding`).
        persist_interval: with a memory tier, iterations between snapshots that also go to storage; None for none.
        persists_all: every snapshot goes to storage, and the policy chooses which part of it.
        replicas: other nodes that keep copies of each node's snapshots; None for as many as there are, up to two.
        replication_rate: GB/s that a node copies at, at most; None for no limit.
        upstream_logging: log what crosses pipeline stages.
        begin_at: iteration of the snapshot to start from; None for the newest.
        stops: a failed save to storage ends the run, instead of being retried.
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
