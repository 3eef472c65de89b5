"""Measures the cost of records in each iteration (monitoring, expert load, digests), as a share of its duration.

    torchrun --standalone --nproc-per-node 1 benchmarks/monitor_cost.py --output docs/results/monitor_cost_cpu.json

Clocks around the functions that run in the training thread sum the time inside them.  The time is divided by the
duration of the same iterations.  Functions that call each other count twice, so the share is an upper bound.

* ``--of monitoring``: TensorBoard, stand-ins of W&B and MLflow that take a millisecond for each call, page and metrics
  of the first worker, snapshots in each iteration;  ``--of nothing``: the same functions without these flags;
* ``--of expert-load``: counts and reports of the load of experts;
* ``--of digests``: digests of the state, with snapshots in each iteration.

Other flags are passed to the program.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import IN_MEMORY, KIND
from benchmarks.save_peers.trainer import begin

SIZES = """--hidden-size 256 --ffn-hidden-size 512 --num-experts 8 --seq-length 128 --max-position-embeddings 128
    --vocab-size 1023 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 8 --lr 1e-3""".split()
GOALS = {"monitoring": 0.002, "nothing": 0.0001, "expert-load": 0.01, "digests": 0.01}
WARM_UP = 5  # iterations; the first ones record everything
SERVICE_S = 0.001  # for each call
CALLS = {
    "wandb": ("init", "log", "finish"),
    "mlflow": ("set_experiment", "search_runs", "start_run", "log_metrics", "set_tag", "end_run"),
}


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


def stand_in(name: str) -> ModuleType:
    """Returns a module in the place of a service, whose functions take a millisecond."""

    def call(*arguments, **options) -> tuple:
        time.sleep(SERVICE_S)
        return ()

    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(dict.fromkeys(CALLS[name], call))
    return module


def enabled(directory: str) -> list[str]:
    """Returns the flags that enable all monitoring."""
    sys.modules.update({name: stand_in(name) for name in CALLS})
    flags = ["--log-dir", directory, "--tensorboard-dir", f"{directory}/board", "--tensorboard-log-interval", "1"]
    flags += ["--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", directory]
    flags += ["--mlflow-experiment", "e", "--metrics-port", "0", "--dashboard-port", "0"]
    return [*flags, *IN_MEMORY, "--ckpt-dir", f"{directory}/snapshots"]


def main() -> int:
    """Measures, prints the share, writes JSON; returns 1 if the goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=60, help="default: 60")
    parser.add_argument("--of", choices=GOALS, default="monitoring", help="default: monitoring")
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="monitor-cost-") as directory:
        snapshots = [*IN_MEMORY, "--ckpt-dir", f"{directory}/snapshots"]
        own_flags = enabled(directory) if own.of == "monitoring" else snapshots if own.of == "digests" else []
        import_module("moc.megatron")  # before the first import of megatron-core
        from megatron.pretraining.engine.routing import LoadCounter
        from megatron.pretraining.entry import log
        from megatron.pretraining.logging.writers import Board, MlflowWriter, WandbWriter
        from moc.session.digests import Digests

        functions = [(log.StockLog, name) for name in ("_plot", "_plot_event", "_measure")]
        functions += [(Board, "add_scalar"), (WandbWriter, "log"), (MlflowWriter, "add_scalars")]
        if own.of == "digests":
            functions = [(Digests, name) for name in ("completed", "contribution", "on_totals")]
        elif own.of == "expert-load":
            functions = [(LoadCounter, name) for name in ("_count", "keep", "take", "load")]
            functions += [(log, name) for name in ("sentence_of", "scalars_of", "fields_of")]
        with clocked(functions) as inside:  # before the routers get their hooks
            run, stop, _ = begin([*KIND, *SIZES, *own_flags, "--log-interval", "1", "--train-iters", "1000", *flags])
            measured = measure(run, stop, own.iterations, inside)
        seconds, duration = (fmean(one) for one in zip(*measured, strict=True))
        run.log.close()
    share = seconds / duration
    print(f"{seconds * 1e6:.0f} µs of {duration * 1e3:.0f} ms in each iteration: {share:.4%}")
    goal = GOALS[own.of]
    result = {"machine": machine(), "flags": flags, "of": own.of, "goal": goal, "share": share}
    write_json(own.output, result | {"inside_s": seconds, "iteration_s": duration})
    return 0 if say({f"{own.of}: at most {goal:.2%} of an iteration": share <= goal}) else 1


if __name__ == "__main__":
    sys.exit(main())
