"""Snapshots of the training state, from which a run goes on after a failure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import Group, flag, flags_of, refuse
from moc.policy import POLICIES, interval_named
from moc.sharding import scheme_named


@dataclass(frozen=True)
class Snapshot(Group):
    """Fault tolerance: snapshots of the training state, where they go, and how often."""

    ckpt_policy: str | None = flag(
        None,
        "What is in a snapshot and when one is taken; a run that finds snapshots in --ckpt-dir goes on from the "
        "newest. Without a policy there are none.",
        choices=sorted(POLICIES),
    )
    ckpt_tier: str = flag(
        "disk",
        "Where a snapshot is safe: in --ckpt-dir, or in the memory of its node, from where a job that is started again "
        "on the same machines goes on in seconds.",
        choices=("disk", "memory"),
    )
    ckpt_dir: str | None = flag(
        None, "Directory or URL (s3://...) of the snapshots; by default SAVE/snapshots.", metavar="DIR"
    )
    ckpt_memory_dir: str = flag("/dev/shm", "Memory file system for --ckpt-tier memory.", metavar="DIR")
    ckpt_blocking: bool = flag(False, "Let training wait until a snapshot is safe, in place of taking it beside it.")
    ckpt_keep: int = flag(2, "Complete snapshots to keep in --ckpt-dir.", at_least=1)
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
        "With --ckpt-tier memory: iterations between snapshots that are also written to --ckpt-dir; without it, only "
        "the last one of a run is.",
        at_least=1,
    )

    pec_k: int = flag(1, "With --ckpt-policy pec: experts of each layer in a snapshot (K_pec).", at_least=1)
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

    def validate(self) -> None:
        """Refuses details of snapshots that are not taken, or not in memory."""
        for spec in flags_of(type(self)):
            given = getattr(self, spec.name) != spec.default
            refuse(given and not self.ckpt_policy, f"{spec.spelling} needs --ckpt-policy: add it, for example full.")
            owner = spec.name.split("_")[0]  # --pec-k belongs to the policy pec
            refuse(
                given and owner in POLICIES and owner != self.ckpt_policy,
                f"{spec.spelling} needs --ckpt-policy {owner}, not {self.ckpt_policy}: drop it or change the policy.",
            )
        refuse(
            (self.pec_k_snapshot or self.pec_k) < (self.pec_k_persist or self.pec_k),
            f"--pec-k-persist {self.pec_k_persist or self.pec_k} is more than the {self.pec_k_snapshot or self.pec_k} "
            "experts that are in a snapshot: lower it, or raise --pec-k-snapshot.",
        )
        refuse(
            self.pec_plt_limit != 0.0375 and not self.pec_dynamic_k,
            "--pec-plt-limit needs --pec-dynamic-k, which acts on it: add it.",
        )
        refuse(
            self.persist_interval and self.ckpt_tier != "memory",
            "--persist-interval needs --ckpt-tier memory, since every other snapshot is in --ckpt-dir anyway: drop it.",
        )
