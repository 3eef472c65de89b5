"""Defines the flags and prices of selective checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from moc.policy.costs import (
    GRADIENTS_OFF,
    Machine,
    PolicyCosts,
    PolicySettings,
    Price,
    hidden_expert_counts,
    selective_candidates,
    selective_price,
)
from moc.policy.expert_selection import RULES, SCORES
from moc.policy.flags import (
    FlagConflict,
    FlagValues,
    JobRequirement,
    JobShape,
    PolicyFlag,
    PolicyFlags,
    gradient_requirements,
    unmet,
)

SURVIVORS = ("keep", "reload")

BOOST, BOOST_ITERATIONS = 0.1, 200
"""The fraction of section 6, if experts drop tokens; the paper has no limit of iterations."""

MLT_LIMIT = 0.03
"""Share of dropped tokens up to which MoEtion finds no loss of accuracy (section 4.1, Table 1)."""

HIDES = ("compute", "bubble")

FOLDS = ("peers", "recovery")


def _flags_of_budgets(flags: FlagValues) -> list[str]:
    names = ("bytes", "local_gb", "remote_gb")
    return [
        f"--selective-{name.replace('_', '-')}" for name in names if getattr(flags, f"selective_{name}") is not None
    ]


def _every_iteration(
    flag: str, alternative: str = "", applies: Callable[[FlagValues], bool] = lambda flags: True
) -> JobRequirement:
    instead = f", or {alternative}" if alternative else ""
    return JobRequirement(
        lambda flags, job: applies(flags) and flags.snapshot_interval not in ("auto", "1"),
        f"{flag} needs a snapshot in each iteration. Fix: set --snapshot-interval 1{instead}",
        code="snapshot-interval-fixed",
    )


def _requires_gradients(flags: FlagValues) -> bool:
    return flags.selective_gradients == "on"


def _requires_background_updates(flags: FlagValues) -> bool:
    return flags.selective_fold == "peers" and flags.selective_gradients is None


def _excludes(flag: str, other_flag: str) -> str:
    return f"{flag} has no effect with {other_flag}. Fix: drop one of them"


def _needs_capacity(name: str) -> str:
    return (
        f"--selective-{name} needs --moe-expert-capacity-factor without --moe-pad-expert-input-to-capacity: otherwise "
        f"no expert drops tokens. Fix: change these flags, or drop --selective-{name}"
    )


_GRADIENTS = "--selective-gradients on", "drop --selective-gradients", _requires_gradients
_FOLD = "--selective-fold peers", "drop --selective-fold", _requires_background_updates


FLAGS = (
    PolicyFlag(
        "selective_experts",
        int,
        None,
        "Experts of each layer in a snapshot, by state or by gradients, in the mean over layers (S); by default the "
        "most that the budgets allow.",
        at_least=1,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "selective_bytes",
        int,
        None,
        "Bytes of all experts in a snapshot, over all ranks; with gradients, more experts fit than by their states.",
        at_least=1,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "selective_local_gb",
        float,
        None,
        "Budget of a rank's copy to host memory, in GB per snapshot; by default what it copies during forward and "
        "backward, as measured.",
        above=0.0,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "selective_remote_gb",
        float,
        None,
        "Budget for the data that a node receives from others with --ckpt-tier peers, in GB per snapshot; by default "
        "the amount that it receives during an iteration, as measured.",
        above=0.0,
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "selective_rule",
        str,
        "per-byte",
        "Selection of experts: the highest scores of all layers that fit each rank and node, or MoEtion's Algorithm 1, "
        "which divides the budget among layers in proportion to their tokens at risk.",
        choices=RULES,
    ),
    PolicyFlag(
        "selective_score",
        str,
        None,
        "Score of an expert under the rule per-byte: tokens since it was last saved, or these times the iterations "
        "since then; by default the one that leaves the fewest tokens at risk: tokens where gradients are saved, "
        "otherwise tokens-age.",
        choices=SCORES,
    ),
    PolicyFlag(
        "selective_max_age",
        int,
        None,
        "Iterations after which an expert is saved first, whatever its score; by default 8 times the number that "
        "saving all experts in turn would take, or 4 times with gradients, whose chains take memory until then.",
        at_least=1,
    ),
    PolicyFlag(
        "selective_mlt_limit",
        float,
        MLT_LIMIT,
        "Limit of the proportion of lost tokens in the training; a warning follows if the next fault would exceed it.",
        above=0.0,
        at_most=1.0,
    ),
    PolicyFlag(
        "selective_survivors",
        str,
        "reload",
        "Experts of surviving workers after the loss of another one: reloaded from snapshots like all others, or kept "
        "as they are. With keep, no worker rolls back if survivors have all dense state. With --elastic, experts are "
        "always kept.",
        choices=SURVIVORS,
    ),
    PolicyFlag(
        "selective_gradients",
        str,
        None,
        "Save the reduced gradients of an expert instead of its state, a third of the bytes, while the snapshots in "
        "memory since its last full save have it without a gap; a recovery repeats the updates, to the bit. By default "
        "on where that is possible: with --ckpt-tier memory or peers, a snapshot in every iteration, and Adam.",
        choices=("on", "off"),
        chosen_by_auto=True,
    ),
    PolicyFlag(
        "selective_fold",
        str,
        "recovery",
        "Where the gradients that are saved in place of experts' state are applied. peers: in a background process of "
        "each node, so that memory holds few gradients and a recovery has little to do; it needs a core that training "
        "leaves free. recovery: in a recovery.",
        choices=FOLDS,
    ),
    PolicyFlag(
        "selective_hide",
        str,
        "compute",
        "Work that hides copies to host memory. compute: forward and backward. bubble: the pipeline's bubbles; only "
        "the rest is copied during forward and backward (MoEtion's Algorithm 4; not on CUDA).",
        choices=HIDES,
    ),
    PolicyFlag(
        "selective_boost",
        float,
        None,
        "Additional capacity, as a fraction, of experts that lost tokens to a recovery, until the tokens are "
        "compensated; 0 for none. It is taken from unused capacity of their rank. By default 0.1 with "
        "--moe-expert-capacity-factor and without padding, where experts drop tokens, otherwise none.",
        at_least=0.0,
    ),
    PolicyFlag(
        "selective_boost_iterations",
        int,
        BOOST_ITERATIONS,
        "Iterations after a recovery during which experts compensate lost tokens; the rest is given up.",
        at_least=1,
    ),
)


class SelectiveFlags(PolicyFlags):
    """Flags of selective checkpoints."""

    specs = FLAGS
    conflicts = (
        FlagConflict(
            lambda flags: flags.selective_experts is not None and bool(_flags_of_budgets(flags)),
            lambda flags: (
                f"--selective-experts sets the number of experts, which {' and '.join(_flags_of_budgets(flags))} would "
                "choose. Fix: drop one of them"
            ),
            code="flags-exclude-each-other",
        ),
        FlagConflict(
            lambda flags: flags.selective_bytes is not None and len(_flags_of_budgets(flags)) > 1,
            lambda flags: (
                f"--selective-bytes fixes the bytes that {' and '.join(_flags_of_budgets(flags)[1:])} would limit. "
                "Fix: drop one of them"
            ),
            code="flags-exclude-each-other",
        ),
        FlagConflict(
            lambda flags: flags.selective_remote_gb is not None and flags.ckpt_tier != "peers",
            "--selective-remote-gb is a budget of copies to other nodes. Fix: add --ckpt-tier peers, or drop "
            "--selective-remote-gb",
            code="tier-lacks-flag",
        ),
        FlagConflict(
            lambda flags: flags.selective_rule == "proportional" and flags.selective_max_age is not None,
            _excludes("--selective-max-age", "--selective-rule proportional"),
            code="flags-exclude-each-other",
        ),
        FlagConflict(
            lambda flags: flags.selective_rule == "proportional" and flags.selective_score is not None,
            _excludes("--selective-score", "--selective-rule proportional"),
            code="flags-exclude-each-other",
        ),
        FlagConflict(
            lambda flags: flags.selective_fold == "peers" and flags.selective_gradients == "off",
            "--selective-fold peers applies the gradients that --selective-gradients off does not save. Fix: drop one "
            "of them",
            code="flags-exclude-each-other",
        ),
        FlagConflict(
            lambda flags: flags.selective_boost == 0 and flags.selective_boost_iterations != BOOST_ITERATIONS,
            _excludes("--selective-boost-iterations", "--selective-boost 0"),
            code="flag-has-no-effect",
        ),
    )
    requirements = (
        *gradient_requirements(*_GRADIENTS),
        _every_iteration(*_GRADIENTS),
        *gradient_requirements(*_FOLD),
        _every_iteration(*_FOLD),
        JobRequirement(
            lambda flags, job: bool(flags.selective_boost) and not job.drops_tokens,
            _needs_capacity("boost"),
            code="flag-needs-another",
        ),
        JobRequirement(
            lambda flags, job: flags.selective_boost_iterations != BOOST_ITERATIONS and not job.drops_tokens,
            _needs_capacity("boost-iterations"),
            code="flag-needs-another",
        ),
        JobRequirement(
            lambda flags, job: flags.selective_hide == "bubble" and job.pp == 1,
            "--selective-hide bubble copies while a pipeline stage waits for others, and there is one stage. Fix: "
            "raise --pipeline-model-parallel-size, or drop --selective-hide",
            code="flag-needs-another",
        ),
        JobRequirement(
            lambda flags, job: flags.selective_hide == "bubble" and not job.num_experts,
            "--selective-hide bubble chooses experts by the time of the pipeline's bubbles, and the model has none. "
            "Fix: add --num-experts, or drop --selective-hide",
            code="flag-needs-another",
        ),
    )

    def max_lost_tokens(self, flags: FlagValues) -> float:
        return flags.selective_mlt_limit

    def may_save_gradients(self, flags: FlagValues, job: JobShape) -> bool:
        return gradients_of(flags, job)[0]

    def settings(self, flags: FlagValues, job: JobShape) -> dict[str, Any]:
        gradients, reason = gradients_of(flags, job)
        settings = {"tier": flags.ckpt_tier, "gradients": gradients, "no_gradients": reason}
        settings["bubble_share"] = job.bubble_share
        by_bytes = gradients and flags.selective_experts is None
        settings["score"] = flags.selective_score or ("tokens" if by_bytes else "tokens-age")
        if flags.selective_boost is None:
            settings["boost"] = BOOST if job.drops_tokens else 0.0
        return settings


def gradients_of(flags: FlagValues, job: JobShape) -> tuple[bool, str | None]:
    """Returns whether gradients are saved; if not, and no flag turns them off, also the reason."""
    if flags.selective_gradients == "off":
        return False, None
    flag = "--selective-gradients on"
    error = next(unmet((*gradient_requirements(flag), _every_iteration(flag)), flags, job), None)
    return error is None, error and str(error)


class SelectiveCosts(PolicyCosts):
    """Every number of experts whose copy hides, and its price."""

    def candidates(self, machine: Machine) -> Iterator[PolicySettings]:
        """As :meth:`PolicyCosts.candidates`; one number of experts if no copy hides.

        Budgets would choose the maximum; with fewer experts, snapshots may be more frequent.
        """
        return selective_candidates(machine)

    def price(self, machine: Machine, settings: PolicySettings) -> Price:
        """As :meth:`PolicyCosts.price`; by default with the most experts of :meth:`candidates`."""
        if not machine.num_experts:
            return Price(machine.full_snapshot)
        by_bytes = settings.get("bytes")
        if by_bytes is not None:
            k = max(1, min(machine.num_experts, round(by_bytes / machine.expert_bytes)))
        else:
            k = settings.get("experts") or max(hidden_expert_counts(machine))
        has_fixed_number = "experts" in settings  # each expert costs at most its state
        return selective_price(machine, k, settings.get("gradients") != GRADIENTS_OFF and not has_fixed_number)

    def describe(self, settings: PolicySettings) -> str:
        suffix = ", states only" if settings.get("gradients") == GRADIENTS_OFF else ""
        if "bytes" in settings:
            return f"{settings['bytes'] / 1e9:.3g} GB of experts{suffix}"
        return f"{settings['experts']} experts{suffix}" if "experts" in settings else ""
