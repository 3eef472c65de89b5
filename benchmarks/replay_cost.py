"""What an iteration of a window costs to compute again, beside a normal one (MoEvement, sections 3.3 and 5.6).

    torchrun --standalone --nproc-per-node 1 benchmarks/replay_cost.py --output docs/results/replay_cost_cpu.json

Operators whose full state is not there yet are frozen: no gradients of their weights, and no update.  Each iteration of
the replay is computed with what is frozen in it, in turns with the same iteration with nothing frozen, in the same
workers.  Floating-point operations are counted by torch.  Experts are in the order of their numbers.

Flags that are not the benchmark's own are the program's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.pretraining.arguments import parse_config
from moc.policy.window import generate_schedule, order_operators

MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --num-experts 8
    --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --transformer-impl local --use-distributed-optimizer
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-iters 0 --num-workers 0""".split()
NORMAL = "normal"
GOAL = 0.75
WARM_UP = 3  # iterations


def frozen_in(operators: Sequence, length: int) -> dict[str, tuple[str, ...]]:
    """The operators that are frozen in each iteration of a window's replay, by a name of the iteration.

    Args:
        operators: of the model.
        length: of the window, in iterations.
    """
    ordered = [one.name for one in order_operators(operators, None)]
    turns = generate_schedule(ordered, math.ceil(len(ordered) / length))
    return {f"W = {length}, {place} of {length - 1}": turn.compute for place, turn in enumerate(turns[:-1], start=1)}


def measure(config, windows: Sequence[int], rounds: int) -> dict[str, dict]:
    """By case, a normal iteration first: shares ``operators`` and ``parameters`` that are frozen, ``flops`` of all
    workers, and ``seconds`` of each round; a collective call.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.train_overhead import gather, timed
    from megatron.pretraining.engine.state import MegatronState
    from megatron.pretraining.loop import iterate
    from megatron.pretraining.model.shape import model_shape
    from megatron.pretraining.process.initialize import initialize
    from megatron.pretraining.process.phases import Phases
    from megatron.pretraining.process.stopping import StopRequests
    from megatron.pretraining.setup import set_up
    from moc.state.shape import model_operators
    from pretrain_gpt_moe import providers

    stop = StopRequests(config)
    run = set_up(config, initialize(config), providers(), stop, Phases())
    operators = model_operators(model_shape(config.network, config.moe, run.vocab_size))
    state = MegatronState(run.stepper.chunks, run.stepper.optimizer.core)
    records = [iterate(run, stop) for _ in range(WARM_UP)]
    first_sample = run.position.consumed_samples - run.stepper.global_batch_size

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
            told[case]["seconds"].append(with_frozen(cases[case], lambda: timed(again, 1)))
    return told


def beside_normal(told: Mapping[str, Mapping]) -> dict[str, dict[str, float]]:
    """By case, ``flops`` and ``seconds`` (the median of all rounds) beside those of a normal iteration."""
    normal = told[NORMAL]
    return {
        case: {
            "flops": one["flops"] / normal["flops"],
            "seconds": median(mine / its for mine, its in zip(one["seconds"], normal["seconds"], strict=True)),
        }
        for case, one in told.items()
    }


def main() -> int:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--windows", type=int, nargs="+", default=[3, 5, 10], metavar="W", help="default: 3 5 10")
    parser.add_argument("--rounds", type=int, default=15, help="of all cases (default: 15)")
    own, flags = parser.parse_known_args()
    config = parse_config([*MODEL, *flags, "--train-iters", "1000"])

    from megatron.pretraining.process import cpu

    cpu.install()
    import torch
    import torch.distributed as dist

    told = measure(config, own.windows, own.rounds)
    beside = beside_normal(told)
    most = max(told, key=lambda case: told[case]["operators"])
    holds = beside[most]["flops"] <= GOAL
    if dist.get_rank() == 0:
        print(f"{'iteration':18}{'operators':>10}{'parameters':>11}{'FLOPs':>8}{'seconds':>9}")
        for case, one in told.items():
            shares = f"{case:18}{one['operators']:10.0%}{one['parameters']:11.0%}"
            print(f"{shares}{beside[case]['flops']:8.3f}{beside[case]['seconds']:9.3f}")
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {most} at most {GOAL} of a normal one's FLOPs")
        if own.output:
            machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
            result = {"machine": machine, "workers": dist.get_world_size(), "flags": [*MODEL, *flags], "goal": GOAL}
            own.output.write_text(json.dumps(result | {"beside_normal": beside, "cases": told}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
