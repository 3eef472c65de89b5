"""Measures the overhead of Megatron-DeepSpeed's, asynchronous, and MoC-System's checkpoints (its Figures 10-12).

    python benchmarks/pec_overhead.py --output docs/results/pec_overhead_cpu.json
    python benchmarks/pec_overhead.py --methods swept --layouts DP4xEP2 --output docs/results/pec_swept_cpu.json
    python benchmarks/pec_overhead.py --methods rules --layouts DP4xEP2-replicated \\
        --output docs/results/pec_rules_cpu.json

All methods train the same model with the training program in 4 workers, one run after the other, in turns:

* Baseline: everything, blocking; rank 0 saves the dense state, the first expert-parallel group saves experts;
* Base-Async: the same in the background;
* MoC-Async: K_snapshot of 16 experts of each layer to memory and K_persist of these to storage, fully sharded.

``--methods swept`` is Figure 11: the baseline, and MoC-Async with the same K on both levels, from 1 to all 16.
``--methods rules`` are the schemes of Figure 10 without ZeRO, where several ranks hold the same state: everything, and
one expert of each layer, by EE, EE+EN and EE+AN.

Measured for each method (MoC-System, sections 6.2.3 and 6.2.5):

* how long training waits for a snapshot: O_save, the events ``stall``, means over workers;
* the additional duration of the iterations during a snapshot.  With fewer cores than workers it depends mostly on the
  machine;
* how long copying and hashing takes (T_snapshot), and writing and committing (T_persist);
* the shortest interval that storage sustains, I_ckpt: the time from the start of a snapshot to its commit in storage,
  in iterations, rounded up.  Each method then runs at this interval and at the next shorter one;
* bytes of all ranks and of the busiest one, in memory and in storage, compared with eq. 6.

Bytes refer to Format v1: 12 per parameter, masters and moments.  ZeRO distributes them over the ranks with any
sharding, so savings are due to PEC.  Writes JSON with every sample, and two plots next to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine_and_versions, show, write_json
from benchmarks.live.job import SHARED
from benchmarks.overhead import figures, report
from benchmarks.overhead.methods import BASE_ASYNC, BASELINE, DEFAULT, LAYOUTS, METHODS, SETS, model_flags, parameters
from benchmarks.overhead.watch import Watch
from benchmarks.save_peers import ours
from benchmarks.save_peers.cases import WORKERS
from benchmarks.save_peers.launching import OUTPUT, RunFailed, directory_in, train
from benchmarks.save_peers.rounds import WARM_UP, Plan

LEAST_EVERY = WARM_UP + 3  # iterations, some of them without a snapshot before the first one


class Bench:
    """Measures with sets of workers, in subdirectories of ``scratch``; ``own`` has the benchmark's flags."""

    def __init__(self, own: argparse.Namespace, scratch: str):
        self._own, self._scratch = own, scratch

    def measured(self, name: str, layout: str) -> dict:
        """Runs a method; raises :class:`RunFailed` or ValueError, as the two methods below."""
        return self._saving(name, layout, self._own.every, self._own.saves, figures.measured)

    def followed(self, name: str, layout: str, every: int) -> dict:
        """Runs a method with a snapshot every ``every`` iterations."""
        count = self._own.follow
        read = lambda events, *_: figures.followed(events, every, snapshots=count)  # noqa: E731
        # one more, so that the last counted one is written before the end of the run
        return self._saving(name, layout, every, count + 1, read)

    def forward_backward_share(self, layout: str) -> float:
        """Returns the share of forward and backward in an iteration without snapshots."""
        with directory_in(self._scratch) as directory:
            flags = [*ours.plain_flags(Plan(directory, 0, 0, self._own.every), directory), "--timing-log-level", "1"]
            events = self._train(layout, flags, directory)
            elapsed = [event["elapsed_s"] for event in events if event["type"] == "iteration"]
            return figures.forward_backward_share((directory / OUTPUT).read_text(encoding="utf-8"), elapsed)

    def _saving(self, name: str, layout: str, every: int, saves: int, read) -> dict:
        shared = tempfile.TemporaryDirectory(prefix="pec_overhead-", dir=SHARED)
        with directory_in(self._scratch) as directory, shared as memory:
            plan = Plan(directory / "checkpoints", saves, every, plain=0)
            flags = ours.saving_flags(METHODS[name].flags(every), plan, directory, memory)
            with Watch(plan.directory, Path(memory)) as watch:
                events = self._train(layout, flags, directory)
            return read(events, watch.sizes, plan)

    def _train(self, layout: str, flags: list[str], directory: Path) -> list[dict]:
        return train([*model_flags(self._own.quick, layout, self._own.hidden_size), *flags], directory, directory)


def measure_layout(bench: Bench, layout: str, own: argparse.Namespace) -> dict:
    """Runs all methods of one layout in turns, forwards and backwards."""
    samples, failed = {name: [] for name in own.methods}, {}
    for turn in range(own.turns):
        for name in own.methods if turn % 2 == 0 else own.methods[::-1]:
            _attempt(f"turn {turn + 1}, {layout}", name, failed, lambda n: samples[n].append(bench.measured(n, layout)))
    samples = {name: runs for name, runs in samples.items() if runs and name not in failed}
    if not samples:
        raise RunFailed(f"nothing could be measured with {layout}: {failed}")
    iteration_s = figures.pooled_iteration_s(samples)
    summaries = {name: figures.summary(runs, iteration_s, METHODS[name].blocking) for name, runs in samples.items()}
    followed = {}
    for name in (name for name in summaries if own.follow and not METHODS[name].blocking):
        for every in shortest(summaries[name]["interval"]):
            checks = followed.setdefault(name, [])
            what = f"a snapshot every {every}, {layout}"
            _attempt(what, name, failed, lambda n, c=checks, e=every: c.append(bench.followed(n, layout, e)))
    baseline, base_async = summaries.get(BASELINE), summaries.get(BASE_ASYNC)
    return {
        "iteration_s": iteration_s,
        "forward_backward_s": bench.forward_backward_share(layout) * iteration_s,
        "methods": summaries,
        "ratios": {n: figures.against(s, baseline, base_async) for n, s in summaries.items() if METHODS[n].two_levels},
        "of_baseline": {
            n: figures.of_baseline(s, baseline) for n, s in summaries.items() if baseline and n != BASELINE
        },
        "followed": followed,
        "sizes": _sizes(summaries, model_flags(own.quick, hidden_size=own.hidden_size)),
        "failed": failed,
        "samples": samples,
    }


def shortest(interval: int) -> list[int]:
    """Returns the interval that storage should sustain, and the next shorter one, if any."""
    return [interval, interval - 1] if interval > 1 else [interval]


def _attempt(what: str, name: str, failed: dict[str, str], run) -> None:
    print(f"{what}: {METHODS[name].label} ...", file=sys.stderr, flush=True)
    try:
        run(name)
    except (RunFailed, ValueError) as error:
        print(error, file=sys.stderr)
        failed[name] = str(error).splitlines()[0]


def _sizes(summaries: dict[str, dict], model: list[str]) -> dict[str, dict]:
    from benchmarks.papers.equations import pec_size
    from moc.sharding.save_items import StateBytes

    counts, state, told = parameters(model), StateBytes(weights=0), {}
    for name, s in summaries.items():
        chosen = METHODS[name].k or (counts["num_experts"],) * len(figures.LEVELS)
        sizes = [pec_size(counts["others"], counts["experts"], k, counts["num_experts"], state) for k in chosen]
        told[name] = {"measured": s["bytes"], "equation": dict(zip(figures.LEVELS, sizes, strict=True))}
    return told


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the benchmark's flags."""
    parser = command_line(__doc__, "JSON file; the plot is written to the same directory")
    names = f"{', '.join(METHODS)}; or a set of them: {', '.join(SETS)}"
    choices = [*METHODS, *SETS]
    parser.add_argument("--methods", nargs="+", choices=choices, default=list(DEFAULT), metavar="METHOD", help=names)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["DP4xEP4"], help="default: DP4xEP4")
    parser.add_argument("--turns", type=int, default=2, help="runs of each method (default: 2)")
    parser.add_argument("--saves", type=int, default=2, help="snapshots of a run after the first one (default: 2)")
    parser.add_argument("--every", type=int, default=10, help="iterations between them (default: 10)")
    parser.add_argument("--follow", type=int, default=6, help="snapshots at the shortest interval (default: 6)")
    parser.add_argument("--quick", action="store_true", help="a model of 2.2 M parameters, to try the benchmark")
    parser.add_argument("--hidden-size", type=int, help="of the model, where 512 takes too long (256: 37 M parameters)")
    parser.add_argument("--directory", type=Path, help="where to save (default: the directory for temporary files)")
    own = parser.parse_args(arguments)
    own.methods = list(dict.fromkeys(name for one in own.methods for name in SETS.get(one, (one,))))
    if own.every < LEAST_EVERY:
        parser.error(f"--every {own.every} leaves no iterations without a snapshot: take {LEAST_EVERY} or more")
    if own.turns < 1 or own.saves < 1 or own.follow < 0:
        parser.error("--turns and --saves must be 1 or more, and --follow 0 or more")
    return own


def main() -> int:
    """Measures, prints tables, writes JSON and a plot; returns 1 if a run failed."""
    own = parse()
    with tempfile.TemporaryDirectory(prefix="pec_overhead-", dir=own.directory) as scratch:
        bench = Bench(own, scratch)
        layouts = {layout: measure_layout(bench, layout, own) for layout in own.layouts}
    show(report.WIDTH, ((report.table(layout, told), report.lines(told)) for layout, told in layouts.items()))
    if own.output:
        write_json(own.output, describe(own) | {"layouts": layouts})
        report.plot(layouts, own.output.with_suffix(".png"))
        report.plot_durations(layouts, own.output.with_name(f"{own.output.stem}_durations.png"))
    return int(any(told["failed"] for told in layouts.values()))


def describe(own: argparse.Namespace) -> dict:
    """Returns the machine, versions, flags and plan of the measurement."""
    flags = model_flags(own.quick, hidden_size=own.hidden_size)
    return machine_and_versions() | {
        "workers": WORKERS,
        "flags": flags,
        "parameters": parameters(flags),
        "methods": {name: METHODS[name].flags(own.every) for name in own.methods},
        "plan": {"turns": own.turns, "saves": own.saves, "every": own.every, "follow": own.follow},
    }


if __name__ == "__main__":
    sys.exit(main())
