"""Measures the cost of replaying an iteration of a window, relative to a normal one (MoEvement, sections 3.3 and 5.6).

    torchrun --standalone --nproc-per-node 1 benchmarks/replay_cost.py --output docs/results/replay_cost_cpu.json

Operators whose full state is not yet restored are frozen: they have no weight gradients and no update.  Each iteration
of the replay is computed with its frozen operators, in turns with the same iteration without frozen operators, in the
same workers.  Torch counts the floating-point operations.  Experts are ordered by number.

Other flags are passed to the program.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND
from benchmarks.save_peers.trainer import begin
from moc.policy.windows import generate_schedule, order_operators

SIZES = """--hidden-size 256 --ffn-hidden-size 512 --num-experts 8 --seq-length 128 --max-position-embeddings 128
    --vocab-size 1023 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 8 --lr 1e-3""".split()
MODEL = [*KIND, *SIZES]
NORMAL = "normal"
GOAL = 0.75
WARM_UP = 3  # iterations


def frozen_in(operators: Sequence, length: int) -> dict[str, tuple[str, ...]]:
    """Returns the frozen operators of each iteration of a window's replay, by a name of the iteration."""
    ordered = [one.name for one in order_operators(operators, None)]
    turns = generate_schedule(ordered, math.ceil(len(ordered) / length))
    return {f"W = {length}, {place} of {length - 1}": turn.compute for place, turn in enumerate(turns[:-1], start=1)}


def measure(run, stop, windows: Sequence[int], rounds: int) -> dict[str, dict]:
    """Returns by case, normal first: frozen share of ``operators``, ``parameters``; ``flops``; ``seconds`` by round."""
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.save_peers.rounds import gather, timed
    from megatron.pretraining.engine.state import MegatronState
    from megatron.pretraining.loop import iterate

    operators = run.session._engine.operators
    state = MegatronState(run.stepper.chunks, run.stepper.optimizer.core, run.stepper.modules)
    records = [iterate(run, stop) for _ in range(WARM_UP)]
    first_sample = run.position.consumed_samples - run.stepper.topology.global_batch_size

    def again() -> None:
        run.stepper.repeat(records[-1], run.batches("train", first_sample))

    def with_frozen(names: Sequence[str], compute: Callable):
        here = set(names) & set(state.operators())
        state.freeze(here)
        told = compute()
        state.activate(here)
        return told

    def counted() -> int:
        with FlopCounterMode(display=False) as counter:
            again()
        return counter.get_total_flops()

    cases = {NORMAL: ()} | {case: frozen for length in windows for case, frozen in frozen_in(operators, length).items()}
    sizes = {one.name: one.parameters for one in operators}
    told = {
        case: {
            "operators": len(frozen) / len(operators),
            "parameters": sum(sizes[name] for name in frozen) / sum(sizes.values()),
            "flops": sum(gather(with_frozen(frozen, counted))),
            "seconds": [],
        }
        for case, frozen in cases.items()
    }
    for number in range(rounds):
        for case in list(cases) if number % 2 == 0 else list(reversed(cases)):
            told[case]["seconds"].append(with_frozen(cases[case], lambda: timed(again)))
    return told


def beside_normal(told: Mapping[str, Mapping]) -> dict[str, dict[str, float]]:
    """Returns ``flops`` and ``seconds`` (median over rounds) by case, relative to a normal iteration."""
    normal = told[NORMAL]
    return {
        case: {
            "flops": one["flops"] / normal["flops"],
            "seconds": median(mine / its for mine, its in zip(one["seconds"], normal["seconds"], strict=True)),
        }
        for case, one in told.items()
    }


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[3, 5, 10], metavar="W", help="default: 3 5 10")
    parser.add_argument("--rounds", type=int, default=15, help="of all cases (default: 15)")
    own, flags = parser.parse_known_args()
    run, stop, _ = begin([*MODEL, *flags, "--train-iters", "1000"])
    import torch.distributed as dist

    told = measure(run, stop, own.windows, own.rounds)
    beside = beside_normal(told)
    most = max(told, key=lambda case: told[case]["operators"])
    if dist.get_rank() == 0:
        print(f"{'iteration':18}{'operators':>10}{'parameters':>11}{'FLOPs':>8}{'seconds':>9}")
        for case, one in told.items():
            shares = f"{case:18}{one['operators']:10.0%}{one['parameters']:11.0%}"
            print(f"{shares}{beside[case]['flops']:8.3f}{beside[case]['seconds']:9.3f}")
        say({f"{most} at most {GOAL} of a normal one's FLOPs": beside[most]["flops"] <= GOAL})
        result = {"machine": machine(), "workers": dist.get_world_size(), "flags": [*MODEL, *flags], "goal": GOAL}
        write_json(own.output, result | {"beside_normal": beside, "cases": told})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
