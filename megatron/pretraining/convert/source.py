"""Opens checkpoints of this program as sources of a conversion."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.pretraining.convert.contents import MASTER, Advance, ConvertedState, Weights
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.snapshot import refuse_stale, snapshot_contents
from moc.inspect.checkpoint import SNAPSHOT, format_of


def contents_of(
    directory: Path, allow_stale: bool, trust: bool, whole: bool = True, advance: Advance = lambda count: None
) -> ConvertedState:
    """Returns the contents of an ``iter_*`` directory of either format.

    Args:
        directory: the checkpoint.
        allow_stale: take experts that a partial checkpoint lacks from older checkpoints.
        trust: read a dense checkpoint even without a manifest of this program.
        whole: refuse a partial checkpoint, unless ``allow_stale``.
        advance: called with the number of bytes verified.

    Raises:
        CheckpointError: it is damaged, not trusted, or partial.
    """
    if format_of(directory) != SNAPSHOT:
        return DenseContents(directory, trust, advance)
    if whole and not allow_stale:
        refuse_stale(directory)
    return snapshot_contents(directory, allow_stale)


def weights_of(contents: ConvertedState, dtype: torch.dtype | None) -> ConvertedState:
    """Returns only the compute weights: as stored in a dense checkpoint of this dtype, or rounded masters."""
    if isinstance(contents, DenseContents):
        masters = any(tensor.slot == MASTER for tensor in contents.tensors)
        return Weights(contents, dtype) if masters and contents.compute_dtype != dtype else contents.weights(dtype)
    return contents.weights(dtype)
