"""The flags of selective checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from moc.policy.flags import Asked, JobShape, PolicyFlag
from moc.policy.selection import RULES, SCORES

HIDES = ("compute", "bubble")

FLAGS = (
    PolicyFlag(
        "selective_experts",
        int,
        None,
        "Experts of each layer in a snapshot, in the mean over layers (S); by default as many as the budgets allow.",
        at_least=1,
        chosen=True,
    ),
    PolicyFlag(
        "selective_local_gb",
        float,
        None,
        "Budget of a rank's copy to host memory, in GB per snapshot; by default what it copies during forward and "
        "backward, as measured.",
        above=0.0,
        chosen=True,
    ),
    PolicyFlag(
        "selective_remote_gb",
        float,
        None,
        "Budget of what a node receives from others with --ckpt-tier peers, in GB per snapshot; by default what it "
        "receives during an iteration, as measured.",
        above=0.0,
        chosen=True,
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
        "tokens-age",
        "Score of an expert under the rule per-byte: tokens since it was last saved, or these times the iterations "
        "since then, which leaves the fewest tokens at risk.",
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
        "selective_hide",
        str,
        "compute",
        "What copies to host memory hide behind: forward and backward, or the pipeline's bubbles, beside which only "
        "what they have no time for is copied (MoEtion's Algorithm 4; not on CUDA).",
        choices=HIDES,
    ),
)


def misfits(asked: Asked, job: JobShape) -> Iterator[str]:
    """Yields what these flags ask for and the job does not have, as sentences that name the remedy."""
    if asked.selective_hide == "bubble" and job.pp == 1:
        yield (
            "--selective-hide bubble copies while a pipeline's stage waits for others, and there is one stage: raise "
            "--pipeline-model-parallel-size, or drop --selective-hide."
        )
    if asked.selective_hide == "bubble" and not job.num_experts:
        yield (
            "--selective-hide bubble chooses experts by the time of the pipeline's bubbles, and there are none: add "
            "--num-experts, or drop --selective-hide."
        )


def refusals(asked: Asked) -> Iterator[str]:
    """Yields the refused combinations of these flags, as sentences that name the remedy."""
    budgets = [name for name in ("local_gb", "remote_gb") if getattr(asked, f"selective_{name}") is not None]
    flags = " and ".join(f"--selective-{name.replace('_', '-')}" for name in budgets)
    if asked.selective_experts is not None and budgets:
        yield f"--selective-experts fixes the number of experts that {flags} would choose: drop one of them."
    if asked.selective_remote_gb is not None and asked.ckpt_tier != "peers":
        yield "--selective-remote-gb is a budget of copies to other nodes: add --ckpt-tier peers, or drop it."
    if asked.selective_rule == "proportional" and asked.selective_max_age is not None:
        yield "--selective-max-age belongs to --selective-rule per-byte: drop one of them."
    if asked.selective_rule == "proportional" and asked.selective_score != "tokens-age":
        yield "--selective-score belongs to --selective-rule per-byte: drop one of them."
