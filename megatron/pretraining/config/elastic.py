"""Defines the flags of elastic training (Lazarus)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, Problems, flag, flags_of
from moc.elastic.allocation import MAX_DOMAIN_RANKS


def parse_everywhere(text: object) -> str:
    """Accepts ``auto``, or a number of slots as written."""
    word = str(text)
    if word != "auto" and not word.isdecimal():
        raise ValueError("it is a number of slots or the word auto")
    return word


@dataclass(frozen=True)
class ElasticFlags(FlagGroup):
    """Elastic training (Lazarus): replicas of experts by load, and any number of workers."""

    elastic: bool = flag(
        False,
        "Place each expert on as many workers as its load asks for, and deal micro batches so that results do not "
        "depend on the number of workers; needs --calculate-per-token-loss and --global-batch-size.",
    )
    elastic_slots: int | None = flag(
        None, "Experts of each MoE layer that a worker has room for; needed with --elastic.", limits=">= 1"
    )
    elastic_min_replicas: int = flag(
        2,
        "Minimum number of workers that hold each expert, if slots suffice: a loss of fewer workers loses no expert.",
        limits=">= 1",
    )
    elastic_everywhere: str = flag(
        "auto",
        "Slots of each worker for the hottest experts, which every worker holds; auto weighs balance against survival.",
        type=parse_everywhere,
        metavar="auto|H",
    )
    elastic_rebalance_interval: int = flag(
        200, "Iterations between checks whether other replicas would save time; 0 for no checks.", limits=">= 0"
    )
    elastic_dispatch: str = flag(
        "level",
        "Distribution of tokens. level: all workers get equally many. even: replicas of an expert get equally many.",
        choices=("level", "even"),
    )
    elastic_domain: int = flag(
        MAX_DOMAIN_RANKS,
        "Maximum number of workers of a pipeline stage that dispatch tokens to one another. More workers form domains; "
        "each domain has all experts and counts its tokens separately.",
        limits=">= 1",
    )

    def validate(self, problems: Problems) -> None:
        """Rejects flags without ``--elastic``, and ``--elastic`` without slots."""
        if self.elastic:
            self.needs(problems, "elastic", "elastic_slots")
            return
        changed = (
            spec.spelling for spec in flags_of(ElasticFlags) if vars(self).get(spec.name, spec.default) != spec.default
        )
        problems.refuse_without(tuple(changed), "--elastic")

    @property
    def everywhere(self) -> int | None:
        """Slots for the hottest experts; None if they are chosen automatically."""
        return None if self.elastic_everywhere == "auto" else int(self.elastic_everywhere)
