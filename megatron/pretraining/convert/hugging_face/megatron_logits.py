"""Computes this program's logits of a checkpoint, as a separate program like :mod:`transformers_logits`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from megatron.pretraining.entry import cpu

cpu.install()  # must precede megatron.core
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from torch.distributed import HashStore  # noqa: E402  # pyright: ignore[reportPrivateImportUsage]  # not in __all__

from megatron.pretraining.convert.contents import DTYPES, ConvertedState, complete_bounds  # noqa: E402
from megatron.pretraining.convert.hugging_face.model_record import run_configuration  # noqa: E402
from megatron.pretraining.convert.snapshot import contents_of, weights_of  # noqa: E402
from megatron.pretraining.entry.offline import kept_environment  # noqa: E402
from megatron.pretraining.entry.stock import bare_chunks  # noqa: E402
from megatron.pretraining.model.parameters import (  # noqa: E402
    unpartitioned_buffers,
    unpartitioned_parameters,
    unwrap,
)
from moc.files.decode import parse  # noqa: E402
from moc.files.safe_directory import MAX_SMALL_FILE_BYTES, SafeDirectory  # noqa: E402
from moc.state.operators import is_module_state  # noqa: E402


def main(request_file: str) -> int:
    """Writes the logits requested by a file of :mod:`logits`, fp32 of shape (sequences, tokens, vocabulary)."""
    request = parse(SafeDirectory(Path(request_file).parent).read(Path(request_file).name, MAX_SMALL_FILE_BYTES))
    contents = contents_of(Path(request["source"]), request["allow_stale"], request["trust"])
    weights = weights_of(contents, DTYPES.get(request["dtype"] or ""))
    tokens = torch.from_numpy(numpy.load(request["tokens"]))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    numpy.save(request["into"], _logits(request["model"], weights, tokens, DTYPES.get(request["dtype"] or "")))
    dist.destroy_process_group()
    return 0


def _logits(
    values: Mapping[str, Any], weights: ConvertedState, tokens: torch.Tensor, rounded: torch.dtype | None
) -> numpy.ndarray:
    length = tokens.shape[1]
    model = built(run_configuration(values, length), values["vocab_size"]).eval()
    piece_lists = (unpartitioned_parameters(model) | unpartitioned_buffers(model)).values()
    entries = {entry.name: entry for entry in weights.tensors}
    with torch.no_grad():
        for piece in (piece for pieces in piece_lists for piece in pieces):
            into, entry = piece.view.view(piece.region.shape), entries[piece.name]
            bounds = complete_bounds(into.shape)  # excludes the embedding's padding
            read = weights.read(entry.name, entry.slot, bounds)
            into.copy_(read if rounded is None or is_module_state(entry.name) else read.to(rounded))
        positions = torch.arange(length)[None].expand(len(tokens), -1)
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        return model(tokens, positions, later).float().numpy()


def built(config: Any, rows: int) -> Any:
    """Builds the model of a configuration by Megatron-LM's builder; process groups of one worker exist.

    Args:
        config: configuration from :func:`megatron.pretraining.entry.offline.config_of_words`.
        rows: rows of the embedding.
    """
    args = config.arguments
    args.padded_vocab_size, args.transformer_impl = rows, "local"
    with kept_environment():
        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (chunk,) = bare_chunks(container, ModelType.encoder_or_decoder, None, groups)
    return unwrap(chunk)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
