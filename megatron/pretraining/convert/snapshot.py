"""Reads and writes checkpoints of Format v1, and selects the source of a conversion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron.pretraining.convert.contents import (
    FULL,
    MASTER,
    Advance,
    ConvertedState,
    DigestSums,
    Facts,
    Weights,
    check_digests,
    check_written,
    complete_tensors,
    count_elements,
    cut_tensors,
    in_model_order,
    iteration_of,
    read_region,
    refuse_to_replace,
    write_regions,
)
from megatron.pretraining.convert.dense import DenseContents
from moc.files.safe_directory import sync_directory
from moc.inspect.checkpoint import SNAPSHOT, format_of
from moc.inspect.coverage import operators_of
from moc.inspect.older_versions import (
    count_chained_experts,
    describe_older_experts,
    older_sources,
    storage_recovery_path,
)
from moc.policy.token_ledger import TokenLedger
from moc.recovery.sources import RecoveryPath, part_of_slot
from moc.state.digests import total_of
from moc.state.operators import Detail, Region, operator_of
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name


def snapshot_contents(directory: Path, allow_stale: bool) -> ConvertedState:
    """Returns a checkpoint of Format v1; with ``allow_stale``, also its missing experts from older checkpoints.

    Raises:
        CheckpointError: it is damaged.
    """
    recovery_path = storage_recovery_path(directory) if allow_stale else None
    if recovery_path is not None and older_sources(recovery_path):
        return MergedContents(directory, recovery_path)
    return SnapshotContents(directory)


def refuse_stale(directory: Path) -> None:
    """Refuses a checkpoint that needs ``allow_stale`` to be complete.

    Raises:
        CheckpointError: some experts are in older checkpoints.
    """
    recovery_path = storage_recovery_path(directory)
    if recovery_path is not None and (older := older_sources(recovery_path)):
        count = count_chained_experts(directory)
        unused = f" (gradients follow {count} of them, which only a run can apply, with its optimizer)" if count else ""
        raise CheckpointError(
            f"{directory} is partial: {describe_older_experts(older)}{unused}. Fix: pass --allow-stale to convert them "
            "as a run would resume with these states, or let the run end in good order, which saves everything",
            code="experts-stale",
        )


class SnapshotContents(ConvertedState):
    """Checkpoint of Format v1 in an ``iter_*`` directory.  Reads verify the hashes of the data.

    Raises:
        CheckpointError: the manifest or a header is damaged, or they contradict each other.
    """

    def __init__(self, directory: Path):
        directory = directory.resolve()
        store = Store(LocalStorage(directory.parent))
        manifest = store.read_manifest(iteration_of(directory))
        if not manifest.is_complete:
            raise CheckpointError(
                f"{directory} names {len(manifest.files)} of {manifest.writers} files: it is one node's part of a "
                "checkpoint. Fix: gather the files and manifests of all nodes first",
                code="snapshot-parts-missing",
            )
        for name, entry in manifest.files.items():
            if damage := store.find_header_damage(manifest.iteration, name, entry):
                raise CheckpointError(
                    f"{damage}. Fix: convert another checkpoint with --iteration",
                    code="checkpoint-damaged",
                )
        self._reader = ShardReader([directory / name for name in manifest.files], verifies=True)
        _check_counts(manifest, self._reader)
        self.facts = Facts(manifest.iteration, manifest.policy, manifest.layout, manifest.state, len(manifest.files))
        self.operators = {name: (entry.detail, entry.step) for name, entry in manifest.operators.items()}
        self.tensors = complete_tensors(self._reader)
        complete = len(manifest.digests) == manifest.writers  # otherwise a writer had none
        saved = total_of(manifest.digests.values()) if complete else {}
        self.digests = {key: saved[key] for key in saved if self.operators.get(key[0], ("", None))[0] == FULL}

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads and verifies a chunk."""
        return read_region(self._reader, name, slot, region)


class MergedContents(ConvertedState):
    """Partial checkpoint of Format v1, with its missing experts from older checkpoints.

    As after a recovery, these have the run's update count, and the token ledger counts their lost tokens.  Gradients
    are excluded, since only a run can repeat updates with them.

    Raises:
        CheckpointError: one of the checkpoints is damaged.
    """

    def __init__(self, directory: Path, recovery_path: RecoveryPath):
        root = directory.resolve().parent
        self._contents_of = {
            checkpoint.iteration: SnapshotContents(root / checkpoint_name(checkpoint.iteration))
            for checkpoint in recovery_path.checkpoints()
        }
        self._recovery_path, base = recovery_path, self._contents_of[recovery_path.iteration]
        self.digests = base.digests
        all_tensors = (tensor for contents in self._contents_of.values() for tensor in contents.tensors)
        tensors = {(tensor.name, tensor.slot): tensor for tensor in all_tensors if tensor.slot != Detail.GRAD.value}
        self.tensors = in_model_order(tensors.values())
        updates = max((step for _, step in base.operators.values() if step is not None), default=None)
        self.operators = {name: (FULL, updates) for name, _ in recovery_path.sources} | {
            name: (FULL, step) for name, (_, step) in base.operators.items()
        }
        self.facts = replace(base.facts, state=dict(base.facts.state) | {"ledger": self._ledger(base)})

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads and verifies a chunk."""
        checkpoint = self._recovery_path.sources[operator_of(name), part_of_slot(slot)]
        return self._contents_of[checkpoint.iteration].read(name, slot, region)

    def _ledger(self, base: SnapshotContents) -> dict | None:
        if not base.facts.state.get("ledger"):
            return None
        states = [contents.facts.state.get("ledger") for contents in self._contents_of.values()]
        ledgers = [TokenLedger.from_state(state) for state in states if state]
        restored: dict[int, dict[int, int]] = {}
        for operator in operators_of(base.facts.state["shape"]):
            if operator.expert_id is not None:
                layer, expert = operator.expert_id
                restored.setdefault(layer, {})[expert] = self._recovery_path.learned_until(operator.name)
        return TokenLedger.from_state(base.facts.state["ledger"]).after_recovery(restored, ledgers).state_dict()


def _check_counts(manifest: Manifest, reader: ShardReader) -> None:
    stored = count_elements(source.box for source in reader.sources())
    for name in sorted({*manifest.operators, *stored}):
        stored_counts = stored.get(name, {})
        promised = dict(manifest.operators[name].elements) if name in manifest.operators else {}
        if stored_counts != promised:
            raise CheckpointError(
                f"files hold {stored_counts} elements of {name}, and the manifest has {promised}. Fix: convert another "
                "checkpoint with --iteration",
                code="checkpoint-damaged",
            )


def write_snapshot(contents: ConvertedState, root: Path, writers: int, advance: Advance) -> Path:
    """Writes Format v1 to ``root``, in ``writers`` files of equal size up to their headers and one element.

    Raises:
        CheckpointError: the iteration is already saved, or another job uses the directory.
    """
    facts, store = contents.facts, Store(LocalStorage(root, lock_timeout_s=0.0))
    directory = root / checkpoint_name(facts.iteration)
    store.storage.lock()
    refuse_to_replace(directory)
    store.remove(facts.iteration)  # files of a killed conversion
    directory.mkdir(parents=True)
    written, digests, entries = {}, {}, cut_tensors(contents.tensors, writers)
    for rank, part in enumerate(entries):
        name = shard_file_name(rank)
        digests[name] = DigestSums(contents)
        written[name] = write_regions(directory / name, part, digests[name], advance)
    check_written(digests.values(), contents, directory)
    sync_directory(directory)
    counts = count_elements(entry for part in entries for entry in part)
    operators = {
        name: OperatorEntry(detail, step, counts[name])
        for name, (detail, step) in contents.operators.items()
        if name in counts
    }
    with_digests = {operator for operator, _ in contents.digests}
    verifiable = all(name in with_digests and entry.detail == FULL for name, entry in operators.items())
    sums = {name: digest_sums.to_text() for name, digest_sums in digests.items()} if verifiable else {}
    layout, state = dict(facts.layout), dict(facts.state)
    store.publish(Manifest(facts.iteration, facts.policy, writers, written, operators, layout, state, digests=sums))
    return directory


def contents_of(
    directory: Path, allow_stale: bool, trust: bool, complete: bool = True, advance: Advance = lambda count: None
) -> ConvertedState:
    """Returns the contents of an ``iter_*`` directory of either format.

    Args:
        directory: the checkpoint.
        allow_stale: take experts that a partial checkpoint lacks from older checkpoints.
        trust: read a dense checkpoint even without a manifest of this program.
        complete: refuse a partial checkpoint, unless ``allow_stale``.
        advance: called with the number of bytes verified.

    Raises:
        CheckpointError: it is damaged, not trusted, or partial.
    """
    if format_of(directory) != SNAPSHOT:
        contents = DenseContents(directory, trust, advance)
    else:
        if complete and not allow_stale:
            refuse_stale(directory)
        contents = snapshot_contents(directory, allow_stale)
    check_digests(contents, directory)
    return contents


def weights_of(contents: ConvertedState, dtype: torch.dtype | None) -> ConvertedState:
    """Returns only the compute weights: as stored in a dense checkpoint of this dtype, or rounded masters."""
    if isinstance(contents, DenseContents):
        masters = any(tensor.slot == MASTER for tensor in contents.tensors)
        return Weights(contents, dtype) if masters and contents.compute_dtype != dtype else contents.weights(dtype)
    return contents.weights(dtype)
