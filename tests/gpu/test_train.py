"""The program on one GPU: it trains in every precision, and resumes where it stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 256
    --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights
    --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0 --log-interval 5 --log-throughput
    --deterministic-mode --transformer-impl local""".split()

ZERO = ("--use-distributed-optimizer",)
MOMENTS = ("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp16")


def train(log_dir, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(ROOT / "pretrain_gpt_moe.py"), *FLAGS, "--log-dir", str(log_dir), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    events = map(json.loads, (log_dir / "events.jsonl").read_text().splitlines())
    return {e["iteration"]: e["loss"] for e in events if e["type"] == "iteration"}, done.stdout


PRECISIONS = [
    ZERO,
    (*ZERO, "--bf16"),
    (*ZERO, "--fp16", "--initial-loss-scale", "65536"),
    (*ZERO, "--bf16", *MOMENTS),
    ("--bf16",),
]
STATES = [ZERO, MOMENTS]
ASYNC = "--bf16 --use-distributed-optimizer --async-save --save-interval 5".split()


def in_8_bits(layers, state):
    return ["--transformer-impl", layers, "--bf16", "--fp8-format", "hybrid", *state]


def with_attention(backend):
    return ["--transformer-impl", "transformer_engine", "--attention-backend", backend, "--bf16", *ZERO]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_resumes_bit_identically(tmp_path, precision):
    whole, output = train(tmp_path / "whole", *precision)
    assert whole[20] < whole[1] - 0.5
    assert "TFLOP/s/GPU" in output
    saved = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", *precision]
    first, _ = train(tmp_path / "first", *saved, "--exit-interval", 10)
    second, _ = train(tmp_path / "second", *saved)
    assert first | second == whole


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
@pytest.mark.parametrize("state", STATES)
def test_training_in_8_bits_resumes_bit_identically(tmp_path, state, layers):
    if layers == "transformer_engine":
        pytest.importorskip("transformer_engine")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in 8 bits")
    eight = in_8_bits(layers, state)
    whole, _ = train(tmp_path / "whole", *eight)
    assert whole[20] < whole[1] - 0.5
    saved = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", *eight]
    first, _ = train(tmp_path / "first", *saved, "--exit-interval", 10)
    second, _ = train(tmp_path / "second", *saved)
    assert first | second == whole


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_transformer_engine_attention_resumes_bit_identically(tmp_path, backend):
    pytest.importorskip("transformer_engine")
    if backend == "flash":
        pytest.importorskip("flash_attn")
    kernel = with_attention(backend)
    whole, _ = train(tmp_path / "whole", *kernel)
    saved = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", *kernel]
    first, _ = train(tmp_path / "first", *saved, "--exit-interval", 10)
    second, _ = train(tmp_path / "second", *saved)
    assert first | second == whole


def test_async_save_in_background_resumes_bit_identically(tmp_path):
    saved = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", *ASYNC]
    first, _ = train(tmp_path / "first", *saved, "--exit-interval", 10)
    second, _ = train(tmp_path / "second", *saved)
    whole, _ = train(tmp_path / "whole", "--bf16", *ZERO)
    assert first | second == whole


def test_cpu_adaptation_does_not_change_cuda():
    script = """
import torch
before = (torch.cuda.Stream, torch.cuda.synchronize, torch.Tensor.cuda, torch.empty, torch.Tensor.type)
from megatron.pretraining.process import cpu
cpu.install()
assert before == (torch.cuda.Stream, torch.cuda.synchronize, torch.Tensor.cuda, torch.empty, torch.Tensor.type)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
