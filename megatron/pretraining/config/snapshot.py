"""Defines the flags of snapshots, of recovery from them, and of fault injection."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.pretraining.config.flag import UNKNOWN, FlagGroup, Problems, dashed, flag, flags_of
from moc.fault_points import POINTS
from moc.policy import AUTO, POLICIES, PolicyFlag, RegisteredPolicy, parse_interval, policy_by_flag
from moc.policy.errors import PolicyError, policy_refusal
from moc.policy.interval import UNDISTURBED_MTBF_S
from moc.runtime.fault_injection import ACTIONS, Fault, parse_faults, random_faults
from moc.session.settings import TIERS, node_names
from moc.sharding import parse_scheme

_CHOSEN_BY_AUTO = ("ckpt_blocking", "persist_interval", "snapshot_interval")
"""Flags chosen by ``--ckpt-policy auto``, besides the settings of policies."""

_LIMITS_OF_AUTO = ("exact_only", "host_memory_gb")


_REPLAYING = " or ".join(sorted(name for name, entry in POLICIES.items() if entry.can_replay))


@dataclass(frozen=True)
class _EveryPolicy(FlagGroup):
    """The flags common to all policies."""

    ckpt_policy: str | None = flag(
        None,
        "Policy for the content and the iterations of snapshots; by default there are none. A run resumes from the "
        "newest snapshot in --ckpt-dir. auto chooses policy, interval, K, window and replicas by expected cost, from "
        "measurements.",
        choices=[AUTO, *sorted(POLICIES)],
    )
    ckpt_tier: str = flag(
        "disk",
        "Where snapshots are kept. disk: in --ckpt-dir. memory: in the memory of their node, which survives a restart "
        "on the same machines. peers: also in the memory of other nodes, which survives the loss of nodes (Gemini).",
        choices=TIERS,
    )
    ckpt_dir: str | None = flag(
        None, "Directory or URL (s3://...) of snapshots; by default SAVE/snapshots.", metavar="DIR"
    )
    ckpt_memory_dir: str = flag(
        "/dev/shm", "Memory file system for --ckpt-tier memory or peers, and for --upstream-logging.", metavar="DIR"
    )
    ckpt_blocking: bool = flag(
        False, "Stop training until a snapshot is complete, instead of saving in the background."
    )
    max_snapshot_lag: int | None = flag(
        None,
        "Iterations that training may complete while a snapshot is not safe; then it waits. By default only buffers "
        "limit them. The number of unpublished snapshots never exceeds the number of buffers + 2, at any storage "
        "speed: with --ckpt-tier disk (2 buffers) training waits, with memory or peers newer ones skip --ckpt-dir. "
        "With 1 and --ckpt-policy sparse, recovery replays at most two windows.",
        limits=">= 1",
    )
    ckpt_keep: int = flag(2, "Complete snapshots (sparse: windows) to keep in --ckpt-dir.", limits=">= 1")
    digest_interval: int = flag(
        1,
        "Iterations between digests of the training state; 0 for none. Every recovery verifies the restored state with "
        "them. A digest reads the state once. Checkpoints of --save have digests unless it is 0.",
        limits=">= 0",
    )
    ckpt_sharding: str = flag(
        "EE+AN",
        "Which of the ranks that hold the same state saves it: a scheme, or two rules EXPERTS,OTHERS "
        "(docs/explanation/sharding.md).",
        type=lambda text: (parse_scheme(text), text)[1],
        metavar="SCHEME",
    )
    ckpt_overhead_budget: float = flag(
        0.03, "Fraction of training time that --snapshot-interval auto may cost.", limits="> 0.0, < 1.0"
    )
    snapshot_interval: str = flag(
        "auto",
        "Iterations between snapshots; auto: as often as --ckpt-overhead-budget allows (CheckFreq).",
        type=lambda text: (parse_interval(str(text)), str(text))[1],
        metavar="N|auto",
    )
    persist_interval: int | None = flag(
        None,
        "With --ckpt-tier memory or peers: iterations between snapshots (sparse: windows) that are also written to "
        "--ckpt-dir; by default only a run's last one.",
        limits=">= 1",
    )
    replicas: int | None = flag(
        None,
        "With --ckpt-tier peers: copies of each node's snapshots on other nodes; by default 2, if there are as many.",
        limits=">= 1",
    )
    replication_rate: float | None = flag(
        None, "With --ckpt-tier peers: maximum GB/s for a node's copies of other nodes' snapshots.", limits="> 0.0"
    )

    mtbf_hours: float | None = flag(
        None,
        "Mean hours between failures of the job, for choices by expected cost; by default 24, or with --ckpt-policy "
        "auto as measured. With --elastic, also for the placement of experts, by default 1.",
        limits="> 0.0",
    )
    exact_only: bool = flag(False, "With --ckpt-policy auto: only policies whose recovery is exact.")
    host_memory_gb: float | None = flag(
        None, "With --ckpt-policy auto: maximum GB of a node's memory for snapshots.", limits="> 0.0"
    )
    node_of_rank: str | None = flag(
        None,
        "Node of each worker, in place of the host names: with 0,0,1,1, four workers on one machine are two nodes with "
        "separate memory.",
        metavar="NODE,NODE,...",
        type=lambda text: (node_names(str(text)), str(text))[1],
    )

    upstream_logging: bool = flag(
        False,
        "With --ckpt-policy sparse and a pipeline: log the data that each stage sends in its node's memory, so that "
        "one stage can be replayed without the others.",
    )
    upstream_log_limit: float = flag(
        8.0,
        "With --upstream-logging: maximum GB of a worker's logs; the oldest iterations are dropped first.",
        limits="> 0.0",
    )

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures, until they are measured."""
        return UNDISTURBED_MTBF_S if self.mtbf_hours is None else 3600.0 * self.mtbf_hours

    @property
    def is_chosen(self) -> bool:
        """Whether the policy, or only its settings, are chosen from measurements."""
        kind = POLICIES.get(self.ckpt_policy or "")
        return self.ckpt_policy == AUTO or kind is not None and kind.flags.chooses_settings(self)

    @property
    def experts(self) -> tuple[int, int]:
        """K_snapshot and K_persist, or their initial values."""
        return next(filter(None, (entry.flags.experts_per_layer(self) for entry in POLICIES.values())), (1, 1))

    def validate(self, problems: Problems) -> None:
        """Rejects options of snapshots that are not taken, or not in memory."""
        problems.check(self._validate_policy, problems)
        if vars(self).get("ckpt_policy", UNKNOWN) is not None:
            problems.check(self._validate_upstream_logs, problems)
            problems.check(self._validate_tier, problems)

    def _validate_policy(self, problems: Problems) -> None:
        kind, owner_of_flag = POLICIES.get(self.ckpt_policy or ""), policy_by_flag()
        chosen = {
            *_CHOSEN_BY_AUTO,
            *(spec.name for entry in POLICIES.values() for spec in entry.flags.specs if spec.chosen_by_auto),
        }
        active = {kind}
        explicit = [spec for spec in flags_of(type(self)) if vars(self).get(spec.name, spec.default) != spec.default]
        if not self.ckpt_policy:
            owner = next((owner_of_flag[spec.name].name for spec in explicit if spec.name in owner_of_flag), "full")
            example = _REPLAYING if any(spec.name.startswith("upstream") for spec in explicit) else owner
            spellings = [spec.spelling for spec in explicit if spec.name != "digest_interval"]  # which --save uses, too
            problems.refuse_without(spellings, f"--ckpt-policy, such as {example}")
            return
        for spec in explicit:
            owner = owner_of_flag.get(spec.name)
            problems.refuse(
                self.ckpt_policy == AUTO and spec.name in chosen,
                f"--ckpt-policy auto chooses {spec.spelling} during training. Fix: drop it",
                code="flag-chosen-by-auto",
            )
            problems.refuse(
                self.ckpt_policy != AUTO and spec.name in _LIMITS_OF_AUTO,
                f"{spec.spelling} is for --ckpt-policy auto, not {self.ckpt_policy}. Fix: drop it or change the policy",
                code="policy-lacks-flag",
            )
            if owner is None:
                continue
            foreign = problems.refuse(
                self.ckpt_policy != AUTO and owner is not kind,
                f"{spec.spelling} needs --ckpt-policy {owner.name}, not {self.ckpt_policy}. Fix: drop it, or choose "
                f"--ckpt-policy {owner.name}",
                code="policy-lacks-flag",
            )
            active |= set() if foreign else {owner}
        # auto does not choose a policy that refuses the other flags; policies with given flags are checked here
        for policy in POLICIES.values():
            if policy in active:
                problems.check(self._check_conflicts, policy, problems)

    def _check_conflicts(self, kind: RegisteredPolicy, problems: Problems) -> None:
        for conflict in itertools.islice(kind.flags.conflicts_in(self), 1):  # others may follow from the first one
            refuse_by(kind, conflict, problems)

    def _validate_upstream_logs(self, problems: Problems) -> None:
        problems.refuse(
            self.upstream_log_limit != 8.0 and not self.upstream_logging,
            "--upstream-log-limit needs --upstream-logging. Fix: add it",
            code="flag-needs-another",
        )
        kind = POLICIES.get(self.ckpt_policy or "")
        problems.refuse(
            self.upstream_logging and not (kind is not None and kind.can_replay),
            f"--upstream-logging needs --ckpt-policy {_REPLAYING}, not {self.ckpt_policy}. Fix: drop it, or choose "
            f"--ckpt-policy {_REPLAYING}",
            code="policy-lacks-flag",
        )

    def _validate_tier(self, problems: Problems) -> None:
        problems.refuse(
            self.node_of_rank and self.ckpt_tier == "disk" and not self.upstream_logging,
            "--node-of-rank needs --ckpt-tier memory or peers, or --upstream-logging, since only memory belongs to a "
            "node. Fix: add one, or drop --node-of-rank",
            code="tier-lacks-flag",
        )
        problems.refuse(
            self.persist_interval and self.ckpt_tier == "disk",
            "--persist-interval needs --ckpt-tier memory or peers, since every other snapshot is in --ckpt-dir anyway. "
            "Fix: drop it",
            code="tier-lacks-flag",
        )
        for name in ("replicas", "replication_rate"):
            problems.refuse(
                getattr(self, name) is not None and self.ckpt_tier != "peers",
                f"{dashed(name)} needs --ckpt-tier peers, since no other copies to other nodes. Fix: add it, or drop "
                f"{dashed(name)}",
                code="tier-lacks-flag",
            )


def _field(spec: PolicyFlag) -> tuple[str, object, dataclasses.Field]:
    kind = spec.value_type | None if spec.default is None else spec.value_type
    signs = (">=", spec.at_least), (">", spec.above), ("<=", spec.at_most)
    limits = ", ".join(f"{sign} {limit}" for sign, limit in signs if limit is not None)
    facts: dict[str, Any] = dict(choices=spec.choices, type=spec.parse, metavar=spec.metavar, limits=limits)
    return spec.name, kind, flag(spec.default, spec.help, **facts)


if TYPE_CHECKING:

    class SnapshotFlags(_EveryPolicy):
        """Adds the flags of all policies, which a type checker cannot see."""

        def __getattr__(self, name: str) -> Any: ...

else:
    SnapshotFlags = dataclasses.make_dataclass(
        "SnapshotFlags",
        [_field(spec) for kind in POLICIES.values() for spec in kind.flags.specs],
        bases=(_EveryPolicy,),
        frozen=True,
        namespace={
            "__doc__": "Fault tolerance: snapshots of the training state, where they go, and how often.",
            "__module__": __name__,  # for pickling
        },
    )


def refuse_by(kind: RegisteredPolicy, conflict: str | PolicyError, problems: Problems) -> None:
    """Adds a policy's refusal to the problems."""
    error = conflict if isinstance(conflict, PolicyError) else policy_refusal(kind.name, conflict)
    problems.refuse(True, str(error), code=error.code)


def _parse_fault_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    return tuple(str(fault) for text in texts for fault in parse_faults(text))


@dataclass(frozen=True)
class FaultFlags(FlagGroup):
    """Injected faults, to test recoveries."""

    inject: tuple[str, ...] | None = flag(
        None,
        f"""Faults such as "kill rank=2 iteration=40 point=after_commit"; several are separate words, or separated by
        semicolons. First the action: {"; ".join(f"{name}, {text}" for name, text in ACTIONS.items())}.
        Then its target: rank=N, ranks=N,N or node=N; the first iteration: iteration=N; the number of times: times=N
        (default 1); and the point (default start): point=NAME:
        {"; ".join(f"{name}, {text}" for name, text in POINTS.items())}. Each happens once in a job, restarts
        included.""",
        type=_parse_fault_texts,
        nargs="+",
        metavar="FAULT",
    )
    inject_mtbf_iterations: float | None = flag(
        None, "Mean iterations between random faults; each kills one to three workers at a random point.", limits=">= 1"
    )
    inject_seed: int = flag(0, "Random seed of --inject-mtbf-iterations.")

    def planned(self, size: int, iterations: int) -> tuple[Fault, ...]:
        """Returns all faults of a job with this many workers and iterations."""
        planned = parse_faults(";".join(self.inject or ()))
        if self.inject_mtbf_iterations is None:
            return planned
        return planned + random_faults(self.inject_mtbf_iterations, self.inject_seed, size, iterations)

    @property
    def is_enabled(self) -> bool:
        """Whether any fault is configured."""
        return bool(self.inject) or self.inject_mtbf_iterations is not None

    def validate(self, problems: Problems) -> None:
        """Rejects a seed without random faults."""
        self.needs(problems, "inject_seed", "inject_mtbf_iterations")
