"""The flags of selective checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from moc.policy.flags import Asked, PolicyFlag
from moc.policy.selection import RULES, SCORES

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
        "selective_boost",
        float,
        None,
        "Capacity that experts which lost tokens to a recovery have beyond that of others, as a fraction, out of what "
        "other experts of their rank leave unused, until the tokens are made up; 0 for none. By default 0.1 with "
        "--moe-expert-capacity-factor and without padding, where experts drop tokens, otherwise none.",
        at_least=0.0,
        of_capacity=True,
    ),
    PolicyFlag(
        "selective_boost_iterations",
        int,
        200,
        "Iterations after a recovery in which experts make up lost tokens; what they still owe then is given up.",
        at_least=1,
        of_capacity=True,
    ),
)

BOOST = 0.1
"""The fraction of section 6, where experts drop tokens."""


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
    if asked.selective_boost == 0 and asked.selective_boost_iterations != 200:
        yield "--selective-boost-iterations has no effect with --selective-boost 0: drop one of them."
