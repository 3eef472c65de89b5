"""Chooses a policy and its settings for plan_checkpoint.py, as ``--ckpt-policy auto`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.pretraining.config import Config, ConfigError
from megatron.pretraining.config.together import may_save_gradients
from moc.cli_output import ToolError
from moc.policy import AUTO, POLICIES, policy_by_flag
from moc.session.settings import TIERS
from moc.sharding import ParallelLayout
from moc.simulate.cost import EXPLAINED, Cluster, Work, cluster_named, estimate
from moc.simulate.live_costs import NAMES, Running, every_candidate, flags_of_candidate, saved_by_rules
from moc.simulate.planner import Candidate, PlanLimits, PolicyChoice, best_of
from moc.simulate.sizes import StateBytes
from moc.simulate.tables import sentences
from moc.state.operators import Operator

_FLAGS = {
    "iteration_s": ("iteration_s", 1.0),
    "forward_backward_s": ("forward_backward_s", 1.0),
    "copy_rate": ("snapshot_gbs", 1e9),
    "write_rate": ("persist_gbs", 1e9),
    "replicate_rate": ("replicate_gbs", 1e9),
}
"""Flag and unit of each measurement."""

_MEASURED = {
    "forward_backward_s": "seconds of forward and backward of an iteration",
    "iteration_s": "seconds of an iteration",
    "snapshot_gbs": "GB/s from a rank's device to host memory",
    "persist_gbs": "GB/s that a rank gets to storage when all write",
    "mtbf_hours": "hours from one fault to the next, in the mean",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--explain-policy`` and the flags that it needs."""
    group = parser.add_argument_group(
        "--explain-policy: what --ckpt-policy auto would choose (docs/how-to/choose-a-policy.md), from measurements or "
        "a cluster's sheet"
    )
    group.add_argument("--explain-policy", action="store_true", help="choose policy, interval, K, window and replicas")
    group.add_argument("--explain-k", action="store_true", help="the same, with pec as the only policy (--pec-k auto)")
    for name, text in _MEASURED.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=text)
    group.add_argument("--plt-limit", type=float, metavar="P", help="most tokens that faults may lose, such as 0.0375")
    group.add_argument("--restart-s", type=float, help=argparse.SUPPRESS)  # of earlier versions; has no effect
    group.add_argument(
        "--cluster", metavar="NAME", help=f"cluster whose values replace missing measurements: {EXPLAINED}"
    )
    group.add_argument("--global-batch", type=int, default=512, metavar="N", help="with --cluster: sequences (512)")
    group.add_argument(
        "--micro-batch",
        type=int,
        default=32,
        metavar="N",
        help="with --cluster: sequences that TP x EP ranks share (32)",
    )
    group.add_argument("--tier", choices=TIERS, default="disk", help="--ckpt-tier (default: disk)")
    group.add_argument("--nodes", type=int, metavar="N", help="by default the cluster's, or one for each 8 ranks")
    group.add_argument("--replicate-gbs", type=float, metavar="X", help="peers: GB/s of a node from other nodes")
    group.add_argument("--replicas", type=int, metavar="R", help="peers: copies on other nodes; by default 1 or 2")
    group.add_argument("--exact-only", action="store_true", help="nothing may be lost")
    group.add_argument("--host-memory-gb", type=float, metavar="X", help="of a node, for snapshots")


def chosen(
    args: argparse.Namespace, config: Config, operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes
) -> tuple[Running, PolicyChoice]:
    """Returns the assumed run, and the policy chosen for it.

    Raises:
        ToolError: a flag is missing or invalid, or no policy stays within the limits.
    """
    if args.mtbf_hours is None or not args.mtbf_hours > 0:
        raise ToolError("--explain-policy needs --mtbf-hours, above 0. Fix: add it", code="flag-needs-another")
    names = NAMES if args.explain_policy else (policy_by_flag()["pec_k"].name,)
    if not args.explain_policy and not config.moe.num_experts:
        raise ToolError(
            "--explain-k chooses numbers of experts. Fix: take a model that has some", code="model-without-experts"
        )
    run, mtbf_s = _assumed_run(args, config, operators, layout, state), 3600 * args.mtbf_hours
    if args.replicas is not None and not 1 <= args.replicas < run.nodes:
        raise ToolError(
            f"--replicas is {args.replicas}. Fix: give a number from 1 to {run.nodes - 1}, the other nodes",
            code="value-out-of-range",
        )
    limits = PlanLimits(
        exact_only=args.exact_only,
        host_bytes=None if args.host_memory_gb is None else 1e9 * args.host_memory_gb,
        plt=1.0 if args.plt_limit is None else args.plt_limit,
        plt_by_policy={
            name: POLICIES[name].flags.max_lost_tokens(config.snapshot) for name in NAMES if args.plt_limit is None
        },
        policies=tuple(name for name in names if _with_policy(config, name, run.tier) is not None),
        replicas=(1, 2)[: run.nodes - 1] if args.replicas is None else (args.replicas,),
    )
    return run, best_of(every_candidate(run, mtbf_s, limits), run.iteration_s, mtbf_s, limits)


def explained(run: Running, plan: PolicyChoice) -> list[str]:
    """Formats the choice and the runners-up as lines."""
    lines = [f"{candidate.name}: {_format_figures(candidate)}" for candidate in (plan.best, *plan.alternatives)]
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags_of_candidate(plan.best).items())
    tier = f"--ckpt-tier {run.tier}"
    return [*lines, "", *sentences(plan.reason), "", f"{flags} {tier}"]


def policy_report(run: Running, plan: PolicyChoice) -> dict:
    """Returns the choice and the runners-up for JSON."""
    policies = {
        candidate.name: {"ettr": candidate.ettr, "plt": candidate.plt, "host_bytes": candidate.host_bytes}
        for candidate in (plan.best, *plan.alternatives)
    }
    return {
        "flags": flags_of_candidate(plan.best) | {"ckpt_tier": run.tier},
        "reason": plan.reason,
        "policies": policies,
    }


def _with_policy(config: Config, policy: str, tier: str) -> Config | None:
    """Returns the configuration with this policy and tier; None if the training flags do not allow it."""
    try:
        return config.replace("snapshot", ckpt_policy=policy, ckpt_tier=tier, ckpt_dir=".")
    except ConfigError:
        return None


def _gradients(config: Config, tier: str) -> bool:
    """Returns whether the training flags allow gradients in place of state with this tier."""
    job = _with_policy(config, AUTO, tier)
    return job is not None and may_save_gradients(job)


def _format_figures(candidate: Candidate) -> str:
    lost = f", PLT {100 * candidate.plt:.2g} %" if candidate.plt else ""
    return f"ETTR {candidate.ettr:.3f}{lost}, {candidate.host_bytes / 1e9:,.1f} GB of a node's memory"


def _assumed_run(
    args: argparse.Namespace, config: Config, operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes
) -> Running:
    names = [name for name in _FLAGS if name != "replicate_rate" or args.tier == "peers"]
    measured, nodes = figures("--explain-policy", names, args, config, operators, layout)
    tier = "memory" if args.tier == "peers" and nodes == 1 else args.tier
    saved = saved_by_rules(operators, layout, state, _gradients(config, tier))
    return Running(tier, nodes, -(-layout.world // nodes), saved, loads=None, **measured)


def figures(
    requesting_flag: str,
    names: Sequence[str],
    args: argparse.Namespace,
    config: Config,
    operators: Sequence[Operator],
    layout: ParallelLayout,
) -> tuple[dict[str, float], int]:
    """Returns the figures from measurements or the cluster's data, in seconds and bytes per second, and the node count.

    Args:
        requesting_flag: the flag that needs the figures.
        names: names of the needed figures.
        args: the parsed flags.
        config: the model's configuration.
        operators: the model's operators.
        layout: the parallel layout.

    Raises:
        ToolError: a figure is missing, or there are more nodes than ranks.
    """
    cluster = cluster_named(f"{args.cluster}:{layout.world}") if args.cluster else None
    measured = {} if cluster is None else _figures_of_cluster(args, config, operators, layout, cluster)
    for name, (flag, unit) in _FLAGS.items():
        if getattr(args, flag) is not None:
            measured[name] = unit * getattr(args, flag)
        elif name not in measured and name in names:
            raise ToolError(
                f"{requesting_flag} needs --{flag.replace('_', '-')}, or a --cluster. Fix: add what was measured",
                code="flag-needs-another",
            )
    nodes = args.nodes
    if nodes is None:
        nodes = cluster.nodes if cluster else max(1, layout.world // 8)
    if not 0 < nodes <= layout.world:
        raise ToolError(
            f"--nodes is {nodes}. Fix: give a number from 1 to {layout.world}, the ranks", code="value-out-of-range"
        )
    return measured, nodes


def _figures_of_cluster(
    args: argparse.Namespace, config: Config, operators: Sequence[Operator], layout: ParallelLayout, cluster: Cluster
) -> dict[str, float]:
    measured = {
        "copy_rate": cluster.host_bandwidth,
        "write_rate": cluster.storage_bandwidth / cluster.gpus,
        "replicate_rate": cluster.inter_bandwidth,
    }
    if args.iteration_s is not None:
        return measured | {"forward_backward_s": args.iteration_s}
    work = Work(
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        seq_length=config.data.seq_length,
        hidden_size=config.network.hidden_size,
        topk=config.moe.moe_router_topk if config.moe.num_experts else 1,
        pipelines=max(1, layout.world // (layout.tp * layout.pp * layout.ep)),
    )
    timing = estimate(operators, layout, cluster, work)
    return measured | {"iteration_s": timing.iteration_s, "forward_backward_s": timing.forward_backward_s}
