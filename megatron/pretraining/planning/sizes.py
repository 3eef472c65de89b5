"""Prints the bytes that the busiest rank saves and the best policy, for any model and layout; needs no GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from megatron.pretraining.config import Config
from megatron.pretraining.planning import policy_choice, selective_choice
from megatron.pretraining.planning.model import COUNT, config_of, meta_operators, report_problems
from megatron.pretraining.presets import PRESETS
from moc.cli_output import Parser, ToolError, escapes_output, print_json, print_lines
from moc.policy.pec_selection import candidate_expert_counts, sequential_experts
from moc.sharding import (
    RULES,
    SCHEMES,
    ParallelLayout,
    SaveItem,
    ShardingScheme,
    StateBytes,
    assign_items,
    bytes_by_rank,
    cut_large_items,
    equation_8,
    forced_bytes,
    ideal_bytes,
    list_save_items,
    pec_leaves_ranks_unequal,
)
from moc.state.operators import Operator

CASES = {1: (8, 8), 2: (16, 16), 3: (16, 8)}
"""Workers and expert parallelism of MoC's Table 2."""


EPILOG = """\
All options of pretrain_gpt_moe.py work here too, such as --num-layers or --multi-latent-attention.

examples:
  python tools/plan_checkpoint.py --model gpt-350m-16e --world 16 --ep 8 --pec-k 1
  python tools/plan_checkpoint.py --case 3 --whole --keep-master
  python tools/plan_checkpoint.py --model deepseek-moe-16b --world 64 --pp 4 --ep 8 --json
  python tools/plan_checkpoint.py --case 1 --explain-k --forward-backward-s 1.2 --iteration-s 1.5 \\
      --snapshot-gbs 1 --persist-gbs 0.1 --mtbf-hours 24 --plt-limit 0.0375
  python tools/plan_checkpoint.py --model qwen-moe-14b --world 96 --pp 6 --ep 8 --explain-policy \\
      --cluster a100-80gb --tier peers --mtbf-hours 1 --exact-only --host-memory-gb 400
  python tools/plan_checkpoint.py --model deepseek-moe-16b --world 64 --pp 4 --ep 8 --explain-selective \
      --cluster a100-80gb --tier peers --iteration-s 3 --forward-backward-s 2.7 --snapshot-gbs 1

Sizes are in MB of 10^6 bytes.  "ideal" is the mean over the ranks of the fullest pipeline stage.  "forced" is the
largest amount that exists on one rank only.  No rule can be below either of them; "over" is the excess of the best rule
over the larger one.  The value in brackets behind a size is its reduction against the baseline."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of this tool's flags; unknown flags are left to the parser of the model's flags."""
    parser = Parser(
        description="Print how many bytes the busiest rank saves under each sharding rule.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=sorted(PRESETS), metavar="NAME", help=f"one of {', '.join(sorted(PRESETS))}")
    parser.add_argument("--vocab-size", type=COUNT, metavar="N", help="tokens before padding; by default the model's")
    parser.add_argument("--case", type=int, choices=CASES, help="GPT-350M-16E in this case of MoC's Table 2")
    parser.add_argument("--world", type=COUNT, metavar="N", help="workers (by default the fewest that fit)")
    parser.add_argument("--tp", type=int, metavar="N", help="tensor parallelism")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--ep", type=int, metavar="N", help="expert parallelism")
    parser.add_argument("--pec-k", type=int, metavar="K", help="show each rank when K experts per layer are saved")
    parser.add_argument(
        "--checkpoint", type=int, default=0, metavar="N", help="which checkpoint of the rotation, from 0 (default: 0)"
    )
    rules = ", ".join(sorted(RULES))
    parser.add_argument("--experts", metavar="RULE", help=f"add a column with this rule for experts: {rules}")
    parser.add_argument("--others", metavar="RULE", help="add a column with this rule for all other operators")
    parser.add_argument("--whole", action="store_true", help="never cut a layer, not even the embedding")
    parser.add_argument("--keep-master", action="store_true", help="save fp32 master weights of all experts, always")
    parser.add_argument("--fp32", action="store_true", help="32-bit training: no 16-bit copy of the master weights")
    parser.add_argument("--no-zero", action="store_true", help="optimizer state is replicated, not partitioned")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    policy_choice.add_flags(parser)
    selective_choice.add_flags(parser)
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 if the flags are invalid."""
    args, model_flags = build_parser().parse_known_args(argv)
    try:
        plan = _plan(args, model_flags)
        rows = [plan.row(k) for k in plan.row_expert_counts()]
        ranks = plan.ranks(args.pec_k) if args.pec_k is not None else None
        policy = policy_choice.chosen(args, *plan.shape) if args.explain_policy or args.explain_k else None
        selective = selective_choice.chosen(args, *plan.shape, zero=plan.zero)
    except (ToolError, ValueError) as error:
        return report_problems("plan_checkpoint", error)
    if args.json:
        report = {
            "rows": [row.to_dict() for row in rows],
            "ranks": ranks,
            "policy": policy and policy_choice.policy_report(*policy),
        }
        report |= {"explain_selective": selective and asdict(selective)}
        print_json(plan.facts() | report)
    else:
        blocks = [_rank_table(plan, ranks)] if ranks else []
        blocks += [policy_choice.explained(*policy)] if policy else []
        blocks += [selective_choice.explained(selective)] if selective else []
        print_lines(*_title(plan))
        for block in (_table(rows), *blocks):
            print_lines("", *block)
    return 0


def _plan(args: argparse.Namespace, model_flags: list[str]) -> SizePlan:
    if args.fp32 and args.keep_master:
        raise ToolError(
            "--keep-master has no effect with --fp32, which has no masters. Fix: drop one", code="flag-has-no-effect"
        )
    if args.checkpoint < 0:
        raise ToolError(
            f"--checkpoint is {args.checkpoint}. Fix: give a number that is at least 0", code="value-out-of-range"
        )
    if args.case:
        if (args.world, args.ep) != (None, None):
            raise ToolError(
                "--case states the number of workers. Fix: drop --world and --ep", code="flags-exclude-each-other"
            )
        args.model = args.model or "gpt-350m-16e"
        args.world, args.ep = CASES[args.case]
    config = config_of(args.model, model_flags, tp=args.tp, pp=args.pp, ep=args.ep)
    layout = _layout(args.world, config)
    state = StateBytes(weights=4, master=0) if args.fp32 else StateBytes()
    schemes = dict(SCHEMES)
    if args.experts or args.others:
        extra = ShardingScheme(args.experts or "equal", args.others or "adaptive")
        schemes[f"{extra.experts}+{extra.others}"] = extra
    return SizePlan(
        config=config,
        name=args.model or "model",
        operators=meta_operators(config, args.model, args.vocab_size),
        layout=layout,
        state=state,
        zero=not args.no_zero,
        keep_master=args.keep_master,
        whole=args.whole,
        checkpoint=args.checkpoint,
        num_experts=config.moe.num_experts or 0,
        schemes=schemes,
    )


def _layout(world: int | None, config: Any) -> ParallelLayout:
    parallel = config.parallel
    return ParallelLayout(
        world=world or config.arguments.world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
    )


@dataclass(frozen=True)
class Row:
    """Bytes that the busiest rank saves with k experts of each layer."""

    k: int | None
    """None saves everything."""
    total: int
    ideal: float
    forced: int
    bottleneck: dict[str, int]
    """Bytes by scheme."""
    unequal: bool
    """MoC's eq. 9 holds: the chosen experts cannot be divided equally."""

    def reduction(self, scheme: str) -> float:
        """Returns the reduction against the baseline, in percent."""
        return 100 * (1 - self.bottleneck[scheme] / self.bottleneck["baseline"])

    @property
    def over(self) -> float:
        """Excess of the best scheme over the lower bound of all rules, in percent."""
        return 100 * (min(self.bottleneck.values()) / max(self.ideal, self.forced) - 1)

    def to_dict(self) -> dict:
        """Returns plain values for JSON."""
        reductions = {name: self.reduction(name) for name in self.bottleneck}
        return vars(self) | {"reduction_percent": reductions, "over_percent": self.over}


@dataclass(frozen=True)
class SizePlan:
    """Model, layout, and the part of the state to save."""

    config: Config
    name: str
    operators: list[Operator]
    layout: ParallelLayout
    state: StateBytes
    zero: bool
    keep_master: bool
    whole: bool
    checkpoint: int
    num_experts: int
    schemes: dict[str, ShardingScheme]

    @property
    def shape(self) -> tuple[Config, list[Operator], ParallelLayout, StateBytes]:
        """Arguments for choosing a policy."""
        return self.config, self.operators, self.layout, self.state

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the layers with experts."""
        return sorted({o.expert_id[0] for o in self.operators if o.expert_id is not None})

    def row_expert_counts(self) -> list[int | None]:
        """Returns K = 1, 2, ... all experts (powers of two if many), and None for a checkpoint without PEC."""
        return [*candidate_expert_counts(self.num_experts), None]

    def items(self, k: int | None) -> list[SaveItem]:
        """Returns the items to save with k experts of each layer; None for everything."""
        items = list_save_items(
            self.operators,
            self.layout,
            self.state,
            uses_zero=self.zero,
            chosen_experts=None if k is None else self._chosen(k),
            keeps_master=self.keep_master,
        )
        return items if self.whole else cut_large_items(items)

    def _chosen(self, k: int) -> set[str]:
        return {
            f"layers.{layer}.expert.{expert}"
            for index, layer in enumerate(self.moe_layers)
            for expert in sequential_experts(self.checkpoint, index, k, self.num_experts, self.layout.ep)
        }

    def row(self, k: int | None) -> Row:
        """Returns the busiest rank's bytes under each scheme."""
        items = self.items(k)
        layout, layers = self.layout, len(self.moe_layers)
        return Row(
            k=k,
            total=sum(item.nbytes for item in items),
            ideal=ideal_bytes(items, layout),
            forced=forced_bytes(items),
            bottleneck={
                name: max(bytes_by_rank(items, assign_items(items, scheme), layout.world))
                for name, scheme in self.schemes.items()
            },
            unequal=pec_leaves_ranks_unequal(k or self.num_experts, layers, layout.ep * layout.expert_dp, layout.ep),
        )

    def ranks(self, k: int) -> dict[str, list[int]]:
        """Returns the bytes of every rank under each scheme with k experts of each layer."""
        if not 1 <= k <= self.num_experts:
            raise ToolError(
                f"--pec-k is {k}. Fix: give a number from 1 to {self.num_experts}, the experts of a layer",
                code="value-out-of-range",
            )
        items = self.items(k)
        return {
            name: bytes_by_rank(items, assign_items(items, s), self.layout.world) for name, s in self.schemes.items()
        }

    def facts(self) -> dict:
        """Returns model, layout and number of parameters for JSON."""
        experts = sum(o.parameters for o in self.operators if o.kind == "expert")
        everything = sum(o.parameters for o in self.operators)
        layout = self.layout
        return {
            "model": self.name,
            "parameters": {"experts": experts, "others": everything - experts},
            "layout": vars(layout) | {"expert_tp": layout.etp, "dp": layout.dp, "expert_dp": layout.expert_dp},
            "bytes_per_parameter": vars(self.state),
            "zero": self.zero,
            "keep_master": self.keep_master,
            "whole": self.whole,
            "checkpoint": self.checkpoint,
        }


def _title(plan: SizePlan) -> list[str]:
    facts, layout = plan.facts(), plan.layout
    count = facts["parameters"]
    return [
        f"{plan.name}: {count['others'] / 1e6:,.1f} M parameters and {count['experts'] / 1e6:,.1f} M in experts; "
        f"{plan.state.weights} + {plan.state.optimizer} bytes each",
        f"{layout.world} ranks: DP {layout.dp}, TP {layout.tp}, PP {layout.pp}, EP {layout.ep} "
        f"in {layout.expert_dp} group{'s' if layout.expert_dp > 1 else ''}"
        f"{'; optimizer state partitioned over DP (ZeRO)' if plan.zero else ''}",
        *_equation_8(plan),
        "MB that the busiest rank saves, when K experts of each layer are saved",
    ]


def _equation_8(plan: SizePlan) -> list[str]:
    """Returns a line with MoC's eq. 8, only for the layouts that it covers: data and expert parallelism."""
    layout, count = plan.layout, plan.facts()["parameters"]
    if layout.tp * layout.pp > 1 or not plan.num_experts:
        return []
    state = plan.state
    size = equation_8(count["others"], count["experts"], state.weights, state.optimizer, layout.dp, layout.ep)
    return [f"MoC's eq. 8 as printed, for everything: {_mb(size)} MB"]


def _table(rows: list[Row]) -> list[str]:
    schemes = list(rows[0].bottleneck)
    header = ["K", "total", "ideal", "forced", *schemes, "over", "eq. 9"]
    return _aligned([header, *(_cells(row) for row in rows)])


def _cells(row: Row) -> list[str]:
    cells = ["full" if row.k is None else str(row.k), _mb(row.total), _mb(row.ideal), _mb(row.forced)]
    for name, size in row.bottleneck.items():
        cells.append(_mb(size) + ("" if name == "baseline" else f" (-{row.reduction(name):.1f} %)"))
    return [*cells, f"{row.over:.2f} %", "unequal" if row.unequal else ""]


def _rank_table(plan: SizePlan, ranks: dict[str, list[int]]) -> list[str]:
    header = ["rank", *ranks]
    rows = [[str(rank), *(_mb(sizes[rank]) for sizes in ranks.values())] for rank in range(plan.layout.world)]
    return ["MB that each rank saves with the K of --pec-k", "", *_aligned([header, *rows])]


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"
