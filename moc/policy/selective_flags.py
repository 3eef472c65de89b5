"""Defines the flags of selective checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from moc.policy.errors import PolicyError
from moc.policy.expert_selection import RULES, SCORES
from moc.policy.flags import Asked, JobShape, PolicyFlag, gradient_obstacles

SURVIVORS = ("keep", "reload")

BOOST, BOOST_ITERATIONS = 0.1, 200
"""The fraction of section 6, if experts drop tokens; the paper has no limit of iterations."""

MLT_LIMIT = 0.03
"""Share of dropped tokens up to which MoEtion finds no loss of accuracy (section 4.1, Table 1)."""

HIDES = ("compute", "bubble")

FOLDS = ("peers", "recovery")

FLAGS = (
    PolicyFlag(
        "selective_experts",
        int,
        None,
        "Experts of each layer in a snapshot, in the mean over layers (S); by default as many as the budgets allow.",
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
        "Budget of what a node receives from others with --ckpt-tier peers, in GB per snapshot; by default what it "
        "receives during an iteration, as measured.",
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
        "Iterations after which an expert is saved first, whatever its score; by default 4 times as many as saving "
        "all experts in turn would take.",
        at_least=1,
    ),
    PolicyFlag(
        "selective_mlt_limit",
        float,
        MLT_LIMIT,
        "Largest proportion of lost tokens in the whole training: a warning says when the next fault would exceed it.",
        above=0.0,
        at_most=1.0,
    ),
    PolicyFlag(
        "selective_survivors",
        str,
        "reload",
        "Experts of surviving workers after the loss of another one: reloaded from snapshots like all others, or kept "
        "as they are. With keep, nobody goes back where survivors have all dense state.",
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
        "Who updates experts by the gradients that are saved in place of their state: peers, a process of each node, "
        "beside training, so that memory holds few of them and a recovery has little to do, for which it needs a core "
        "that training leaves free; or a recovery.",
        choices=FOLDS,
    ),
    PolicyFlag(
        "selective_hide",
        str,
        "compute",
        "What copies to host memory hide behind: forward and backward, or the pipeline's bubbles, beside which only "
        "what they have no time for is copied (MoEtion's Algorithm 4; not on CUDA).",
        choices=HIDES,
    ),
    PolicyFlag(
        "selective_boost",
        float,
        None,
        "Capacity that experts which lost tokens to a recovery have beyond that of others, as a fraction, out of what "
        "other experts of their rank leave unused, until the tokens are made up; 0 for none. By default 0.1 with "
        "--moe-expert-capacity-factor and without padding, where experts drop tokens, otherwise none.",
        at_least=0.0,
    ),
    PolicyFlag(
        "selective_boost_iterations",
        int,
        BOOST_ITERATIONS,
        "Iterations after a recovery in which experts make up lost tokens; what they still owe then is given up.",
        at_least=1,
    ),
)


def selective_refusals(asked: Asked) -> Iterator[PolicyError]:
    """Yields the refused combinations of these flags."""
    budgets = [name for name in ("local_gb", "remote_gb") if getattr(asked, f"selective_{name}") is not None]
    flags = " and ".join(f"--selective-{name.replace('_', '-')}" for name in budgets)
    if asked.selective_experts is not None and budgets:
        yield PolicyError(
            f"--selective-experts fixes the number of experts that {flags} would choose. Fix: drop one of them",
            code="flags-exclude-each-other",
        )
    if asked.selective_remote_gb is not None and asked.ckpt_tier != "peers":
        yield PolicyError(
            "--selective-remote-gb is a budget of copies to other nodes. Fix: add --ckpt-tier peers, or drop "
            "--selective-remote-gb",
            code="tier-lacks-flag",
        )
    if asked.selective_rule == "proportional" and asked.selective_max_age is not None:
        yield PolicyError(
            "--selective-max-age belongs to --selective-rule per-byte. Fix: drop one of them",
            code="flags-exclude-each-other",
        )
    if asked.selective_rule == "proportional" and asked.selective_score is not None:
        yield PolicyError(
            "--selective-score belongs to --selective-rule per-byte. Fix: drop one of them",
            code="flags-exclude-each-other",
        )
    if asked.selective_fold == "peers" and asked.selective_gradients == "off":
        yield PolicyError(
            "--selective-fold peers updates experts by the gradients that --selective-gradients off does not save. "
            "Fix: drop one of them",
            code="flags-exclude-each-other",
        )
    if asked.selective_boost == 0 and asked.selective_boost_iterations != BOOST_ITERATIONS:
        yield PolicyError(
            "--selective-boost-iterations has no effect with --selective-boost 0. Fix: drop one of them",
            code="flag-has-no-effect",
        )


def selective_misfits(asked: Asked, job: JobShape) -> Iterator[PolicyError]:
    """Yields requirements of these flags that the job does not meet."""
    if asked.selective_gradients == "on":
        yield from _obstacles(asked, job, "--selective-gradients on", "drop --selective-gradients")
    elif asked.selective_fold == "peers" and asked.selective_gradients is None:
        yield from _obstacles(asked, job, "--selective-fold peers", "drop --selective-fold")
    wanted = {"boost": asked.selective_boost, "boost-iterations": asked.selective_boost_iterations != BOOST_ITERATIONS}
    for name, wants in wanted.items():
        if wants and not job.drops_tokens:
            yield PolicyError(
                f"--selective-{name} needs --moe-expert-capacity-factor without --moe-pad-expert-input-to-capacity, "
                f"since otherwise no expert has tokens to make up. Fix: change that, or drop --selective-{name}",
                code="flag-needs-another",
            )
    if asked.selective_hide == "bubble" and job.pp == 1:
        yield PolicyError(
            "--selective-hide bubble copies while a pipeline's stage waits for others, and there is one stage. Fix: "
            "raise --pipeline-model-parallel-size, or drop --selective-hide",
            code="flag-needs-another",
        )
    if asked.selective_hide == "bubble" and not job.num_experts:
        yield PolicyError(
            "--selective-hide bubble chooses experts by the time of the pipeline's bubbles, and there are none. Fix: "
            "add --num-experts, or drop --selective-hide",
            code="flag-needs-another",
        )


def gradients_of(asked: Asked, job: JobShape) -> tuple[bool, str | None]:
    """Returns whether gradients are saved; if not, and no flag turns them off, also the reason."""
    if asked.selective_gradients == "off":
        return False, None
    why = next(_obstacles(asked, job, "--selective-gradients on"), None)
    return why is None, why and str(why)


def _obstacles(asked: Asked, job: JobShape, flag: str, alternative: str = "") -> Iterator[PolicyError]:
    yield from gradient_obstacles(asked, job, flag, alternative)
    if asked.snapshot_interval not in ("auto", "1"):
        instead = f", or {alternative}" if alternative else ""
        yield PolicyError(
            f"{flag} needs a snapshot in each iteration. Fix: set --snapshot-interval 1{instead}",
            code="snapshot-interval-fixed",
        )
