"""Flags of snapshots, from which a run resumes after a failure."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.pretraining.config.flag import ConfigError, FlagGroup, flag, flags_of, refuse
from moc.policy import AUTO, POLICIES, PolicyFlag, interval_named, owners
from moc.policy.measurements import UNDISTURBED_MTBF_S
from moc.policy.pec_flags import experts_of
from moc.sharding import scheme_named

_CHOSEN_BY_AUTO = ("ckpt_blocking", "persist_interval", "snapshot_interval")
"""Flags chosen by ``--ckpt-policy auto``, besides the settings of policies."""

_LIMITS_OF_AUTO = ("exact_only", "host_memory_gb")


def _nodes(text: str) -> str:
    names = text.split(",")
    if not all(name.isalnum() for name in names):  # names become part of a directory name
        raise ValueError(f"nodes are called by letters and digits, such as 0,0,1,1, not {text}")
    return text


_REPLAYING = " or ".join(sorted(name for name, kind in POLICIES.items() if kind.replays))


@dataclass(frozen=True)
class _EveryPolicy(FlagGroup):
    """The flags common to all policies."""

    ckpt_policy: str | None = flag(
        None,
        "What is in a snapshot and when one is taken; a run that finds snapshots in --ckpt-dir goes on from the "
        "newest. Without a policy there are none. auto chooses policy, interval, K, window and replicas by expected "
        "cost, from what is measured, and anew when that changes.",
        choices=[AUTO, *sorted(POLICIES)],
    )
    ckpt_tier: str = flag(
        "disk",
        "Where a snapshot is safe: in --ckpt-dir; in the memory of its node, from where a job that is started again "
        "on the same machines goes on in seconds; or also in that of other nodes, its peers, so that nodes may be lost "
        "(Gemini).",
        choices=("disk", "memory", "peers"),
    )
    ckpt_dir: str | None = flag(
        None, "Directory or URL (s3://...) of the snapshots; by default SAVE/snapshots.", metavar="DIR"
    )
    ckpt_memory_dir: str = flag(
        "/dev/shm", "Memory file system for --ckpt-tier memory and peers, and for --upstream-logging.", metavar="DIR"
    )
    ckpt_blocking: bool = flag(False, "Let training wait until a snapshot is safe, in place of taking it beside it.")
    max_snapshot_lag: int | None = flag(
        None,
        "Iterations that may be completed while a snapshot is not safe; training then waits until it is. With 1 and "
        "--ckpt-policy sparse, at most two windows are computed again, whatever lags. Without it training goes on as "
        "long as there are buffers.",
        at_least=1,
    )
    ckpt_keep: int = flag(
        2, "Complete snapshots to keep in --ckpt-dir; windows, with --ckpt-policy sparse.", at_least=1
    )
    ckpt_sharding: str = flag(
        "EE+AN",
        "Which of several ranks that hold the same state saves it: the name of a scheme, or of two rules, "
        "EXPERTS,OTHERS (docs/explanation/sharding.md).",
        type=lambda text: (scheme_named(text), text)[1],
        metavar="SCHEME",
    )
    ckpt_overhead_budget: float = flag(
        0.03, "Share of the training time that --snapshot-interval auto may cost.", above=0.0, below=1.0
    )
    snapshot_interval: str = flag(
        "auto",
        "Iterations between snapshots; auto takes them as often as --ckpt-overhead-budget allows (CheckFreq).",
        type=lambda text: (interval_named(str(text)), str(text))[1],
        metavar="N|auto",
    )
    persist_interval: int | None = flag(
        None,
        "With --ckpt-tier memory or peers: iterations between snapshots (whole windows, with --ckpt-policy sparse) "
        "that are also written to --ckpt-dir; without it, only the last one of a run is.",
        at_least=1,
    )
    replicas: int | None = flag(
        None,
        "With --ckpt-tier peers: other nodes that keep copies of each node's snapshots; by default 2, or as many as "
        "there are.",
        at_least=1,
    )
    replication_rate: float | None = flag(
        None, "With --ckpt-tier peers: GB/s at which a node copies snapshots of others, at most.", above=0.0
    )

    mtbf_hours: float | None = flag(
        None,
        "Hours from one failure of the job to the next, for what is chosen by its expected cost; by default 24, and "
        "with --ckpt-policy auto what the faults so far tell.",
        above=0.0,
    )
    exact_only: bool = flag(
        False, "With --ckpt-policy auto: only policies after whose recovery the run is what it would have been."
    )
    host_memory_gb: float | None = flag(
        None, "With --ckpt-policy auto: GB of a node's memory that snapshots may take, at most.", above=0.0
    )
    node_of_rank: str | None = flag(
        None,
        "The node of each worker, where hosts do not tell: with 0,0,1,1 four workers on one machine are two nodes, "
        "each with memory of its own.",
        metavar="NODE,NODE,...",
        type=lambda text: _nodes(str(text)),
    )

    upstream_logging: bool = flag(
        False,
        "With --ckpt-policy sparse and a pipeline: keep what each stage sends in the memory of its node, so that a "
        "stage can be computed again by itself.",
    )
    upstream_log_limit: float = flag(
        8.0,
        "With --upstream-logging: GB that the logs of a worker may take, at most; the oldest iterations go first.",
        above=0.0,
    )

    @property
    def mtbf_s(self) -> float:
        """Seconds from one failure to the next, until they are measured."""
        return UNDISTURBED_MTBF_S if self.mtbf_hours is None else 3600.0 * self.mtbf_hours

    @property
    def chooses_experts(self) -> bool:
        """Whether the policy chooses its numbers of experts from measurements."""
        return self.ckpt_policy in POLICIES and POLICIES[self.ckpt_policy].reckons_with_faults(self)

    @property
    def experts(self) -> tuple[int, int]:
        """K_snapshot and K_persist, or their initial values."""
        return experts_of(self)

    def validate(self) -> None:
        """Rejects options of snapshots that are not taken, or not in memory."""
        kind, whose = POLICIES.get(self.ckpt_policy or ""), owners()
        chosen = {*_CHOSEN_BY_AUTO, *(one.name for owner in POLICIES.values() for one in owner.flags if one.chosen)}
        asked = {kind}
        for spec in flags_of(type(self)):
            given, owner = getattr(self, spec.name) != spec.default, whose.get(spec.name)
            refuse(given and not self.ckpt_policy, f"{spec.spelling} needs --ckpt-policy: add it, for example full.")
            refuse(
                given and self.ckpt_policy == AUTO and spec.name in chosen,
                f"--ckpt-policy auto chooses {spec.spelling} by itself, beside training: drop it.",
            )
            refuse(
                given and self.ckpt_policy != AUTO and spec.name in _LIMITS_OF_AUTO,
                f"{spec.spelling} is for --ckpt-policy auto, not {self.ckpt_policy}: drop it or change the policy.",
            )
            refuse(
                given and owner and self.ckpt_policy != AUTO and owner is not kind,
                f"{spec.spelling} needs --ckpt-policy {owner and owner.name}, not {self.ckpt_policy}: drop it or "
                "change the policy.",
            )
            asked |= {owner} if given else set()
        # auto does not choose a policy that refuses the other flags; it is asked here if somebody has set it up
        for sentence in itertools.chain.from_iterable(one.refusals(self) for one in POLICIES.values() if one in asked):
            raise ConfigError(sentence)
        refuse(
            self.upstream_logging and not (kind and kind.replays),
            f"--upstream-logging needs --ckpt-policy {_REPLAYING}, not {self.ckpt_policy}: drop it or change the "
            "policy.",
        )
        refuse(
            self.upstream_log_limit != 8.0 and not self.upstream_logging,
            "--upstream-log-limit needs --upstream-logging: add it.",
        )
        refuse(
            self.mtbf_hours is not None and self.ckpt_policy != AUTO and not (kind and kind.reckons_with_faults(self)),
            "--mtbf-hours needs --pec-k auto, which reckons with it, or --ckpt-policy auto: add one of them.",
        )
        refuse(
            self.node_of_rank and self.ckpt_tier == "disk" and not self.upstream_logging,
            "--node-of-rank needs --ckpt-tier memory or peers, or --upstream-logging, since only memory belongs to a "
            "node: add one.",
        )
        refuse(
            self.persist_interval and self.ckpt_tier == "disk",
            "--persist-interval needs --ckpt-tier memory or peers, since every other snapshot is in --ckpt-dir anyway: "
            "drop it.",
        )
        for name in ("replicas", "replication_rate"):
            refuse(
                getattr(self, name) is not None and self.ckpt_tier != "peers",
                f"--{name.replace('_', '-')} needs --ckpt-tier peers, since no other copies to other nodes: add it.",
            )


def _field(one: PolicyFlag) -> tuple[str, object, dataclasses.Field]:
    kind = one.kind | None if one.default is None else one.kind
    facts: dict[str, Any] = dict(choices=one.choices, type=one.parse, metavar=one.metavar)
    limits: dict[str, Any] = dict(at_least=one.at_least, above=one.above, at_most=one.at_most)
    return one.name, kind, flag(one.default, one.help, **facts, **limits)


if TYPE_CHECKING:

    class SnapshotFlags(_EveryPolicy):
        """Also has the flags of all policies, which a type checker cannot see."""

        def __getattr__(self, name: str) -> Any: ...

else:
    SnapshotFlags = dataclasses.make_dataclass(
        "SnapshotFlags",
        [_field(one) for kind in POLICIES.values() for one in kind.flags],
        bases=(_EveryPolicy,),
        frozen=True,
        namespace={
            "__doc__": "Fault tolerance: snapshots of the training state, where they go, and how often.",
            "__module__": __name__,  # for pickling
        },
    )
