"""Digests of the state in dense checkpoints: ``digests.json``, which :mod:`moc.state.digests` defines.

Saves of all programs and conversions write them.  They are compared after each load and before each conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.state import PARAM, MegatronState, optimizer_fragments
from megatron.pretraining.parts import WorkerParts
from moc.files import decode, safe_directory
from moc.files.decode import Name
from moc.files.safe_directory import SafeDirectory, write_durably
from moc.runtime.collectives import gather, run_on_rank0, sum_over_workers
from moc.state.digests import StateDigest, differing_operators, from_limbs, keys_of, to_limbs, to_text, total_of
from moc.state.operators import MODULE_STATE, Detail, Fragment
from moc.store import dense_files
from moc.store.dense_files import state_error
from moc.store.manifest import StateDigests


@dataclass(frozen=True)
class StoredDigests:
    """Digests of the state in a checkpoint.

    Attributes:
        params_dtype: format of the compute weights; a run with another format has other weights.
        digests: by operator and optimizer-state key, 16 hex digits each; 0 is absent.
    """

    params_dtype: Name
    digests: StateDigests

    def write(self, directory: Path) -> None:
        """Writes the file durably."""
        write_durably(directory / dense_files.DIGESTS_FILE, json.dumps(asdict(self), indent=1))


def read_digests(directory: Path, manifest: Mapping | None) -> StoredDigests | None:
    """Returns the digests of a checkpoint; None if it has none.

    Raises:
        CheckpointError: the file is missing or invalid.
    """
    if manifest is None or dense_files.DIGESTS_FILE not in manifest["files"]:
        return None
    path = directory / dense_files.DIGESTS_FILE
    try:
        text = SafeDirectory(directory).read(path.name, safe_directory.MAX_MANIFEST_BYTES)
        return decode.decode(text, StoredDigests)
    except OSError as error:
        raise dense_files.damage_error(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise dense_files.damage_error(f"{path} is damaged ({error})") from None


def dense_fragments(parts: WorkerParts, optimizer: bool) -> Iterator[Fragment]:
    """Yields this rank's tensor chunks in a dense checkpoint: weights, router biases, and any optimizer state."""
    core = parts.optimizer.core
    if optimizer:
        yield from optimizer_fragments(parts.chunks, core)
    state = MegatronState(parts.chunks, core, parts.modules)
    for fragment in state.fragments(state.operators(), Detail.COMPUTE):
        if not fragment.name.startswith(MODULE_STATE):
            yield fragment


def digest_state(parts: WorkerParts, model: Model, optimizer: bool) -> StoredDigests:
    """Returns the digests of the weights, and of the optimizer state if ``optimizer``; a collective call."""
    fragments = list(dense_fragments(parts, optimizer))
    keys = keys_of(fragments, model.operators, gather)
    sums = StateDigest(fragments, keys).compute()
    added = sum_over_workers({"digests": to_limbs(sums[0])}, parts.world)
    return StoredDigests(_format_of(parts), to_text(keys, from_limbs(added["digests"])))


def verify_loaded(parts: WorkerParts, model: Model, directory: Path, manifest: Mapping | None, optimizer: bool) -> None:
    """Compares the loaded state with the digests of a checkpoint, and logs the result; a collective call.

    Args:
        parts: have loaded weights, and the state of the optimizer if ``optimizer``.
        model: the model.
        directory: the checkpoint.
        manifest: manifest of the checkpoint; None if another program wrote it.
        optimizer: whether the state of the optimizer was loaded.

    Raises:
        CheckpointError: on all workers: the state has other digests.
    """
    if not parts.config.snapshot.digest_interval:
        return
    saved = run_on_rank0(lambda: _plain(read_digests(directory, manifest)), "cannot read a checkpoint")
    if saved is None:
        parts.log.message(f"the state of {directory} is not verified: the checkpoint has no digests")
        return
    computed = digest_state(parts, model, optimizer)
    computed_totals, stored_totals = total_of([computed.digests]), total_of([saved["digests"]])
    has_same_weights = saved["params_dtype"] == computed.params_dtype
    comparable = {
        (operator, slot)
        for operator, slot in computed_totals.keys() | stored_totals.keys()
        if (has_same_weights if _is_weight(slot) else optimizer)
        # padding depends on the layout
        and (":" not in slot or {(operator, slot)} <= computed_totals.keys() & stored_totals.keys())
    }
    stored_digests, computed_digests = (
        {key: totals[key] for key in comparable & totals.keys()} for totals in (stored_totals, computed_totals)
    )
    compared = {operator for operator, _ in stored_digests}
    unknown = {operator for operator, _ in computed_totals} - compared
    if wrong := differing_operators(computed_digests, stored_digests, unknown):
        raise state_error(directory, wrong)
    suffix = f", {len(unknown)} operators have no known digest" if unknown else ""
    parts.log.message(f"{len(compared)} operators have the digests that {directory} stores{suffix}")


def _plain(stored: StoredDigests | None) -> dict | None:
    return None if stored is None else asdict(stored)


def _is_weight(slot: str) -> bool:
    return slot.partition(":")[0] == PARAM


def _format_of(parts: WorkerParts) -> str:
    precision = parts.config.mixed_precision
    return "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32"
