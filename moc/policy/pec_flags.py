"""Defines the flags of partial experts checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from moc.policy.dynamic_k import PLT_LIMIT
from moc.policy.errors import PolicyError
from moc.policy.flags import Asked, PolicyFlag, number_or_auto
from moc.policy.registry import AUTO
from moc.state.detail import Detail

NOT_CHOSEN = {"weights": Detail.MOMENTS, "optimizer": Detail.MASTER, "both": None}
"""Detail of the other experts by target: moments with ``weights``, master weights with ``optimizer``."""

SELECTIONS = ("sequential", "load_aware")

FLAGS = (
    PolicyFlag(
        "pec_k",
        str,
        "1",
        "With --ckpt-policy pec: experts of each layer in a snapshot (K_pec); auto chooses the numbers for memory and "
        "storage from measurements, and with --snapshot-interval auto also the interval.",
        parse=number_or_auto,
        metavar="K|auto",
        chosen=True,
    ),
    PolicyFlag(
        "pec_k_snapshot",
        int,
        None,
        "Experts of each layer in a snapshot in memory, if not --pec-k.",
        at_least=1,
        chosen=True,
    ),
    PolicyFlag(
        "pec_k_persist",
        int,
        None,
        "Experts of each layer that are also written to --ckpt-dir, if not --pec-k.",
        at_least=1,
        chosen=True,
    ),
    PolicyFlag(
        "pec_selection",
        str,
        "sequential",
        "Which experts are saved: in turn, or those with the most tokens since their last save.",
        choices=SELECTIONS,
    ),
    PolicyFlag(
        "pec_target",
        str,
        "both",
        "What is saved of the chosen experts only: their weights, their optimizer state, or both; the rest is saved of "
        "all experts.",
        choices=tuple(NOT_CHOSEN),
    ),
    PolicyFlag("pec_dynamic_k", bool, False, "Double K when faults have used up their share of --pec-plt-limit."),
    PolicyFlag(
        "pec_plt_limit",
        float,
        PLT_LIMIT,
        "Largest proportion of lost tokens (MoC-System's PLT).",
        above=0.0,
        at_most=1.0,
        needs="pec_dynamic_k",
    ),
)


def chooses(asked: Asked) -> bool:
    """Returns whether the numbers of experts are chosen from measurements."""
    return asked.pec_k == "auto"


def experts_of(asked: Asked) -> tuple[int, int]:
    """Returns K_snapshot and K_persist by the flags, or their initial values under ``auto``."""
    k = 1 if chooses(asked) else int(asked.pec_k)
    return asked.pec_k_snapshot or k, asked.pec_k_persist or k


def refusals(asked: Asked) -> Iterator[PolicyError]:
    """Yields the refused combinations of these flags."""
    if chooses(asked) and (asked.pec_k_snapshot or asked.pec_k_persist or asked.persist_interval):
        yield PolicyError(
            "--pec-k auto chooses how many experts go where, and when. Fix: drop --pec-k-snapshot, --pec-k-persist and "
            "--persist-interval",
            code="flag-chosen-by-auto",
        )
    in_snapshot, to_storage = experts_of(asked)
    if in_snapshot < to_storage:
        yield PolicyError(
            f"--pec-k-persist {to_storage} is more than the {in_snapshot} experts that are in a snapshot. Fix: lower "
            f"it to {in_snapshot}, or raise --pec-k-snapshot to {to_storage}",
            code="flag-exceeds-another",
        )
    if in_snapshot != to_storage and asked.ckpt_tier == "disk":
        yield PolicyError(
            f"of the {in_snapshot} experts in a snapshot, {to_storage} would go on to --ckpt-dir, but with "
            "--ckpt-tier disk all of them are there. Fix: drop --pec-k-snapshot and --pec-k-persist, or choose "
            "--ckpt-tier memory or peers",
            code="tier-lacks-flag",
        )
    if asked.pec_dynamic_k and asked.pec_target == "optimizer":
        yield PolicyError(
            "--pec-dynamic-k goes by tokens that weights have lost, and with --pec-target optimizer all weights "
            "are saved, so it would never act. Fix: drop one of them",
            code="flag-has-no-effect",
        )
    acts = asked.pec_dynamic_k or chooses(asked) or asked.ckpt_policy == AUTO
    if asked.pec_plt_limit != PLT_LIMIT and not acts:
        yield PolicyError(
            "--pec-plt-limit needs --pec-dynamic-k or --pec-k auto, which act on it, or --ckpt-policy auto. Fix: add "
            "one of them",
            code="flag-needs-another",
        )
