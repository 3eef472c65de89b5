"""Compares the training overhead of saving: ours, torch's, megatron-core's and DeepSpeed's, on one machine in one run.

    python benchmarks/save_stall.py --output docs/results/save_stall_cpu.json --deepspeed-python /path/to/python

Comparison with DeepSpeed's own saving, with its ZeRO-2 under our loop (``docs/results/saving-deepspeed.md``):

    python benchmarks/save_stall.py --layouts DP4xEP2 --cases zero2-memory zero2-disk zero2-blocking \\
        deepspeed-blocking deepspeed-fast deepspeed-decoupled --output docs/results/save_deepspeed_cpu.json

Each case trains a model of 151 M parameters (8 experts per layer) in 4 separate processes, one case after the other:
bf16 weights, fp32 masters and moments, sharded by ZeRO.  It saves every few iterations.  Measured are

* the time that training waits (stall), from the arrival of the last worker until the last one continues: in the call
  that saves, and in each later wait for it;
* the time that a save adds to the iterations until the checkpoint is complete (overhead);
* when the bytes are on disk; all libraries keep two checkpoints, and each save finds the disk idle;
* the bytes copied in memory before they are written, for each saved byte (copies).

Other libraries save 14 bytes per parameter; ours saves masters and moments, 12 bytes, since masters determine weights.
The program also measures the limits of 4 processes that only copy, write or read the same bytes.  With fewer cores than
processes the overhead of asynchronous saves depends on the machine; stall, bytes and copies are then more meaningful.

Writes JSON with every sample, and a plot next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine_and_versions, show, write_json
from benchmarks.live.job import SHARED
from benchmarks.save_peers import ours, report
from benchmarks.save_peers.cases import CASES, DEEPSPEED, LAYOUTS, OURS, WORKERS, Case, left_out, model_flags
from benchmarks.save_peers.launching import TORCHRUN, RunFailed, directory_in, launch, train
from benchmarks.save_peers.rounds import Plan, forget


class Bench:
    """Measures with sets of workers, in subdirectories of ``scratch``; ``own`` has the benchmark's flags."""

    def __init__(self, own: argparse.Namespace, scratch: str):
        self._own, self._scratch, self._flags = own, scratch, model_flags(own.quick)

    def case(self, case: Case, layout: str) -> dict:
        """Measures one case; raises :class:`RunFailed`."""
        run = self._ours if case.program == OURS else self._peer
        with directory_in(self._scratch) as directory:
            return run(case, self._program(layout, case.engine), directory, self._plan(directory / "checkpoints"))

    def plain(self, layout: str, engine: tuple[str, ...]) -> list[float]:
        """Returns the seconds of our program's iterations without saves."""
        with directory_in(self._scratch) as directory:
            own = ours.plain_flags(self._plan(directory), directory / "plain")
            events = train([*self._program(layout, engine), *own], directory, directory / "plain")
            return ours.plain_seconds(events)

    def limits(self, size: int) -> dict:
        """Measures the machine's limits for this many bytes."""
        with directory_in(self._scratch) as directory:
            (directory / "files").mkdir()
            flags = ["--bytes", str(size), "--directory", str(directory / "files")]
            return self._module(sys.executable, "limits", flags, directory)

    def _program(self, layout: str, engine: tuple[str, ...]) -> list[str]:
        return [*self._flags, *LAYOUTS[layout], *engine]

    def _plan(self, directory: Path) -> Plan:
        return Plan(directory, self._own.saves, self._own.every, self._own.plain)

    def _peer(self, case: Case, flags: list[str], directory: Path, plan: Plan) -> dict:
        python = self._own.deepspeed_python if case.program == DEEPSPEED else sys.executable
        counts = ["--saves", plan.saves, "--every", plan.every, "--plain", plan.plain]
        own = ["--mode", case.mode, "--directory", plan.directory, *counts]
        return self._module(python, case.program, [*map(str, own), *flags], directory)

    def _ours(self, case: Case, flags: list[str], directory: Path, plan: Plan) -> dict:
        saving, loading = directory / "saving", directory / "loading"
        with tempfile.TemporaryDirectory(prefix="save_stall-", dir=SHARED) as memory:
            events = train([*flags, *ours.saving_flags(case.mode, plan, saving, memory)], directory, saving)
            measured = ours.rounds(events, plan)
            if case.keeps == "disk" and not case.blocking:
                for path in filter(Path.is_file, plan.directory.rglob("*")):
                    forget(path)
                events = train([*flags, *ours.loading_flags(case.mode, plan, loading, memory)], directory, loading)
                measured["load_s"] = ours.load_seconds(events)
        return measured

    def _module(self, python: str, module: str, flags: list[str], directory: Path) -> dict:
        result = directory / "result.json"
        launch([python, *TORCHRUN, "-m", f"benchmarks.save_peers.{module}", "--result", str(result), *flags], directory)
        return json.loads(result.read_text())


def measure_layout(bench: Bench, layout: str, own: argparse.Namespace, deepspeed: str | None) -> dict:
    """Runs all cases of one layout, one after the other."""
    told = {"cases": {}, "samples": {}, "left_out": {}, "limits": None}
    plain: dict[tuple[str, ...], list[float]] = {}  # by engine
    for name in own.cases:
        case = CASES[name]
        if reason := left_out(case, layout, deepspeed):
            told["left_out"][name] = reason
            continue
        print(f"{layout}: {case.label} ...", file=sys.stderr, flush=True)
        try:
            if case.program == OURS and case.engine not in plain:
                plain[case.engine] = bench.plain(layout, case.engine)
            measured = bench.case(case, layout)
        except (RunFailed, ValueError) as error:
            print(error, file=sys.stderr)
            told["left_out"][name] = f"failed: {str(error).splitlines()[0]}"
            continue
        measured.setdefault("plain_s", plain.get(case.engine))
        told["samples"][name] = measured
        told["cases"][name] = report.summary(measured, own.every, measured["plain_s"])
        if "load_s" in measured:
            told["cases"][name]["load_s"] = measured["load_s"]
    return told


def state_bytes(flags: list[str]) -> int:
    """Returns the bytes of masters and moments of the model that the flags describe."""
    from megatron.pretraining.entry.offline import config_of_words
    from megatron.pretraining.planning.model import meta_operators

    config = config_of_words([*flags, "--train-iters", "1"], None)
    tokens = config.tokenizer.vocab_size
    assert tokens is not None
    return 12 * sum(operator.parameters for operator in meta_operators(config, None, tokens + 1))  # NullTokenizer: + 1


def deepspeed_version(python: str) -> str | None:
    """Returns the version of DeepSpeed that an interpreter imports; None if it imports none."""
    asked = [python, "-c", "from importlib.metadata import version; import deepspeed; print(version('deepspeed'))"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    except OSError:
        return None
    return told.stdout.split()[-1] if told.returncode == 0 else None


def parse() -> argparse.Namespace:
    """Parses the benchmark's flags."""
    parser = command_line(__doc__, "JSON file; the plot is written to the same directory")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--saves", type=int, default=3, help="saves after the first one (default: 3)")
    parser.add_argument("--every", type=int, default=3, help="iterations between saves (default: 3)")
    parser.add_argument("--plain", type=int, default=4, help="iterations without saves (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a model of 0.2 M parameters, to try the benchmark")
    parser.add_argument("--directory", type=Path, help="where to save (default: the directory for temporary files)")
    parser.add_argument("--no-limits", action="store_true", help="leave out what the machine can do")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="a Python that has DeepSpeed")
    return parser.parse_args()


def main() -> int:
    """Measures, prints tables, writes JSON and a plot; returns 1 if a case failed."""
    own = parse()
    compared = any(CASES[name].program == DEEPSPEED for name in own.cases)
    deepspeed = deepspeed_version(own.deepspeed_python) if compared else None
    with tempfile.TemporaryDirectory(prefix="save_stall-", dir=own.directory) as scratch:
        bench = Bench(own, scratch)
        limits = None if own.no_limits else bench.limits(state_bytes(model_flags(own.quick)))
        layouts = {layout: measure_layout(bench, layout, own, deepspeed) for layout in own.layouts}
    for told in layouts.values():
        told["limits"], told["ratios"] = limits, report.ratios(told["cases"], limits)
        told["beside"] = report.beside(told["cases"])
    show(report.WIDTH, ((report.table(layout, told), report.lines(told)) for layout, told in layouts.items()))
    if own.output:
        write_json(own.output, describe(own, deepspeed) | {"layouts": layouts})
        report.plot(layouts, own.output.with_suffix(".png"))
    return int(any(why.startswith("failed") for told in layouts.values() for why in told["left_out"].values()))


def describe(own: argparse.Namespace, deepspeed: str | None) -> dict:
    """Returns the machine, versions, flags and plan of the measurement."""
    described = machine_and_versions()
    described["versions"]["deepspeed"] = deepspeed
    return described | {
        "workers": WORKERS,
        "flags": model_flags(own.quick),
        "plan": {"saves": own.saves, "every": own.every, "plain": own.plain},
        "notes": {name: CASES[name].notes for name in own.cases if CASES[name].notes},
    }


if __name__ == "__main__":
    sys.exit(main())
