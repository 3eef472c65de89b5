"""Computes the contents of selective snapshots for plan_checkpoint.py, and the tokens at risk between them."""

from __future__ import annotations

import argparse
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.pretraining.config import Config
from megatron.pretraining.config.together import job_shape
from megatron.pretraining.planning.policy_choice import figures
from moc.cli_output import ToolError, counted
from moc.files.safe_directory import MAX_MANIFEST_BYTES, open_user_file
from moc.policy import POLICIES
from moc.policy.expert_selection import CountsByLayer, count_fitting, count_limit
from moc.policy.flags import bubble_share
from moc.policy.selective import Selective
from moc.policy.selective_choice import SelectiveTuner, default_max_age
from moc.policy.tokens_at_risk import (
    ChainedRisk,
    TokensAtRisk,
    equal_sizes,
    replay_chains,
    replay_loads,
    selection_rules,
    steady_risk_per_layer,
)
from moc.sharding import ParallelLayout
from moc.simulate.sizes import SizesByRules, StateBytes
from moc.state.operators import Operator

_WARM_UP_ITERATIONS = 10
"""Minimum number of first iterations of a recording that do not count: few tokens are at risk after a full snapshot."""

_BYTES_OF_NUMBER, _SMALL = 8, 1 << 16
_UNREADABLE = (
    *(AttributeError, EOFError, IndexError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError),
    *(zipfile.BadZipFile, zlib.error),
)
"""Errors of zipfile and numpy for files that they cannot read."""
_EXPECTED_FORMAT = "tokens[iterations, layers, experts] in .npz"


@dataclass(frozen=True)
class Budget:
    """Budget of a snapshot.

    Attributes:
        nbytes: bytes of a rank or node.
        experts: S, experts of each layer that fit, as the mean over layers.
    """

    nbytes: float
    experts: float


@dataclass(frozen=True)
class ReplayedLoads:
    """Replay of recorded loads.

    Attributes:
        shape: iterations, layers and experts of the recording.
        skipped: first iterations, which warm up the replay and do not count.
        experts: experts of each layer in a snapshot by their states, as the mean over layers.
        scaled: the model has another shape, and the same share of experts is saved.
        rules: tokens at risk by rule.
        steady_risk: tokens at risk for constant loads, in iterations, as the mean over layers.
        gradients: the same budget with gradients in place of states; None if none are saved.
    """

    shape: tuple[int, int, int]
    skipped: int
    experts: float
    scaled: bool
    rules: dict[str, TokensAtRisk]
    steady_risk: float
    gradients: ChainedRisk | None


@dataclass(frozen=True)
class BubbleEstimate:
    """Work hidden in the pipeline's bubbles (Algorithm 4), as estimated for a 1F1B schedule.

    Attributes:
        share: share of forward and backward that a stage waits.
        seconds: the same, in seconds of an iteration.
        of_copy: share of copying the busiest rank's snapshot that fits in them.
    """

    share: float
    seconds: float
    of_copy: float


@dataclass(frozen=True)
class SelectiveChoice:
    """Predicted behaviour of the policy ``selective``.

    Attributes:
        tier: tier that makes snapshots durable.
        replicas: nodes that keep a copy of each node's snapshots; 0 without peers.
        local: B_local, which a rank copies during forward and backward.
        remote: B_remote until the next snapshot: bytes that a node receives, or with tier ``disk`` a rank writes; None
            with tier ``memory``.
        dense_bytes: bytes of dense operators on the busiest rank.
        expert_bytes: bytes of the largest expert on that rank.
        num_experts: E, experts of each layer.
        layers: layers with experts.
        experts: S by both budgets, as the mean over layers.
        interval: iterations between snapshots.
        stall_s: seconds that training waits for a snapshot.
        snapshot_bytes: bytes of a snapshot over all ranks.
        full_bytes: bytes of a full snapshot.
        max_age: iterations after which an expert has priority.
        equally_busy: tokens at risk if experts were equally busy, in iterations, as the mean over layers.
        copy_s: seconds of copying a snapshot to host memory, on the busiest rank.
        hidden_s: seconds of forward and backward, which hide this copy.
        gradient: bytes of an expert's gradients relative to its state; None if gradients are not saved.
        no_gradients: reason if gradients are requested and not saved.
        bubbles: None without a pipeline.
        routing: replay of recorded loads; None without a recording.
    """

    tier: str
    replicas: int
    local: Budget
    remote: Budget | None
    dense_bytes: int
    expert_bytes: int
    num_experts: int
    layers: int
    experts: float
    interval: int
    stall_s: float
    snapshot_bytes: float
    full_bytes: int
    max_age: int
    equally_busy: float
    copy_s: float
    hidden_s: float
    gradient: float | None
    no_gradients: str | None
    bubbles: BubbleEstimate | None
    routing: ReplayedLoads | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--explain-selective`` and its flag that the other choices lack."""
    group = parser.add_argument_group(
        "--explain-selective: what --ckpt-policy selective would save (MoEtion, sections 4.1 to 4.3, 5.2, 5.3), from "
        "--iteration-s, --forward-backward-s, --snapshot-gbs, --persist-gbs, --replicate-gbs, --tier, --nodes and "
        "--replicas above, or a cluster's sheet; bubbles by --global-batch and --micro-batch"
    )
    group.add_argument("--explain-selective", action="store_true", help="print budgets, experts and tokens at risk")
    group.add_argument(
        "--routing", metavar="FILE.npz", help="recorded loads of experts: tokens[iterations, layers, experts]"
    )


def chosen(
    args: argparse.Namespace,
    config: Config,
    operators: Sequence[Operator],
    layout: ParallelLayout,
    state: StateBytes,
    *,
    zero: bool = True,
) -> SelectiveChoice | None:
    """Returns the policy's predicted behaviour from measurements; None without ``--explain-selective``.

    Args:
        args: the parsed flags.
        config: the model's configuration.
        operators: the model's operators.
        layout: the parallel layout.
        state: bytes of each parameter.
        zero: optimizer state is partitioned over data-parallel ranks.

    Raises:
        ToolError: a flag is missing or invalid here, or the recording is unusable.
    """
    for refusal in _refusals(args):
        raise refusal
    if not args.explain_selective:
        return None
    if not any(operator.expert_id for operator in operators):
        raise ToolError(
            "--explain-selective chooses among experts. Fix: take a model that has some", code="model-without-experts"
        )
    needed = ["iteration_s", "forward_backward_s", "copy_rate", *_RATES.get(args.tier, ())]
    measured, nodes = figures("--explain-selective", needed, args, config, operators, layout)
    replicas = _replicas(args, nodes)
    measured = {name: measured[name] for name in needed}
    if not min(measured.values()) > 0 or measured["forward_backward_s"] > measured["iteration_s"]:
        raise ToolError(
            "a rate or a time is not above 0, or --forward-backward-s is above --iteration-s. Fix: correct the figures",
            code="value-out-of-range",
        )
    snapshot = config.replace("snapshot", ckpt_policy=Selective.name, ckpt_tier=args.tier, ckpt_dir=".").snapshot
    settings = POLICIES[Selective.name].settings(snapshot, job_shape(config))
    settings = {name: settings[name] for name in ("tier", "gradients", "no_gradients")}
    policy = Selective(operators, SelectiveTuner(measurements=measured), **settings)
    node_of_rank = tuple(rank * nodes // layout.world for rank in range(layout.world))
    policy.on_sizes(SizesByRules(operators, layout, state, node_of_rank, replicas, zero))
    loads = None if args.routing is None else read_routing(args.routing)
    pipelines = max(1, layout.world // (layout.tp * layout.pp * layout.ep))
    micro_batches = args.global_batch // (args.micro_batch * pipelines)
    share = bubble_share(layout.pp, max(1, micro_batches), layout.vpp)
    return _choice(policy, measured, share, loads)


_RATES = {"peers": ("replicate_rate",), "disk": ("write_rate",)}


def _refusals(args: argparse.Namespace) -> Iterator[ToolError]:
    if not args.explain_selective:
        if args.routing is not None:
            yield ToolError(
                "--routing has no effect without --explain-selective. Fix: add it, or drop --routing",
                code="flag-has-no-effect",
            )
        return
    if args.keep_master:
        yield ToolError(
            "--keep-master is of partial experts checkpointing (--pec-k). Fix: drop it, or --explain-selective",
            code="flags-exclude-each-other",
        )
    if args.tier != "peers" and (args.replicate_gbs is not None or args.replicas is not None):
        yield ToolError(
            "--replicate-gbs and --replicas are of copies on other nodes. Fix: add --tier peers, or drop them",
            code="tier-lacks-flag",
        )
    if args.tier != "disk" and args.persist_gbs is not None and not (args.explain_k or args.explain_policy):
        yield ToolError(
            "--persist-gbs is a budget only with --tier disk. Fix: drop one of them", code="tier-lacks-flag"
        )


def _replicas(args: argparse.Namespace, nodes: int) -> int:
    if args.tier != "peers":
        return 0
    if nodes < 2:
        raise ToolError(
            "--tier peers needs 2 nodes or more. Fix: give --nodes, or another --tier", code="nodes-too-few"
        )
    replicas = 1 if args.replicas is None else args.replicas
    if not 1 <= replicas < nodes:
        raise ToolError(
            f"--replicas is {replicas}. Fix: give a number from 1 to {nodes - 1}, the other nodes",
            code="value-out-of-range",
        )
    return replicas


def _choice(
    policy: Selective, measured: Mapping[str, float], share: float, loads: list[CountsByLayer] | None
) -> SelectiveChoice:
    """Evaluates the policy, which has the sizes; ``share`` is the bubbles' share of forward and backward."""
    sizes, limits, interval = policy.sizes[0], policy.limits(), policy.schedule.snapshot_interval
    numbers = policy.num_experts
    layers, num_experts = len(numbers), max(numbers.values())

    def experts(*names: str) -> float:
        return count_fitting(numbers, [limits[name] for name in ("experts", *names)]) / layers

    number = experts(*limits)
    dense, all_experts = sum(sizes.dense.values()), sum(sum(ranks.values()) for ranks in sizes.experts.values())
    busiest, expert = sizes.busiest_rank
    tuner = policy.interval
    assert isinstance(tuner, SelectiveTuner) and tuner.local_bytes is not None
    remote = tuner.remote_bytes(policy.tier)
    equal = {layer: [1] * count for layer, count in numbers.items()}
    gradient = None if interval > 1 or not policy.gradients else 1 / sizes.gradient_ratio(min(sizes.gradients))
    no_gradients = (
        "--selective-gradients on needs a snapshot in each iteration" if interval > 1 and policy.gradients else None
    )
    bubble_s = share * measured["forward_backward_s"]
    least_bytes = sizes.least_rank_bytes
    copied = min(tuner.affordable_bytes(least_bytes, interval) or least_bytes, max(sizes.full_bytes_by_rank.values()))
    hidden = measured["copy_rate"] * measured["forward_backward_s"]
    hidden_share = min(1.0, bubble_s * measured["copy_rate"] / copied)
    return SelectiveChoice(
        tier=policy.tier,
        replicas=sizes.replicas,
        local=Budget(tuner.local_bytes, experts("local")),
        remote=None if remote is None else Budget(remote * interval, experts("remote")),
        dense_bytes=sizes.dense.get(busiest, 0),
        expert_bytes=expert,
        num_experts=num_experts,
        layers=layers,
        experts=number,
        interval=interval,
        stall_s=max(0.0, copied - hidden) / measured["copy_rate"],
        snapshot_bytes=dense + number / num_experts * all_experts,
        full_bytes=dense + all_experts,
        max_age=policy.max_expert_age,
        equally_busy=steady_risk_per_layer([equal], number * layers, interval),
        copy_s=copied / measured["copy_rate"],
        hidden_s=measured["forward_backward_s"],
        gradient=gradient,
        no_gradients=policy.no_gradients or no_gradients,
        bubbles=BubbleEstimate(share, bubble_s, hidden_share) if share else None,
        routing=None if loads is None else _replayed(policy, loads, number / num_experts, gradient),
    )


def _replayed(policy: Selective, loads: list[CountsByLayer], share: float, gradient: float | None) -> ReplayedLoads:
    """Replays a recording within the policy's limits or, if shapes differ, with the same share of experts."""
    layers, num_experts, numbers = len(loads[0]), len(loads[0][0]), policy.num_experts
    scaled = [num_experts] * layers != list(numbers.values())
    if scaled:
        experts = [(layer, expert) for layer in range(layers) for expert in range(num_experts)]
        total = max(1, round(share * len(experts)))
        limits = [count_limit(experts, total)]
        sizes = equal_sizes(loads[0], gradient or 1.0)
        gradient_limits = [sizes.total_limit(total * sizes.largest_expert)]
    else:
        loads = [dict(zip(numbers, row.values(), strict=True)) for row in loads]
        total, limits = round(share * layers * num_experts), list(policy.limits().values())
        sizes, gradient_limits = policy.sizes[0], limits
    interval = policy.schedule.snapshot_interval
    skipped = max(_WARM_UP_ITERATIONS, len(loads) // 2)
    chained = None if gradient is None else replay_chains(loads, gradient_limits, sizes, policy.max_expert_age, skipped)
    max_age = policy.max_age or default_max_age(layers * num_experts, interval, limits, gradients=False)
    risks = {
        name: replay_loads(loads, choose, interval, skipped)
        for name, choose in selection_rules(limits, max_age).items()
    }
    return ReplayedLoads(
        shape=(len(loads), layers, num_experts),
        skipped=skipped,
        experts=total / layers,
        scaled=scaled,
        rules=risks,
        steady_risk=steady_risk_per_layer(loads[skipped:], total, interval),
        gradients=chained,
    )


def read_routing(path: str) -> list[CountsByLayer]:
    """Reads recorded loads: by iteration and layer from 0, the tokens of each expert.

    Args:
        path: an .npz file with ``tokens[iterations, layers, experts]``, integers.

    Raises:
        ToolError: the file is missing or malformed.
    """
    import numpy  # noqa: PLC0415

    try:
        with open(open_user_file(path, MAX_MANIFEST_BYTES), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            unpacked = sum(part.file_size for part in zipfile.ZipFile(file).infolist())
            if unpacked > min(MAX_MANIFEST_BYTES, _BYTES_OF_NUMBER * size + _SMALL):
                raise ValueError("it is too large")
            file.seek(0)
            with numpy.load(file, allow_pickle=False) as arrays:
                tokens = arrays["tokens"]
            if not isinstance(tokens, numpy.ndarray):
                raise TypeError("it is no array")
    except OSError as error:
        raise ToolError(
            f"--routing {path} cannot be read: {error.strerror or error}. Fix: correct the path",
            code="routing-unreadable",
        ) from error
    except KeyError as error:
        raise ToolError(
            f"--routing {path} has no array called tokens. Fix: give {_EXPECTED_FORMAT}", code="routing-malformed"
        ) from error
    except _UNREADABLE as error:
        raise ToolError(
            f"--routing {path} holds no numbers. Fix: give {_EXPECTED_FORMAT}", code="routing-malformed"
        ) from error
    shape = "x".join(map(str, tokens.shape))
    if tokens.ndim != 3 or 0 in tokens.shape or tokens.dtype.kind not in "iu":
        raise ToolError(
            f"--routing {path}: tokens is {shape} of {tokens.dtype}. Fix: give {_EXPECTED_FORMAT}",
            code="routing-malformed",
        )
    if _BYTES_OF_NUMBER * math.prod(tokens.shape[:2]) + tokens.size > size + _SMALL:
        raise ToolError(
            f"--routing {path} takes far more memory than its size. Fix: save it as int64 with numpy.savez, which does "
            "not compress",
            code="routing-malformed",
        )
    if len(tokens) <= _WARM_UP_ITERATIONS:
        raise ToolError(
            f"--routing {path} has {counted(len(tokens), 'iteration')}, and the first {_WARM_UP_ITERATIONS} do not "
            "count. Fix: record a longer run",
            code="routing-malformed",
        )
    if tokens.min() < 0:
        raise ToolError(f"--routing {path}: tokens has negative numbers. Fix: give counts", code="routing-malformed")
    return [dict(enumerate(row)) for row in tokens.tolist()]


def explained(choice: SelectiveChoice) -> list[str]:
    """Formats the choice as lines."""
    every = "in every iteration" if choice.interval == 1 else f"every {choice.interval} iterations"
    share = choice.snapshot_bytes / choice.full_bytes
    lines = [
        f"selective: S {_share_of_experts(choice.experts, choice)}, {every}",
        f"B_local {_gb(choice.local.nbytes)} of a rank during forward and backward: S_local {choice.local.experts:.3g}",
    ]
    if choice.remote is not None:
        period = "an iteration" if choice.interval == 1 else f"{choice.interval} iterations"
        transfer = f"received by a node ({choice.replicas} copies of each)" if choice.replicas else "written by a rank"
        transfer = transfer.replace("(1 copies", "(1 copy")
        lines.append(
            f"B_remote {_gb(choice.remote.nbytes)} {transfer} in {period}: S_remote {choice.remote.experts:.3g}"
        )
    lines.append(
        f"The busiest rank saves {choice.dense_bytes / 1e6:,.1f} MB of dense operators, "
        f"and {choice.expert_bytes / 1e6:,.1f} MB for an expert."
    )
    if choice.interval > 1:
        lines.append(f"Not even one expert hides in an iteration: a snapshot {every}.")
    lines += [
        f"The busiest rank copies for {choice.copy_s:.3g} s, during {choice.hidden_s:.3g} s of forward and backward; "
        f"training waits {choice.stall_s:.3g} s.",
        f"A snapshot has {_gb(choice.snapshot_bytes)}, {100 * share:.1f} % of the {_gb(choice.full_bytes)} of a full "
        "one (eq. 5).",
        f"An expert has priority after {choice.max_age} iterations without a snapshot of it.",
        f"Equally busy experts: {choice.equally_busy:.3g} iterations of tokens at risk (MLT "
        f"{choice.equally_busy * choice.layers:.3g} over {choice.layers} layers).",
    ]
    if choice.gradient is not None:
        lines.append(
            f"In chains, gradients replace states: {100 * choice.gradient:.0f} % of the bytes. A second buffer on the "
            "device has them until they are copied."
        )
    elif choice.no_gradients:
        lines.append(f"States only: {choice.no_gradients}.")
    if (bubbles := choice.bubbles) is not None:
        lines.append(
            f"Bubbles are {100 * bubbles.share:.1f} % of forward and backward, {bubbles.seconds:.3g} s: "
            f"{100 * bubbles.of_copy:.0f} % of a snapshot's copy passes in them (--selective-hide bubble)."
        )
    return [*lines, *(["", *_routing_lines(choice.routing)] if choice.routing else [])]


def _routing_lines(routing: ReplayedLoads) -> Iterator[str]:
    iterations, layers, experts = routing.shape
    yield f"Recorded loads of {iterations} iterations, {layers} layers and {experts} experts, S {routing.experts:.3g}:"
    if routing.scaled:
        yield "(the model has another shape: S is the same share of the recording's experts)"
    width = max(map(len, routing.rules))
    yield f"{'rule':<{width}}  at risk (MLT / L)  MLT (eq. 6)  oldest"
    for name, risk in routing.rules.items():
        yield f"{name:<{width}}  {risk.mlt_per_layer:17.3f}  {risk.mlt:11.2f}  {risk.oldest:6d}"
    steady_risk, total_risk = routing.steady_risk, routing.steady_risk * layers
    yield f"{'steady state, at best':<{width}}  {steady_risk:17.3f}  {total_risk:11.2f}"
    if (chained := routing.gradients) is not None:
        risk = chained.risk
        yield f"{'with gradients':<{width}}  {risk.mlt_per_layer:17.3f}  {risk.mlt:11.2f}  {risk.oldest:6d}"
        share = f"{100 * chained.gradients:.0f} % by their gradients"
        yield f"With gradients, S is {chained.experts:.3g} experts in the same bytes, {share}."
    yield (
        f"In iterations, right after a snapshot. The first {routing.skipped} iterations warm up the replay, as in the "
        "middle of a run, and do not count."
    )


def _share_of_experts(experts: float, choice: SelectiveChoice) -> str:
    return f"{experts:.3g} of {choice.num_experts} experts of each layer"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB"
