"""``optimizer/`` in a dense checkpoint: master weights and moments as boxes of the unpartitioned tensors.

Any layout and any engine loads them; see :mod:`moc.store.regions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.pretraining.checkpoint.contents import grad_scaler_state, restore_grad_scaler
from megatron.pretraining.engine.optimizer import VotedOptimizer
from megatron.pretraining.engine.owned import get_step, set_step
from megatron.pretraining.engine.state import optimizer_fragments
from moc.errors import cause_of, code_of, with_code
from moc.files import decode, tree
from moc.files.decode import Count
from moc.files.tree import Tree
from moc.runtime.agreement import first_reported, run_on_rank0
from moc.store.dense_files import damaged
from moc.store.durable import write_durably
from moc.store.errors import CheckpointError
from moc.store.fill import values_for
from moc.store.regions import MissingRegionError, RegionReader, RegionTensor

DIRECTORY = "optimizer"
_STATE = "state.json"


@dataclass(frozen=True)
class OptimizerState:
    """What all parameters have in common: the number of updates, and fp16's loss scale."""

    optimizer_step: Count
    grad_scaler: dict[str, Any] | None = None


def entries_of(chunks: Sequence[Any], optimizer: VotedOptimizer) -> list[RegionTensor]:
    """This rank's share of the optimizer state, on the host, since forked writers cannot read the device."""
    return [
        RegionTensor(f.name, f.slot, f.global_shape, f.region, f.view.cpu())
        for f in optimizer_fragments(chunks, optimizer.core)
        if f.first_copy
    ]


def path_of(directory: Path, rank: int) -> Path:
    """The file of a worker's share."""
    return directory / DIRECTORY / f"rank_{rank:05d}.safetensors"


def write_common(directory: Path, optimizer: VotedOptimizer) -> None:
    """Writes what all parameters have in common; for rank 0.  Workers write their shares by :func:`entries_of`."""
    state = {"optimizer_step": get_step(optimizer.core), "grad_scaler": grad_scaler_state(optimizer)}
    (directory / DIRECTORY).mkdir()
    write_durably(directory / DIRECTORY / _STATE, json.dumps(state))


def held_in(manifest: Mapping | None) -> bool:
    """Whether a checkpoint holds optimizer state that :func:`load` can load; by its manifest, None without one."""
    return manifest is not None and f"{DIRECTORY}/{_STATE}" in manifest["files"]


def load(directory: Path, manifest: Mapping | None, chunks: Sequence[Any], optimizer: VotedOptimizer) -> None:
    """Loads the optimizer state of a checkpoint, in any layout.

    Args:
        directory: of the checkpoint.
        manifest: of the checkpoint; None if another program wrote it.
        chunks: of the model, whose weights are loaded.
        optimizer: receives the state.

    Raises:
        CheckpointError: on all workers: the checkpoint has no such state, or it is incomplete or damaged.
    """
    if manifest is None or not held_in(manifest):
        raise CheckpointError(
            f"{directory} holds no optimizer state that --deepspeed and --elastic can load. Fix: pass --no-load-optim, "
            "or --finetune to start at iteration 0",
            code="optimizer-state-missing",
        )
    state = OptimizerState(**run_on_rank0(lambda: asdict(read_state(directory)), "cannot read a checkpoint"))
    names = [name for name in manifest["files"] if name.startswith(f"{DIRECTORY}/")]
    paths = [directory / name for name in names if name.endswith(".safetensors")]
    if missing := first_reported(fill(directory, paths, chunks, optimizer)):
        raise CheckpointError(missing)
    set_step(optimizer.core, state.optimizer_step)
    restore_grad_scaler(optimizer, state.grad_scaler)


def read_state(directory: Path) -> OptimizerState:
    """What all parameters have in common, of a checkpoint; raises CheckpointError if it is damaged."""
    try:
        return decode.decode(Tree(directory).read(f"{DIRECTORY}/{_STATE}", tree.MANIFEST), OptimizerState)
    except ValueError as error:
        raise damaged(f"{directory / DIRECTORY / _STATE} is damaged ({error})") from None


def fill(directory: Path, paths: Sequence[Path], chunks: Sequence[Any], optimizer: VotedOptimizer) -> str | None:
    """Fills this rank's optimizer state from files of any layout; returns what is missing in them."""
    try:
        reader = RegionReader(paths)
        for fragment in optimizer_fragments(chunks, optimizer.core):
            fragment.view.view(fragment.region.shape).copy_(values_for(fragment, reader))
    except MissingRegionError as missing:
        incomplete = CheckpointError(
            f"{directory} is incomplete: {cause_of(missing)}. Fix: load an older checkpoint with --ckpt-step, or "
            "pass --no-load-optim",
            code=code_of(missing),
        )
        return with_code(incomplete)
    return None
