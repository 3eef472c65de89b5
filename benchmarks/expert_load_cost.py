"""Measures the cost of reporting the load of experts, as a share of the iteration.

    torchrun --standalone --nproc-per-node 1 benchmarks/expert_load_cost.py --output docs/results/expert_load_cpu.json

Clocks around the functions of ``LoadCounter`` and of its report sum the time inside them, which is too short to appear
in the duration of an iteration.  The time is divided by the duration of the same iterations.  The load is reported in
each iteration (``--log-interval 1``), the most expensive setting.

Other flags are passed to the program.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND
from benchmarks.module_state_cost import SIZES, clocked, measure
from benchmarks.save_peers.trainer import begin

GOAL = 0.01
METHODS = ("_count", "keep", "take", "load")
REPORTS = ("sentence_of", "scalars_of", "fields_of")


def main() -> int:
    """Measures, prints the share, writes JSON; returns 1 if the goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=60, help="default: 60")
    own, flags = parser.parse_known_args()
    flags = [*KIND, *SIZES, "--log-interval", "1", *flags]
    import_module("moc.megatron")  # before the first import of megatron-core
    from megatron.pretraining.engine.routing import LoadCounter
    from megatron.pretraining.entry import log

    functions = [*((LoadCounter, name) for name in METHODS), *((log, name) for name in REPORTS)]
    with clocked(functions) as inside:  # before the routers get their hooks
        run, stop, _ = begin([*flags, "--train-iters", "1000"])
        measured = measure(run, stop, own.iterations, inside)
    seconds, duration = (fmean(one) for one in zip(*measured, strict=True))
    share = seconds / duration
    print(f"{seconds * 1e6:.0f} µs of {duration * 1e3:.0f} ms in each iteration: {share:.4%}")
    result = {"machine": machine(), "flags": flags, "goal": GOAL, "share": share}
    write_json(own.output, result | {"inside_s": seconds, "iteration_s": duration})
    return 0 if say({f"reporting the load of experts takes at most {GOAL:.0%} of an iteration": share <= GOAL}) else 1


if __name__ == "__main__":
    sys.exit(main())
