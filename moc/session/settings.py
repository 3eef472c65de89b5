"""Defines the settings of a session, as flags set them (``docs/how-to/keep-snapshots.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moc.errors import UserError, code_of
from moc.policy import parse_interval
from moc.sharding import parse_scheme

TIERS = ("disk", "memory", "peers")
"""Tiers that can make snapshots durable."""

SAVE_FAILURE = ("continue", "stop")
"""Actions after a failed save to storage."""

_NEEDS = {"persist_interval": TIERS[1:], "replicas": TIERS[2:], "replication_rate": TIERS[2:]}
"""By setting, the tiers that it applies to."""


class SettingsError(UserError, ValueError):
    """Contradiction of settings with each other or with the job; the message has the remedy."""


@dataclass(frozen=True)
class Settings:
    """Schedule, contents, tiers and method of snapshots.  A setting has the name of its flag, without ``ckpt_``.

    Attributes:
        directory: directory or URL of the snapshots in storage (``--ckpt-dir``); empty without a policy.
        train_iters: iterations of the entire training.
        policy: name, such as ``full`` or ``sparse``; None to take no snapshots.
        snapshot_interval: iterations between snapshots, or ``auto``; a number becomes text.
        overhead_budget: with ``auto``, the share of the training time that snapshots may cost (0.03: 3 %).
        options: arguments of the policy's constructor.
        tier: where a snapshot is durable: ``disk``, ``memory`` or ``peers``.
        memory_dir: directory in a memory file system, for snapshots in memory.
        node_of_rank: comma-separated node names by rank; None for the launcher's names, or the host names.
        blocking: training waits until a snapshot is durable.
        max_snapshot_lag: iterations that may complete while a snapshot is not durable; None for no limit.
        keep: complete snapshots to keep in storage.
        sharding: rule that selects one of several replicas to save a state (:mod:`moc.sharding`).
        persist_interval: with a memory tier, iterations between snapshots that also go to storage; None for none.
        replicas: other nodes that keep copies of each node's snapshots; None for all, up to two.
        replication_rate: maximum copy rate of a node in GB/s; None for no limit.
        upstream_logging: log the activations and gradients sent between pipeline stages (MoEvement, section 3.4).
        step: iteration of the snapshot to start from; None for the newest.
        save_failure: ``continue`` to retry a failed save to storage, ``stop`` to end the run.
        digest_interval: iterations between digests of the state, which recoveries compare; 0 for none.
        deterministic: repeated computation gives identical bits; otherwise a replay that differs is only reported.

    Raises:
        SettingsError: a setting is invalid or has no effect.
    """

    directory: str
    train_iters: int
    policy: str | None = None
    snapshot_interval: int | str = "1"
    overhead_budget: float = 0.03
    options: Mapping[str, Any] = field(default_factory=dict)
    tier: str = "disk"
    memory_dir: str = "/dev/shm"
    node_of_rank: str | None = None
    blocking: bool = False
    max_snapshot_lag: int | None = None
    keep: int = 2
    sharding: str = "EE+AN"
    persist_interval: int | None = None
    replicas: int | None = None
    replication_rate: float | None = None
    upstream_logging: bool = False
    step: int | None = None
    save_failure: str = "continue"
    digest_interval: int = 1
    deterministic: bool = True

    def __post_init__(self):
        object.__setattr__(self, "snapshot_interval", str(self.snapshot_interval))
        if self.policy is not None and not self.directory:
            raise SettingsError(
                "Settings.directory is empty. Fix: name a directory or URL for snapshots", code="setting-invalid"
            )
        if self.tier not in TIERS:
            raise SettingsError(
                f"Settings.tier is {self.tier!r}. Fix: choose one of {', '.join(TIERS)}", code="setting-invalid"
            )
        if self.save_failure not in SAVE_FAILURE:
            raise SettingsError(
                f"Settings.save_failure is {self.save_failure!r}. Fix: choose one of {', '.join(SAVE_FAILURE)}",
                code="setting-invalid",
            )
        if self.replication_rate is not None and not self.replication_rate > 0:
            raise SettingsError(
                f"Settings.replication_rate is {self.replication_rate}. Fix: give more than 0, or None",
                code="setting-invalid",
            )
        for name in ("keep", "max_snapshot_lag", "persist_interval", "replicas"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SettingsError(f"Settings.{name} is {value}. Fix: give at least 1", code="setting-invalid")
        if self.digest_interval < 0:
            raise SettingsError(
                f"Settings.digest_interval is {self.digest_interval}. Fix: give at least 0", code="setting-invalid"
            )
        for name, tiers in _NEEDS.items():
            if getattr(self, name) is not None and self.tier not in tiers:
                raise SettingsError(
                    f"Settings.{name} has no effect with tier {self.tier!r}. Fix: drop it, or choose tier "
                    f"{' or '.join(tiers)}",
                    code="setting-without-effect",
                )
        valid = (
            ("snapshot_interval", lambda: parse_interval(str(self.snapshot_interval), self.overhead_budget)),
            ("sharding", lambda: parse_scheme(self.sharding)),
            ("node_of_rank", lambda: None if self.node_of_rank is None else node_names(self.node_of_rank)),
        )
        for name, parse in valid:
            try:
                parse()
            except ValueError as error:
                raise SettingsError(f"Settings.{name}: {error}", code=code_of(error)) from None


def node_names(text: str) -> list[str]:
    """Returns the node names by rank from a comma-separated list.

    Raises:
        SettingsError: a name has characters other than letters and digits.
    """
    names = text.split(",")
    if not all(name.isalnum() for name in names):  # names become part of a directory name
        raise SettingsError(
            f"{text} does not name nodes. Fix: use letters and digits, such as 0,0,1,1", code="node-names-invalid"
        )
    return names
