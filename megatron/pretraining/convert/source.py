"""Checkpoints of this program as sources of a conversion."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.pretraining.convert.contents import MASTER, ConvertedState, Weights
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.regions import Advance
from megatron.pretraining.convert.snapshot import refuse_stale, snapshot_contents
from moc.inspect.checkpoint import SNAPSHOT, format_of


def contents_of(
    directory: Path, allow_stale: bool, trust: bool, whole: bool = True, advance: Advance = lambda count: None
) -> ConvertedState:
    """The contents of an ``iter_*`` directory of either format.

    Args:
        directory: the checkpoint.
        allow_stale: take experts that a partial checkpoint lacks from the older ones beside it.
        trust: read a dense checkpoint although it has no manifest of this program.
        whole: refuse a partial checkpoint, unless ``allow_stale``.
        advance: called with the number of bytes verified.

    Raises:
        CheckpointError: it is damaged, not to be trusted, or partial.
    """
    if format_of(directory) != SNAPSHOT:
        return DenseContents(directory, trust, advance)
    if whole and not allow_stale:
        refuse_stale(directory)
    return snapshot_contents(directory, allow_stale)


def weights_of(contents: ConvertedState, dtype: torch.dtype | None) -> ConvertedState:
    """The compute weights alone: as a dense checkpoint stores them in this dtype, else masters rounded to it."""
    if isinstance(contents, DenseContents):
        masters = any(tensor.slot == MASTER for tensor in contents.tensors)
        return Weights(contents, dtype) if masters and contents.compute_dtype != dtype else contents.weights(dtype)
    return contents.weights(dtype)
