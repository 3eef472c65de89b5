"""``optimizer/`` in a dense checkpoint: master weights and moments as boxes of the unpartitioned tensors.

Any layout and any engine loads them; see :mod:`moc.store.shard_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.pretraining.checkpoint.contents import check_optimizer, restore_grad_scaler
from megatron.pretraining.config import Config
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.owned import set_step
from megatron.pretraining.engine.state import optimizer_fragments
from moc.errors import cause_of, code_of, with_code
from moc.runtime.collectives import first_reported
from moc.store.errors import CheckpointError
from moc.store.shard_file import BoxTensor, MissingTensorError, ShardReader, read_values

DIRECTORY = "optimizer"


def entries_of(chunks: Sequence[Any], optimizer: CommitOptimizer) -> list[BoxTensor]:
    """Returns this rank's shard of the optimizer state, on the host, since forked writers cannot read the device."""
    return [
        BoxTensor(f.name, f.slot, f.global_shape, f.region, f.view.cpu())
        for f in optimizer_fragments(chunks, optimizer.core)
        if f.first_copy
    ]


def path_of(directory: Path, rank: int) -> Path:
    """Returns the file of a worker's shard."""
    return directory / DIRECTORY / f"rank_{rank:05d}.safetensors"


def load(
    directory: Path,
    manifest: Mapping | None,
    state: Mapping | None,
    config: Config,
    chunks: Sequence[Any],
    optimizer: CommitOptimizer,
) -> None:
    """Loads the optimizer state of a checkpoint, in any layout; a collective call.

    Args:
        directory: directory of the checkpoint.
        manifest: manifest of the checkpoint; None if another program wrote it.
        state: training state of the checkpoint; None if it has none.
        config: configuration of the run.
        chunks: model chunks, whose weights are loaded.
        optimizer: receives the state.

    Raises:
        CheckpointError: on all workers: the checkpoint has no optimizer state, or the state is of another optimizer,
            incomplete or damaged.
    """
    if manifest is None or state is None or state["optimizer"] is None:
        raise CheckpointError(
            f"{directory} holds no optimizer state that loads in any layout and with any engine. Fix: pass "
            "--no-load-optim, or --finetune to start at iteration 0",
            code="optimizer-state-missing",
        )
    check_optimizer(config, state, directory, "pass --no-load-optim")
    paths = [directory / name for name in manifest["files"] if name.startswith(f"{DIRECTORY}/")]
    if missing := first_reported(fill(directory, paths, chunks, optimizer)):
        raise CheckpointError(missing)
    set_step(optimizer.core, state["optimizer_step"])
    restore_grad_scaler(optimizer, state["grad_scaler"])


def fill(directory: Path, paths: Sequence[Path], chunks: Sequence[Any], optimizer: CommitOptimizer) -> str | None:
    """Fills this rank's optimizer state from files of any layout; returns the error if a part is missing."""
    try:
        reader = ShardReader(paths)
        for fragment in optimizer_fragments(chunks, optimizer.core):
            fragment.view.view(fragment.region.shape).copy_(read_values(fragment, reader))
    except MissingTensorError as missing:
        incomplete = CheckpointError(
            f"{directory} is incomplete: {cause_of(missing)}. Fix: load an older checkpoint with --ckpt-step, or "
            "pass --no-load-optim",
            code=code_of(missing),
        )
        return with_code(incomplete)
    return None
