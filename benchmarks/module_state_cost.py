"""Measures the cost of recording module state in each iteration, as a share of the iteration.

    torchrun --standalone --nproc-per-node 1 benchmarks/module_state_cost.py --output docs/results/module_state_cpu.json

Two clocks around ``ModuleState.begin`` and ``ModuleState.commit`` sum the time inside these functions, which is too
short to appear in the duration of an iteration.  The time is divided by the duration of the same iterations.
``--router`` selects one of two kinds of routers that keep counts: expert biases, or a global auxiliary loss.

Other flags are passed to the program.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND
from benchmarks.save_peers.trainer import begin

SIZES = """--hidden-size 256 --ffn-hidden-size 512 --num-experts 8 --seq-length 128 --max-position-embeddings 128
    --vocab-size 1023 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 8 --lr 1e-3""".split()
ROUTERS = {
    "expert bias": """--moe-router-load-balancing-type none --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias""".split(),
    "global_aux_loss": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01".split(),
}
GOAL = 0.001
WARM_UP = 5  # iterations; the first ones record everything


@contextlib.contextmanager
def clocked(functions: Iterable[tuple[Any, str]]) -> Iterator[list[float]]:
    """Yields one number: the seconds inside some functions, each given by its owner and name."""
    inside = [0.0]

    def with_clock(function: Callable) -> Callable:
        def clock(*arguments):
            begun = time.perf_counter()
            result = function(*arguments)
            inside[0] += time.perf_counter() - begun
            return result

        return clock

    with contextlib.ExitStack() as patches:
        for owner, name in functions:
            patches.enter_context(mock.patch.object(owner, name, with_clock(getattr(owner, name))))
        yield inside


def measure(run, stop, iterations: int, inside: list[float]) -> list[tuple[float, float]]:
    """Returns for each iteration the seconds ``inside`` the clocked functions, and the duration."""
    from megatron.pretraining.loop import iterate

    measured = []
    for _ in range(WARM_UP + iterations):
        inside[0], begun = 0.0, time.perf_counter()
        iterate(run, stop)
        measured.append((inside[0], time.perf_counter() - begun))
    return measured[WARM_UP:]


def main() -> int:
    """Measures one kind of router, prints the shares, writes JSON; returns 1 if the goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--router", choices=ROUTERS, default="expert bias", help="default: expert bias")
    parser.add_argument("--iterations", type=int, default=60, help="default: 60")
    own, flags = parser.parse_known_args()
    flags = [*KIND, *SIZES, *ROUTERS[own.router], *flags]
    run, stop, _ = begin([*flags, "--train-iters", "1000"])
    from megatron.pretraining.engine.module_state import ModuleState

    with clocked([(ModuleState, "begin"), (ModuleState, "commit")]) as inside:
        measured = measure(run, stop, own.iterations, inside)
    share = median(inside / duration for inside, duration in measured)
    inside, duration = (median(one) for one in zip(*measured, strict=True))
    modules = sum(1 for chunk in run.stepper.chunks for _ in chunk.modules())
    changing = len(run.stepper.modules.changing) + len(run.stepper.modules.committed)
    print(f"{inside * 1e6:.0f} µs of {duration * 1e3:.0f} ms in each iteration: {share:.4%}")
    print(f"{changing} of the values of {modules} modules change, and are copied")
    result = {"machine": machine(), "flags": flags, "goal": GOAL, "share": share, "modules": modules}
    result |= {"changing": changing, "inside_s": inside, "iteration_s": duration}
    write_json(own.output, result)
    return 0 if say({f"recording module state takes at most {GOAL:.1%} of an iteration": share <= GOAL}) else 1


if __name__ == "__main__":
    sys.exit(main())
