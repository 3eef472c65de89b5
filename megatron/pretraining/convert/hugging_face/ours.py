"""Logits by our model, of a checkpoint: a program of its own, as :mod:`reference` is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from torch.distributed import HashStore  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]  # not in __all__

from megatron.pretraining.convert.contents import DTYPES, ConvertedState, whole_of  # noqa: E402
from megatron.pretraining.convert.hugging_face.recorded import composed  # noqa: E402
from megatron.pretraining.convert.source import contents_of, weights_of  # noqa: E402
from megatron.pretraining.model.build import build_gpt, transformer_config  # noqa: E402
from megatron.pretraining.model.parameters import unpartitioned_buffers, unpartitioned_parameters  # noqa: E402
from moc.files.decode import parse  # noqa: E402
from moc.files.tree import SMALL, Tree  # noqa: E402
from moc.state.operators import is_module_state  # noqa: E402


def main(asked: str) -> int:
    """Writes the logits, fp32 of shape (sequences, tokens, vocabulary), that a file of :mod:`logits` asks for."""
    ask = parse(Tree(Path(asked).parent).read(Path(asked).name, SMALL))
    contents = contents_of(Path(ask["source"]), ask["allow_stale"], ask["trust"])
    weights = weights_of(contents, DTYPES.get(ask["dtype"] or ""))
    tokens = torch.from_numpy(numpy.load(ask["tokens"]))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    numpy.save(ask["into"], _logits(ask["model"], weights, tokens, DTYPES.get(ask["dtype"] or "")))
    dist.destroy_process_group()
    return 0


def _logits(
    values: Mapping[str, Any], weights: ConvertedState, tokens: torch.Tensor, rounded: torch.dtype | None
) -> numpy.ndarray:
    config, length = composed(values, transformer_impl="local", seq_length=tokens.shape[1]), tokens.shape[1]
    model = build_gpt(config, transformer_config(config), values["vocab_size"], None).eval()
    pieces = (unpartitioned_parameters(model) | unpartitioned_buffers(model)).values()
    there = {entry.name: entry for entry in weights.tensors}
    with torch.no_grad():
        for piece in (piece for held in pieces for piece in held):
            into, entry = piece.view.view(piece.region.shape), there[piece.name]
            box = whole_of(into.shape)  # of the embedding, without padding
            read = weights.read(entry.name, entry.slot, box)
            into.copy_(read if rounded is None or is_module_state(entry.name) else read.to(rounded))
        positions = torch.arange(length)[None].expand(len(tokens), -1)
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        return model(tokens, positions, later).float().numpy()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
