"""Digests in dense checkpoints: stored with the state, and compared when a run loads it or a converter reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.state import PARAM, MegatronState, optimizer_fragments
from megatron.pretraining.parts import WorkerParts
from moc.runtime.collectives import gather, sum_over_workers
from moc.state.digests import Key, StateDigest, differing_operators, from_limbs, keys_of, to_limbs, to_text, total_of
from moc.state.fragments import Fragment
from moc.state.operators import MODULE_STATE, Detail
from moc.store.dense_files import state_error

DIGESTS = "digests"
"""Key of the digests in ``training_state.json``: by operator and optimizer-state key, 16 hex digits each."""


def dense_fragments(parts: WorkerParts) -> Iterator[Fragment]:
    """Yields this rank's tensor chunks in a dense checkpoint: optimizer state, weights and router biases."""
    core = parts.optimizer.core
    yield from optimizer_fragments(parts.chunks, core)
    state = MegatronState(parts.chunks, core, parts.modules)
    for fragment in state.fragments(state.operators(), Detail.COMPUTE):
        if not fragment.name.startswith(MODULE_STATE):
            yield fragment


def digest_state(parts: WorkerParts, model: Model) -> dict[str, dict[str, str]]:
    """Returns the digests of the state, as values of JSON; a collective call."""
    fragments = list(dense_fragments(parts))
    keys = keys_of(fragments, model.operators, gather)
    sums = StateDigest(fragments, keys).compute()
    added = sum_over_workers({DIGESTS: to_limbs(sums[0])}, parts.world)
    return to_text(keys, from_limbs(added[DIGESTS]))


def check_stored_digests(parts: WorkerParts, model: Model, saved: Mapping[str, Any], directory: Path) -> None:
    """Compares the loaded state with the digests in a checkpoint, if it has any; a collective call.

    Args:
        parts: have loaded weights and optimizer state.
        model: the model.
        saved: training state of the checkpoint.
        directory: the checkpoint.

    Raises:
        CheckpointError: on all workers: the state has other digests.
    """
    if not parts.config.snapshot.digest_interval or not saved.get(DIGESTS):
        return
    now, before = total_of([digest_state(parts, model)]), total_of([saved[DIGESTS]])
    same_format = saved.get("params_dtype") == _format_of(parts)
    comparable = {key for key in now.keys() | before.keys() if _is_comparable(key, now, before, same_format)}
    there, here = ({key: value for key, value in of.items() if key in comparable} for of in (before, now))
    if wrong := differing_operators(here, there):
        raise state_error(directory, wrong)


def _is_comparable(key: Key, now: Mapping[Key, int], before: Mapping[Key, int], same_format: bool) -> bool:
    """Returns whether a key means the same here and there: padding may differ, and so may the format of weights."""
    slot, _, size = key[1].partition(":")
    return (same_format or slot != PARAM) and (not size or (key in now and key in before))


def _format_of(parts: WorkerParts) -> str:
    precision = parts.config.mixed_precision
    return "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32"
