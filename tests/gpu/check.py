"""Runs the steps of ``scripts/gpu_check.sh``, each under its limit and all under one; writes JSON and a page.

    python -m tests.gpu.check [--minutes 8] [--only NAME...] [--results docs/results] [--logs DIR]

The exit code is 0 if all steps that were run have passed, 1 if one has not, 2 where there is no NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.common import machine, write_json
from moc.cli_output import Parser
from tests.gpu.steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("transformer-engine", "flash-attn", "deepspeed", "megatron-core", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
PASSED, FAILED, SKIPPED, LATE, NOT_RUN = "passed", "FAILED", "skipped", "FAILED: out of time", "not run: no time left"


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        name: of the step.
        proves: what it proves, if it passed.
        result: one of this module's five.
        seconds: that it took.
        told: last line that it printed.
    """

    name: str
    proves: str
    result: str
    seconds: float = 0.0
    told: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it shows that something does not hold."""
        return self.result in (FAILED, LATE)


def run(step: Step, limit_s: float, results: str, log: Path) -> Outcome:
    """Runs a step; what it leaves running at its limit is killed."""
    begun, late = time.monotonic(), False
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="moc-gpu-", dir="/dev/shm") as memory:
        environment = os.environ | {"TEST_MEMORY": memory}
        process = subprocess.Popen(
            step.line(results),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        if late:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    told = re.sub(r"^=+ | =+$", "", lines[-1]) if lines else ""
    result = LATE if late else _result(process.returncode, told)
    return Outcome(step.name, step.proves, result, time.monotonic() - begun, told)


def _result(code: int, told: str) -> str:
    if code:
        return FAILED
    return SKIPPED if "skipped" in told and "passed" not in told else PASSED


def check(steps: Iterable[Step], seconds: float, results: str, logs: Path) -> list[Outcome]:
    """Runs steps in order, as far as the time goes; tells each as it ends."""
    end, outcomes = time.monotonic() + seconds, []
    for step in steps:
        left = end - time.monotonic()
        if left < 1:
            outcomes.append(Outcome(step.name, step.proves, NOT_RUN))
        else:
            outcomes.append(run(step, min(left, step.limit_s), results, logs / f"{step.name}.log"))
        told = outcomes[-1]
        print(f"{told.name:12} {told.result:22} {told.seconds:6.1f} s  {told.told}", flush=True)
    return outcomes


def described() -> dict:
    """The device, and versions of what works on it."""
    import torch
    from torch.cuda import nccl

    found = machine() | {"gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}
    found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
    for name in OPTIONAL:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def page(outcomes: Sequence[Outcome], about: dict) -> str:
    """The page of ``docs/results``."""
    bad = sum(outcome.is_bad for outcome in outcomes)
    passed = sum(outcome.result == PASSED for outcome in outcomes)
    rows = [f"| {one.proves} | {one.result} | {one.seconds:.0f} s | {one.told.replace('|', '/')} |" for one in outcomes]
    facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "gpus")
    return "\n".join(
        [
            "# Does it work on a GPU?",
            "",
            f"**{passed} of {len(outcomes)} steps passed, {bad} failed**, on {' and '.join(about['gpus'])} ({facts}).",
            "",
            "    ./scripts/gpu_check.sh",
            "",
            "| what | result | took | told |",
            "|---|---|---|---|",
            *rows,
            "",
            "How to read it, and what to do about a failure: [check a GPU](../how-to/check-a-gpu.md). Samples are in",
            "`gpu_check.json`, and of benchmarks in `gpu_*.json`, beside this page.",
            "",
        ]
    )


def main() -> int:
    """Checks, writes, and returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all steps")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="steps, by name")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="directory for JSON and page")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "gpu_check", help="directory for outputs of steps")
    own = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use here: run this where there is one.", file=sys.stderr)
        return 2
    own.logs.mkdir(parents=True, exist_ok=True)
    own.results.mkdir(parents=True, exist_ok=True)
    about = described()
    print(about, flush=True)
    steps = [step for step in STEPS if own.only is None or step.name in own.only]
    outcomes = check(steps, 60 * own.minutes, str(own.results.resolve()), own.logs)
    write_json(own.results / "gpu_check.json", {"machine": about, "steps": [asdict(one) for one in outcomes]})
    (own.results / "gpu-check.md").write_text(page(outcomes, about))
    print(f"Written: {own.results / 'gpu-check.md'}; outputs of steps: {own.logs}")
    return int(any(one.is_bad for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
