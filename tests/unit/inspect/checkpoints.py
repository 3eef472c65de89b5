"""Small checkpoints for the tests of the checkpoint tools: of two workers, made without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from moc.state.operators import regions_of_range
from moc.store import dense_files
from moc.store.shard_file import BoxTensor, write_shard_file

TENSORS = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.pre_mlp_layernorm.weight": (4,),
    "decoder.layers.0.mlp.router.weight": (2, 4),
    "decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight": (6, 4),
    "decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight": (6, 4),
    "decoder.layers.1.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.1.mlp.linear_fc1.weight": (6, 4),
    "decoder.final_layernorm.weight": (4,),
}
PARAMETERS = sum(map(math.prod, TENSORS.values()))
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SLOTS = ("master", "exp_avg", "exp_avg_sq")
STATE = {
    "consumed_samples": 24,
    "skipped_iterations": 1,
    "optimizer": "adam",
    "optimizer_step": 2,
    "grad_scaler": {"scale": [65536.0]},
    "shape": {"num_layers": 2, "hidden_size": 4, "num_experts": 2, "moe_layer_freq": 2},
}


def entries() -> list[list[BoxTensor]]:
    """What each worker saves: its half of every flattened tensor, as ZeRO cuts it."""
    return [[entry for slot in SLOTS for entry in _half(slot, worker)] for worker in (0, 1)]


def _half(slot: str, worker: int) -> Iterator[BoxTensor]:
    for name, shape in TENSORS.items():
        middle = math.prod(shape) // 2 - 1  # in the middle of a row
        start, stop = ((0, middle), (middle, math.prod(shape)))[worker]
        for _, box in regions_of_range(shape, start, stop):
            yield BoxTensor(name, slot, shape, box, torch.randn(box.shape))


def save(root: Path, iteration: int = 3, workers: list[list[BoxTensor]] | None = None, **state) -> Path:
    """Publishes a checkpoint whose files are as listed, whatever they hold."""
    staging = dense_files.begin_save(root, iteration)
    (staging / "optimizer").mkdir()
    for worker, boxes in enumerate(entries() if workers is None else workers):
        write_shard_file(staging / "optimizer" / f"rank_{worker:05d}.safetensors", boxes)
    for name in (".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        (staging / name).write_bytes(name.encode() * 100)
    (staging / dense_files.STATE_FILE).write_text(json.dumps({"iteration": iteration} | STATE | state))
    return publish(root, iteration)


def publish(root: Path, iteration: int) -> Path:
    """Publishes what is staged."""
    staging = dense_files.staging_path(root, iteration)
    names = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    return dense_files.publish_save(
        root, iteration, {name: dense_files.describe_file(staging / name) for name in names}
    )


def publish_again(directory: Path) -> Path:
    """Lists the files of a checkpoint anew, as they are now."""
    root, iteration = directory.parent, int(directory.name[5:])
    directory.rename(dense_files.staging_path(root, iteration))
    (dense_files.staging_path(root, iteration) / dense_files.MANIFEST).unlink()
    return publish(root, iteration)
