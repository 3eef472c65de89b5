"""Runs of the previous release, and the program that recorded their state in ``tests/data/previous_release``.

The program runs a checkout of the previous release (d80881f2) with megatron-core 0.16.1, for which it was written::

    pip install --no-deps --target CORE megatron-core==0.16.1
    python -m tests.integration.previous_release CHECKOUT CORE

Each run stops after iteration 4.  Its state becomes an archive; the same release continues it, and the losses and
gradient norms of these iterations are recorded.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.worlds import REPOSITORY

DATA = REPOSITORY / "tests/data/previous_release"
PRINTED = DATA / "printed.yaml"
"""What ``--print-config`` printed for the run ``save``."""
STATE = "state"
STOP = 4
MODEL = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 16 --num-experts 4
    --topk 2 --moe-loss-coeff 0.01 --swiglu --no-squared-relu --disable-bias-linear --position-embedding-type rope
    --layernorm-epsilon 1e-5 --make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4
    --train-iters 8 --lr 1e-2 --log-interval 1 --eval-iters 0 --num-workers 0 --data-path corpus_text_document
    --split 969,30,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
"""
_SNAPSHOTS = f"--snapshot-interval 1 --ckpt-keep 1 --ckpt-dir {STATE}"
_SAVES = f"--save {STATE} --load {STATE}"
RUNS = {
    "save": _SAVES,
    "save-bf16": f"{_SAVES} --bf16 --use-distributed-optimizer",
    "gelu": f"{_SAVES} --no-swiglu --add-bias-linear --position-embedding-type learned_absolute --expert-interval 2",
    "qk-norm": f"--ckpt-policy full {_SNAPSHOTS} --qk-layernorm --qk-layernorm-full-width",
    "full": f"--ckpt-policy full {_SNAPSHOTS}",
    "sparse": f"--ckpt-policy sparse {_SNAPSHOTS} --sparse-window 2",
    "gradient": f"--ckpt-policy gradient --ckpt-tier memory --persist-interval 1 {_SNAPSHOTS}",
    "pec": f"--ckpt-policy pec {_SNAPSHOTS}",
    "selective": f"--ckpt-policy selective {_SNAPSHOTS} --selective-experts 2",
    "formats": f"--ckpt-policy sparse {_SNAPSHOTS} --sparse-window 2 --bf16 --exp-avg-dtype fp8 --fp8-format hybrid "
    "--exp-avg-sq-dtype fp16",
    "deepspeed": f"{_SAVES} --deepspeed --zero-stage 2",
}
"""Flags by the name of a run: one ``--save`` directory of each optimizer, and one snapshot of each policy."""


def archive(name: str) -> Path:
    """The archive of a run's state, or of the ``corpus``, which has data and tokenizer."""
    return DATA / f"{name}.tar.xz"


def unpack(name: str, directory: Path) -> None:
    """Extracts an archive."""
    with tarfile.open(archive(name)) as file:
        file.extractall(directory, filter="data")


def recorded() -> dict[str, dict[str, list[float]]]:
    """Loss and gradient norm of each iteration after the stop, by run and iteration."""
    return json.loads((DATA / "losses.json").read_text())


def _pack(name: str, directory: Path, *parts: str) -> None:
    with tarfile.open(archive(name), "w:xz") as file:
        for part in parts:
            file.add(directory / part, part)


def _write_corpus(directory: Path, checkout: Path, environment: dict[str, str]) -> None:
    """Makes a text, a tokenizer and data from it by the tools of the release."""
    words, draw = ["alpha", "beta", "gamma", "delta", "kappa", "omega"], random.Random(7)
    lines = [" ".join(draw.choices(words, k=draw.randint(4, 30))) for _ in range(40)]
    (directory / "text.txt").write_text("\n".join(lines))
    (directory / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    tokenizer = "--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model"
    for tool, flags in (
        ("train_tokenizer", "--input text.txt --output tokenizer --vocab-size 275"),
        ("preprocess_data", f"--input text.jsonl --output-prefix corpus {tokenizer} --append-eod"),
    ):
        command = [sys.executable, checkout / f"tools/{tool}.py", *flags.split()]
        subprocess.run(command, cwd=directory, env=environment, check=True)


def _program(directory: Path, checkout: Path, environment: dict[str, str], flags: str) -> str:
    command = [sys.executable, checkout / "pretrain_gpt_moe.py", *MODEL.split(), *flags.split()]
    return subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def _run(directory: Path, checkout: Path, environment: dict[str, str], flags: str, log: str) -> dict[str, list[float]]:
    _program(directory, checkout, environment, f"{flags} --log-dir {log}")
    events = map(json.loads, (directory / log / "events.jsonl").read_text().splitlines())
    return {str(e["iteration"]): [e["loss"], e["grad_norm"]] for e in events if e["type"] == "iteration"}


def main(checkout: Path, core: Path, names: list[str]) -> None:
    """Records the named runs, or all of them."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{core}"}
    DATA.mkdir(parents=True, exist_ok=True)
    losses = recorded() if names else {}
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place)
        if not names:
            _write_corpus(corpus, checkout, environment)
            _pack("corpus", corpus, "tokenizer.model", "corpus_text_document.bin", "corpus_text_document.idx")
            PRINTED.write_text(_program(corpus, checkout, environment, f"{RUNS['save']} --print-config"))
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            unpack("corpus", directory)
            _run(directory, checkout, environment, f"{RUNS[name]} --exit-interval {STOP}", "first")
            _pack(name, directory, STATE)
            losses[name] = _run(directory, checkout, environment, RUNS[name], "second")
        (DATA / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
