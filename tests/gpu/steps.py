"""What ``scripts/gpu_check.sh`` does, in the order of what is worth most."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A command under a time limit.

    Attributes:
        name: short, unique; also of the file with its output.
        proves: what holds if it passes.
        command: without the interpreter.
        limit_s: seconds after which it is ended.
        writes: file of ``docs/results`` that it writes, if any.
    """

    name: str
    proves: str
    command: tuple[str, ...]
    limit_s: int
    writes: str = ""

    def line(self, results: str) -> list[str]:
        """The command with its interpreter, and where it writes."""
        output = ["--output", f"{results}/{self.writes}"] if self.writes else []
        return [sys.executable, *self.command, *output]


def _tests(name: str, proves: str, limit_s: int, *files: str, only: str = "") -> Step:
    chosen = ("-k", only) if only else ()
    paths = (f"tests/gpu/{file}.py" for file in files)
    # the limit is the step's: then what has passed by then is told
    return Step(name, proves, ("-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, *chosen), limit_s)


STEPS = (
    _tests("capture", "what is copied beside training is what was there, in pieces and through the gate", 60,
           "test_capture", "test_logs"),
    _tests("kills", "workers killed at named points: EP2, every tensor saved, bit-identical to no kill", 120,
           "test_many_ranks", only="named_points"),
    _tests("groups", "NCCL groups survive two generations; what was in flight is not trusted", 60, "test_groups"),
    _tests("dispatch", "a layer of elastic training waits for the GPU only for counts of tokens", 60, "test_dispatch"),
    _tests("stages", "lost stages replay from logs: PP2 x EP2, windows, bit-identical", 150,
           "test_many_ranks", only="stage"),
    _tests("assert", "a survivor whose device has failed is replaced", 90, "test_many_ranks", only="survivor"),
    _tests("memory", "a killed worker that held more than half of the memory is replaced", 90,
           "test_many_ranks", only="half_of_gpu_memory"),
    _tests("precisions", "training in fp32, bf16 and fp16 resumes bit-identically", 150, "test_train",
           only="training_resumes"),
    _tests("launch", "a worker forked from a warm process takes over", 120, "test_launch"),
    Step("copies", "what copies cost iterations beside them, and the limits", ("benchmarks/device_copies.py",), 180,
         "gpu_copies.json"),
    _tests("generations", "20 generations in a row", 240, "test_many_ranks", only="twenty"),
    Step("training", "what snapshots cost a real model's iterations", ("benchmarks/device_training.py",), 400,
         "gpu_training.json"),
    _tests("fp8", "8-bit products, and Transformer Engine's layers where it is installed", 150, "test_fp8",
           "test_train", only="fp8 or 8_bits or linear"),
    _tests("attention", "attention of Transformer Engine and flash-attn, where they are installed", 120, "test_train",
           only="attention"),
    _tests("saving", "dense checkpoints beside training, and the CPU's adaptation leaves CUDA alone", 90, "test_train",
           only="async or adaptation"),
)  # fmt: skip
