"""Compares the logits of a model in this program and in transformers, each in its own process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from moc.runtime import child_processes
from moc.store.errors import CheckpointError

_HERE = "megatron.pretraining.convert.hugging_face"
_SHAPE = (2, 32)  # sequences and tokens
CLOSE = 1e-4
"""Maximum difference relative to the largest logit, in fp32; caused by the order of sums."""


@dataclass(frozen=True)
class Asked:
    """Two models to compare.

    Attributes:
        ours: an ``iter_*`` directory.
        theirs: a directory of transformers.
        model: the model in Megatron-LM's options.
        dtype: dtype of its weights.
        allow_stale, trust: as on the command line.
    """

    ours: Path
    theirs: Path
    model: Mapping[str, Any]
    dtype: str | None
    allow_stale: bool
    trust: bool


def compare_logits(asked: Asked) -> str:
    """Computes the difference between both models' logits on random tokens, as a sentence.

    Raises:
        CheckpointError: they are not close, or one of the models cannot be computed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            "--check-logits needs the package transformers. Fix: pip install transformers",
            code="package-missing",
        )
    length = min(_SHAPE[1], asked.model["max_position_embeddings"])
    tokens = numpy.random.default_rng(1).integers(0, asked.model["vocab_size"], (_SHAPE[0], length))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        numpy.save(root / "tokens.npy", tokens)
        ask = dict(source=str(asked.ours.resolve()), allow_stale=asked.allow_stale, trust=asked.trust,
                   dtype=asked.dtype, model=dict(asked.model), tokens=str(root / "tokens.npy"),
                   into=str(root / "ours.npy"))  # fmt: skip
        (root / "asked.json").write_text(json.dumps(ask), encoding="utf-8")
        _run("megatron_logits", str(root / "asked.json"))
        _run("transformers_logits", str(asked.theirs.resolve()), str(root / "tokens.npy"), str(root / "theirs.npy"))
        ours, theirs = (numpy.load(root / f"{name}.npy") for name in ("ours", "theirs"))
    return _judged(ours, theirs)


def _judged(ours: numpy.ndarray, theirs: numpy.ndarray) -> str:
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"our logits have the shape {ours.shape}, and the logits of transformers {theirs.shape}. Fix: convert "
            "again, and report the model if they still differ",
            code="logits-differ",
        )
    apart, largest = float(numpy.abs(ours - theirs).max()), float(numpy.abs(theirs).max())
    if not apart <= CLOSE * max(largest, 1.0):  # the comparison is false for NaNs
        raise CheckpointError(
            f"the models differ: their logits are up to {apart:.2g} apart, and the largest is {largest:.2g}. Fix: "
            "compare the files that were written, which stay, and do not use them",
            code="logits-differ",
        )
    return f"logits are at most {apart:.1e} apart, of {largest:.2g} (fp32, {ours.shape[0] * ours.shape[1]} tokens)"


def _run(module: str, *arguments: str) -> None:
    done = subprocess.run(
        child_processes.module_command(f"{_HERE}.{module}", *arguments), capture_output=True, text=True
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        whose = "our model" if module == "megatron_logits" else "transformers"
        raise CheckpointError(
            f"the logits of {whose} could not be computed: {lines[-1]}. Fix: install the packages that the line "
            "names, or drop --check-logits",
            code="logits-not-computed",
        )
