"""Snapshots of the training state, from which a run goes on after a failure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import Group, flag, flags_of, refuse
from moc.policy import POLICIES, interval_named
from moc.policy.measurements import UNDISTURBED_MTBF_S
from moc.sharding import scheme_named

AUTO = "auto"
"""In place of a policy: one is chosen, with its settings, by what is measured."""

CHOSEN_BY_AUTO = (
    "ckpt_blocking",
    "pec_k",
    "pec_k_snapshot",
    "pec_k_persist",
    "persist_interval",
    "snapshot_interval",
    "sparse_window",
)
"""Flags whose values ``--ckpt-policy auto`` chooses."""

_LIMITS_OF_AUTO = ("exact_only", "host_memory_gb")


def _number_or_auto(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"take auto or a number of at least 1, not {text}")
    return text


def _nodes(text: str) -> str:
    names = text.split(",")
    if not all(name.isalnum() for name in names):  # they become part of a directory's name
        raise ValueError(f"nodes are called by letters and digits, such as 0,0,1,1, not {text}")
    return text


@dataclass(frozen=True)
class Snapshot(Group):
    """Fault tolerance: snapshots of the training state, where they go, and how often."""

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
        "EXPERTS,OTHERS (docs/sharding.md).",
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

    pec_k: str = flag(
        "1",
        "With --ckpt-policy pec: experts of each layer in a snapshot (K_pec); auto chooses, from what is measured, how "
        "many are in a snapshot, how many go on to storage, and with --snapshot-interval auto also how often.",
        type=lambda text: _number_or_auto(str(text)),
        metavar="K|auto",
    )
    pec_k_snapshot: int | None = flag(
        None, "Experts of each layer in a snapshot in memory, where that differs from --pec-k.", at_least=1
    )
    pec_k_persist: int | None = flag(
        None, "Those of them that go on to --ckpt-dir, where that differs from --pec-k.", at_least=1
    )
    pec_selection: str = flag(
        "sequential",
        "Which experts: in turn, or those with the most tokens since they were saved last.",
        choices=("sequential", "load_aware"),
    )
    pec_target: str = flag(
        "both",
        "What of chosen experts alone is saved: their weights (and the moments of all), their optimizer state (and the "
        "weights of all), or both.",
        choices=("weights", "optimizer", "both"),
    )
    pec_dynamic_k: bool = flag(False, "Double K when faults have cost its share of --pec-plt-limit.")
    pec_plt_limit: float = flag(
        0.0375, "Proportion of tokens that experts may lose (MoC-System's PLT).", above=0.0, at_most=1.0
    )

    sparse_window: str = flag(
        "auto",
        "With --ckpt-policy sparse: iterations, at most, over which the operators of the model are spread; auto takes "
        "as few as let each snapshot be copied beside an iteration.",
        type=lambda text: _number_or_auto(str(text)),
        metavar="N|auto",
    )
    sparse_order: str = flag(
        "popularity",
        "By what experts are sorted in such a window, the first ones being saved first: tokens since training began; "
        "the same of gating probabilities; tokens of late; tokens for each one's capacity; their numbers.",
        choices=("popularity", "soft", "decayed", "capacity", "index"),
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
        """Seconds from one failure to the next, where nothing measures them."""
        return UNDISTURBED_MTBF_S if self.mtbf_hours is None else 3600.0 * self.mtbf_hours

    @property
    def chooses_experts(self) -> bool:
        """Whether the numbers of experts follow from what is measured."""
        return self.pec_k == "auto"

    @property
    def experts(self) -> tuple[int, int]:
        """K_snapshot and K_persist, or what they begin with."""
        k = 1 if self.chooses_experts else int(self.pec_k)
        return self.pec_k_snapshot or k, self.pec_k_persist or k

    def validate(self) -> None:
        """Refuses details of snapshots that are not taken, or not in memory."""
        for spec in flags_of(type(self)):
            given = getattr(self, spec.name) != spec.default
            refuse(given and not self.ckpt_policy, f"{spec.spelling} needs --ckpt-policy: add it, for example full.")
            owner = spec.name.split("_")[0]  # --pec-k belongs to the policy pec
            refuse(
                given and self.ckpt_policy == AUTO and spec.name in CHOSEN_BY_AUTO,
                f"--ckpt-policy auto chooses {spec.spelling} by itself, beside training: drop it.",
            )
            refuse(
                given and self.ckpt_policy != AUTO and spec.name in _LIMITS_OF_AUTO,
                f"{spec.spelling} is for --ckpt-policy auto, not {self.ckpt_policy}: drop it or change the policy.",
            )
            refuse(
                given and owner in POLICIES and self.ckpt_policy not in (owner, AUTO),
                f"{spec.spelling} needs --ckpt-policy {owner}, not {self.ckpt_policy}: drop it or change the policy.",
            )
        refuse(
            self.ckpt_policy == "sparse" and self.snapshot_interval not in ("auto", "1"),
            f"--ckpt-policy sparse takes a snapshot in every iteration, not in every {self.snapshot_interval}th: drop "
            "--snapshot-interval.",
        )
        refuse(
            self.upstream_logging and self.ckpt_policy != "sparse",
            f"--upstream-logging needs --ckpt-policy sparse, not {self.ckpt_policy}: drop it or change the policy.",
        )
        refuse(
            self.upstream_log_limit != 8.0 and not self.upstream_logging,
            "--upstream-log-limit needs --upstream-logging: add it.",
        )
        refuse(
            self.chooses_experts and (self.pec_k_snapshot or self.pec_k_persist or self.persist_interval),
            "--pec-k auto chooses how many experts go where, and when: drop --pec-k-snapshot, --pec-k-persist and "
            "--persist-interval.",
        )
        in_snapshot, to_storage = self.experts
        refuse(
            in_snapshot < to_storage,
            f"--pec-k-persist {to_storage} is more than the {in_snapshot} experts that are in a snapshot: lower it, or "
            "raise --pec-k-snapshot.",
        )
        refuse(
            in_snapshot != to_storage and self.ckpt_tier == "disk",
            f"of the {in_snapshot} experts in a snapshot, {to_storage} would go on to --ckpt-dir, but with --ckpt-tier "
            "disk all of them are there: choose --ckpt-tier memory or peers, or --pec-k alone.",
        )
        refuse(
            self.pec_dynamic_k and self.pec_target == "optimizer",
            "--pec-dynamic-k goes by tokens that weights have lost, and with --pec-target optimizer all weights are "
            "saved, so it would never act: drop one of them.",
        )
        chooses = self.chooses_experts or self.ckpt_policy == AUTO
        refuse(
            self.pec_plt_limit != 0.0375 and not (self.pec_dynamic_k or chooses),
            "--pec-plt-limit needs --pec-dynamic-k or --pec-k auto, which act on it, or --ckpt-policy auto: add one of "
            "them.",
        )
        refuse(
            self.mtbf_hours is not None and not chooses,
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
