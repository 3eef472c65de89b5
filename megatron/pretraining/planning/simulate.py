"""Simulates the cost of checkpoints, failures and recovery on a cluster, for every policy; needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron.pretraining.planning.model import COUNT, RATE, config_of, meta_operators, report_problems
from megatron.pretraining.planning.selective_choice import read_routing
from megatron.pretraining.presets import PRESETS
from moc.cli_output import Parser, ToolError, check_output, escapes_output, number, print_lines
from moc.elastic.allocation import MAX_DOMAIN_RANKS
from moc.policy.pec_selection import PLT_LIMIT
from moc.sharding import ParallelLayout
from moc.simulate import tables
from moc.simulate.cost import EXPLAINED, Cluster, Timing, Work, cluster_named, estimate, measured_timing
from moc.simulate.elastic import REGROUP_S, ElasticSettings
from moc.simulate.engine import Result, SimulatedJob, mean_of, simulate
from moc.simulate.failures import Faults, read_trace
from moc.simulate.planner import PlanLimits, plan
from moc.simulate.policies import POLICIES, SNAPSHOT_OVERHEAD, Options, Setup
from moc.simulate.policy_costs import RecoveryCosts, VaryingNodes
from moc.simulate.profile import fitted, read_profile

EPILOG = """\
All options of pretrain_gpt_moe.py work here too, such as --num-layers or --multi-latent-attention.

examples:
  python tools/simulate.py --model deepseek-moe-16b --cluster a100-80gb:96 --pp 12 --ep 8 --mtbf 10m \\
      --policy sparse,full,pec,checkfreq
  python tools/simulate.py --model qwen-moe-14b --pp 6 --ep 8 --trace examples/spot_trace.txt --hours 6 \\
      --plot goodput.png
  python tools/simulate.py --model deepseek-moe-16b --pp 12 --ep 8 --profile runs/x --scale-to gpus=16384 --mtbf 10m
  python tools/simulate.py --model deepseek-moe-16b --pp 12 --ep 8 --mtbf 1h --policy auto --exact-only
  python tools/simulate.py --model deepseek-moe-16b --cluster a100-80gb:384 --ep 8 --micro-batch 8 \\
      --global-batch-size 40320 --trace examples/spot_trace.txt --trace-nodes --min-nodes 24 \\
      --policy elastic,full+shrink,full
  python tools/simulate.py --reproduce moevement-table3      # as python -m benchmarks.papers moevement-table3

Durations are seconds, or have a unit: 90s, 10m, 2h, 3d; --mtbf inf is a run without failures."""

_RATES = {  # field of the cluster and description, by flag
    "host": ("host_bandwidth", "from a GPU to host memory"),
    "network": ("inter_bandwidth", "of a node to other nodes"),
    "storage": ("storage_bandwidth", "of the job to storage"),
}
_SIZES = (  # short and long name of a layout's size, and description
    ("tp", "--tensor-model-parallel-size", "tensor parallelism"),
    ("pp", "--pipeline-model-parallel-size", "pipeline stages"),
    ("ep", "--expert-model-parallel-size", "expert parallelism"),
    ("vpp", "--num-virtual-stages-per-pipeline-rank", "virtual stages of each pipeline stage"),
)
_SHRINKS = "+shrink"
_MICRO_BATCH = 32  # sequences, without flags
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Parses a duration such as ``10m`` to seconds."""
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90s, 10m, 2h or 3d")
    return seconds


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of this tool's flags; unknown flags are left to the parser of the model's flags."""
    parser = Parser(
        description="Simulate training with failures: ETTR, goodput, recovery and bytes of every policy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--reproduce", metavar="NAME", help="print a paper's figures next to ours: python -m benchmarks.papers"
    )
    _model_flags(parser.add_argument_group("model and cluster"))
    _fault_flags(parser.add_argument_group("failures"))
    _policy_flags(parser.add_argument_group("policies"))
    _member_flags(parser.add_argument_group("change of the number of nodes: elastic, and NAME+shrink"))
    group = parser.add_argument_group("output")
    group.add_argument("--runs", type=int, default=10, metavar="N", help="runs to average, by seed (default: 10)")
    group.add_argument("--seed", type=int, default=0, help="of the first (default: 0)")
    group.add_argument("--csv", metavar="FILE", help="the table")
    group.add_argument("--json", action="store_true", help="print JSON, with goodput over time")
    group.add_argument("--plot", metavar="PNG", help="goodput over time, of the first run")
    return parser


def _model_flags(group) -> None:
    group.add_argument("--model", choices=sorted(PRESETS), metavar="NAME", help=f"one of {', '.join(sorted(PRESETS))}")
    group.add_argument("--vocab-size", type=COUNT, metavar="N", help="tokens before padding; by default the model's")
    group.add_argument(
        "--cluster", default="a100-80gb:96", metavar="NAME[:GPUS]", help=f"a preset (a100-80gb:96): {EXPLAINED}"
    )
    for name, long, text in _SIZES:
        group.add_argument(f"--{name}", long, dest=name, type=int, metavar="N", help=text)
    group.add_argument(
        "--global-batch-size",
        "--global-batch",
        dest="global_batch",
        type=COUNT,
        default=512,
        metavar="N",
        help="sequences (default: 512)",
    )
    group.add_argument(
        "--micro-batch",
        type=COUNT,
        metavar="N",
        help=f"sequences that TP x EP ranks share (default: --micro-batch-size times EP, or {_MICRO_BATCH})",
    )
    group.add_argument("--iteration-s", type=duration, metavar="TIME", help="as measured, instead of the cost model's")
    group.add_argument("--profile", metavar="EVENTS", help="take times and bandwidths from a run's events.jsonl")
    group.add_argument(
        "--scale-to", metavar="gpus=N", help="of --profile: more data-parallel ranks, as much work for each"
    )
    group.add_argument(
        "--ways",
        choices=("papers", "program"),
        default="papers",
        help="how policies recover: as in the papers (default), or as in this program, with --profile's recoveries",
    )
    for name, (_, text) in _RATES.items():
        group.add_argument(f"--{name}-gbs", type=RATE, metavar="X", help=f"GB/s {text}")
    group.add_argument(
        "--snapshot-overhead",
        type=float,
        default=SNAPSHOT_OVERHEAD,
        metavar="SHARE",
        help="of its iteration that a snapshot costs though its copy hides, as you measured it (default: "
        f"{SNAPSHOT_OVERHEAD}, MoEvement's at most)",
    )
    group.add_argument("--detect", type=duration, metavar="TIME", help="from a fault until all workers have stopped")
    group.add_argument("--restart", type=duration, metavar="TIME", help="until a rollback of all workers begins")


def _fault_flags(group) -> None:
    group.add_argument("--mtbf", type=duration, metavar="TIME", help="from one failure of the job to the next (1h)")
    group.add_argument("--evenly", action="store_true", help="one failure in each MTBF, instead of a Poisson process")
    group.add_argument("--together", type=COUNT, default=1, metavar="N", help="nodes that a failure takes together")
    group.add_argument("--trace", metavar="FILE", help="of spot instances, in Bamboo's formats, instead of --mtbf")
    group.add_argument(
        "--trace-nodes",
        action="store_true",
        help="the trace states the number of nodes, not only the times of losses",
    )
    group.add_argument(
        "--hours", type=number(float, 1e-3, 1e6), default=12.0, metavar="H", help="to simulate (default: 12)"
    )
    group.add_argument("--spares", type=int, metavar="N", help="nodes that wait; by default always one more")
    group.add_argument("--repair", type=duration, default=math.inf, metavar="TIME", help="until a lost node is back")


def _policy_flags(group) -> None:
    group.add_argument(
        "--policy",
        default="all",
        metavar="LIST",
        help=f"all, auto, or of {', '.join(POLICIES)} (default: all); NAME{_SHRINKS} continues with fewer nodes",
    )
    group.add_argument(
        "--interval", type=COUNT, metavar="N", help="iterations between checkpoints; by default the best"
    )
    group.add_argument("--window", type=COUNT, metavar="W", help="sparse: by default the shortest that hides")
    group.add_argument("--pec-k", type=COUNT, metavar="K", help="experts of each layer; by default one in eight")
    group.add_argument("--pec-fixed-k", action="store_true", help="K stays as it is, whatever failures cost")
    group.add_argument("--replicas", type=int, default=2, metavar="R", help="copies in peers' memory (default: 2)")
    group.add_argument("--exact-only", action="store_true", help="auto: nothing may be lost")
    group.add_argument("--host-memory-gb", type=float, metavar="X", help="auto: of each node, for checkpoints")
    group.add_argument(
        "--routing", metavar="FILE.npz", help="recorded loads, for the lost tokens of selective: see plan_checkpoint.py"
    )
    group.add_argument("--plt-limit", type=float, default=PLT_LIMIT, metavar="P", help=f"(default: {PLT_LIMIT})")


def _member_flags(group) -> None:
    group.add_argument("--min-nodes", type=COUNT, metavar="N", help="MIN of mocrun's --nnodes MIN:MAX; by default half")
    group.add_argument(
        "--grow-wait",
        type=duration,
        default=120.0,
        metavar="TIME",
        help="wait for more nodes when some join (default: 2m)",
    )
    group.add_argument(
        "--elastic-slots",
        type=COUNT,
        metavar="C",
        help="experts of a layer that a rank can hold; by default enough for all replicas on --min-nodes",
    )
    group.add_argument(
        "--elastic-min-replicas",
        type=COUNT,
        default=2,
        metavar="F",
        help="of each expert, on different nodes (default: 2)",
    )
    group.add_argument(
        "--elastic-everywhere", type=int, metavar="H", help="hottest experts on every node; by default as needed"
    )
    group.add_argument(
        "--elastic-domain",
        type=COUNT,
        default=MAX_DOMAIN_RANKS,
        metavar="N",
        help=f"maximum number of ranks of a stage that dispatch tokens to one another (default: {MAX_DOMAIN_RANKS})",
    )
    group.add_argument(
        "--elastic-regroup",
        type=duration,
        metavar="TIME",
        help=f"from the end of detection until training continues; by default --profile's, or {REGROUP_S:g} s",
    )


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 if the flags or files are invalid."""
    args, model_flags = build_parser().parse_known_args(argv)
    try:
        if args.reproduce:
            return _reproduce(args.reproduce, args.json)
        _simulate(args, model_flags)
    except (ValueError, OSError, ToolError) as error:
        return report_problems("simulate", error)
    return 0


def _reproduce(name: str, as_json: bool) -> int:
    """Runs ``python -m benchmarks.papers``, which is not in the wheel."""
    try:
        from benchmarks.papers.program import main as papers
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks"):
            raise
        raise ToolError(
            f"--reproduce needs the repository. Fix: run python -m benchmarks.papers {name} in a copy of it",
            code="repository-missing",
        ) from None
    return papers([name, *(["--json"] if as_json else [])])


def _simulate(args: argparse.Namespace, model_flags: list[str]) -> None:
    if args.runs < 1:
        raise ToolError(f"--runs is {args.runs}. Fix: give a number that is at least 1", code="value-out-of-range")
    if args.trace and args.mtbf:
        raise ToolError(
            "--trace and --mtbf both state when nodes are lost. Fix: drop one of them", code="flags-exclude-each-other"
        )
    for output in filter(None, (args.plot, args.csv)):
        check_output(output)
    faults, available = _faults(args)
    setup = dataclasses.replace(_setup(args, model_flags), elastic=_elastic(args, faults))
    mtbf_s = faults.mtbf_s or _mtbf_of(faults, 3600 * args.hours)
    options = Options(
        interval=args.interval,
        mtbf_s=min(mtbf_s, 3600 * args.hours),
        k=args.pec_k,
        dynamic=not args.pec_fixed_k,
        plt_limit=args.plt_limit,
        window=args.window,
        replicas=args.replicas,
    )
    choice = None
    if args.policy == "auto":
        host = args.host_memory_gb and args.host_memory_gb * 1e9
        choice = plan(setup, options.mtbf_s, PlanLimits(args.exact_only, host, args.plt_limit))
        runs = {
            candidate.name: (candidate.saving.name, candidate.options)
            for candidate in (choice.best, *choice.alternatives)
        }
    else:
        runs = {name: (name, options) for name in _policies(args.policy)}
    job = SimulatedJob(
        iteration_s=setup.timing.iteration_s,
        samples=setup.work.global_batch,
        nodes=setup.cluster.nodes,
        stages=setup.layout.pp,
        wall_s=3600 * args.hours,
        spares=args.spares,
        repair_s=args.repair,
        available=available,
        seed=args.seed,
    )
    results = {
        title: _runs(setup, job, faults, *policy_and_options, args.runs) for title, policy_and_options in runs.items()
    }
    means = {title: mean_of(results_of_policy) for title, results_of_policy in results.items()}
    if args.csv:
        tables.write_csv(args.csv, means)
    if args.plot:
        tables.plot(args.plot, {title: results_of_policy[0] for title, results_of_policy in results.items()})
    tables.print_run(setup, faults, job, means, choice, args.json)


def _runs(setup: Setup, job: SimulatedJob, faults: Faults, name: str, options: Options, count: int) -> list[Result]:
    if name.endswith(_SHRINKS):
        name, setup = name.removesuffix(_SHRINKS), dataclasses.replace(setup, shrinks=True)
    policy = POLICIES[name]
    jobs = (dataclasses.replace(job, seed=job.seed + number) for number in range(count))
    return [simulate(seeded_job, faults, policy(setup, options)) for seeded_job in jobs]


def _policies(text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name.removesuffix(_SHRINKS) not in POLICIES:
            raise ToolError(
                f"there is no policy {name!r}. Fix: choose from {', '.join(POLICIES)}, all or auto",
                code="value-not-a-choice",
            )
        if name == f"elastic{_SHRINKS}":
            raise ToolError(
                f"elastic continues with fewer nodes already. Fix: drop {_SHRINKS}", code="flag-has-no-effect"
            )
    return names


def _micro_batch(config: Any, model_flags: Sequence[str], layout: ParallelLayout) -> int:
    """Returns the sequences of a micro batch on all expert-parallel ranks; each has ``--micro-batch-size``."""
    size = config.training.micro_batch_size
    is_given = size > 1 or any(word.partition("=")[0] == "--micro-batch-size" for word in model_flags)
    return size * layout.ep if is_given else _MICRO_BATCH


def _setup(args: argparse.Namespace, model_flags: list[str]) -> Setup:
    defaults = ["--expert-tensor-parallel-size", "1"] if (args.ep or 1) > 1 else []
    config = config_of(args.model, [*defaults, *model_flags], tp=args.tp, ep=args.ep)
    operators = meta_operators(config, args.model, args.vocab_size)
    cluster = _cluster(args)
    layout = _layout(args, config, cluster.gpus)
    of_pipeline = layout.tp * layout.pp * layout.ep
    pipelines = max(1, cluster.gpus // of_pipeline)
    pipelines_before = max(1, cluster_named(args.cluster).gpus // of_pipeline) if args.scale_to else pipelines
    work = Work(
        global_batch=args.global_batch * pipelines // pipelines_before,  # each pipeline's work does not change
        micro_batch=args.micro_batch or _micro_batch(config, model_flags, layout),
        seq_length=config.data.seq_length,
        hidden_size=config.network.hidden_size,
        topk=config.moe.moe_router_topk if config.moe.num_experts else 1,
        pipelines=pipelines,
    )
    timing = _timing(args, operators, layout, cluster, work)
    total = math.ceil(3600 * args.hours / timing.iteration_s)
    settings = dict(total_iterations=total, overhead=args.snapshot_overhead, program=_program(args))
    if args.routing is not None:
        settings["loads"] = read_routing(args.routing)
    nodes = cluster.nodes
    settings["members"] = VaryingNodes(
        -(-nodes // 2) if args.min_nodes is None else args.min_nodes, nodes, args.grow_wait
    )
    return Setup(operators, layout, cluster, timing, work, **settings)


def _layout(args: argparse.Namespace, config: Any, world: int) -> ParallelLayout:
    """Returns the layout of the command line, or of a file that it names."""
    parallel = config.parallel
    if parallel.context_parallel_size > 1:
        raise ToolError(
            f"--context-parallel-size {parallel.context_parallel_size} is not simulated. Fix: drop it",
            code="flag-has-no-effect",
        )
    return ParallelLayout(
        world=world,
        tp=parallel.tensor_model_parallel_size,
        # unlike Megatron-LM, the simulator allows uneven stages, so the pipeline need not divide the layers
        pp=parallel.pipeline_model_parallel_size if args.pp is None else args.pp,
        ep=parallel.expert_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
        vpp=(config.virtual_pipeline_model_parallel_size or 1) if args.vpp is None else args.vpp,
    )


def _program(args: argparse.Namespace) -> RecoveryCosts | None:
    """Returns measured costs of this program's recovery, with ``--ways program``; otherwise None."""
    if args.ways == "papers":
        return None
    recoveries = read_profile(args.profile).recoveries if args.profile else ()
    if not recoveries:
        raise ToolError(
            "--ways program takes its times from a run. Fix: add --profile with the log of a run that lost workers",
            code="flag-needs-another",
        )
    return dataclasses.replace(fitted(recoveries), more_s=0.0)  # nodes lost together do not share processors


def _elastic(args: argparse.Namespace, faults: Faults) -> ElasticSettings:
    """Returns the settings of an elastic job; its losses are the trace's."""
    regroup_s, program = args.elastic_regroup, _program(args)
    if regroup_s is None:
        regroup_s = REGROUP_S if program is None else program.restart_s - program.detect_s
    return ElasticSettings(
        slots=args.elastic_slots,
        least=args.elastic_min_replicas,
        everywhere=args.elastic_everywhere,
        domain=args.elastic_domain,
        regroup_s=regroup_s,
        losses=tuple(event.lost for event in faults.trace if event.lost) or (faults.together,),
    )


def _cluster(args: argparse.Namespace) -> Cluster:
    cluster, changes = cluster_named(args.cluster), {}
    if args.scale_to:
        name, _, gpus = args.scale_to.partition("=")
        if name != "gpus" or not gpus.isdigit() or not int(gpus):
            raise ToolError(
                f"--scale-to {args.scale_to} is not understood. Fix: write gpus=16384", code="value-unreadable"
            )
        changes["gpus"] = int(gpus)
    if args.profile:
        measured = read_profile(args.profile)
        changes |= {"host_bandwidth": measured.host_bandwidth, "storage_bandwidth": measured.storage_bandwidth}
    rates = {field: getattr(args, f"{name}_gbs") for name, (field, _) in _RATES.items()}
    changes |= {field: 1e9 * gbs for field, gbs in rates.items() if gbs is not None}
    changes |= {"detect_s": args.detect, "restart_s": args.restart}
    return dataclasses.replace(cluster, **{name: value for name, value in changes.items() if value is not None})


def _timing(args: argparse.Namespace, operators, layout: ParallelLayout, cluster: Cluster, work: Work) -> Timing:
    """Returns the measured timing, or the cost model's."""
    model = estimate(operators, layout, cluster, work)
    seconds = args.iteration_s or (read_profile(args.profile).iteration_s if args.profile else None)
    return model if seconds is None else measured_timing(seconds, model.micro_batches, model.stages)


def _faults(args: argparse.Namespace) -> tuple[Faults, int | None]:
    if not args.trace:
        return Faults(args.mtbf or 3600.0, evenly=args.evenly, together=args.together), None
    trace = read_trace(args.trace)
    if trace.doubt:
        print_lines(f"simulate: warning: {args.trace}: {trace.doubt}", error=True)
    events = tuple(event for event in trace.events if event.lost or args.trace_nodes)
    if not events:
        raise ToolError(
            f"--trace {args.trace} loses no node. Fix: give another one, or --mtbf inf", code="trace-without-losses"
        )
    return Faults(trace=events), trace.nodes if args.trace_nodes else None


def _mtbf_of(faults: Faults, wall_s: float) -> float:
    return wall_s / max(1, sum(1 for event in faults.trace if event.lost and event.at_s < wall_s))
