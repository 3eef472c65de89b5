"""Applies the gradients of chains in a node's memory to their bases (*folding*).

MoEtion (section 5.2, Algorithm 3) updates experts in the background from the gradients saved instead of their state.
Here a process of each node, the folder, applies them (:mod:`moc.session.node_service`). It reads files of carried
experts (:mod:`moc.recovery.expert_versions`). It commits new bases as checkpoints of Format v1 in a separate store; the
carrier adopts them from there. So a snapshot in memory has a single writer, and chains stay complete if the folder is
killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from moc.recovery.gradient_chains import Chain, file_of_folded, is_of_operator, place_of_folded
from moc.state.adam import MASTER, SLOTS, Rules, gradient_factor, kind_of, update
from moc.state.operators import Detail, Region
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, compute_digest
from moc.store.shard_file import BoxTensor, FileLayout, ShardReader, tensor_bytes
from moc.store.storage import Blob
from moc.store.store import Store, checkpoint_name

_GONE = (CheckpointError, MissingTensorError, OSError)
RULES = "adam"
"""Key in a snapshot's state for the :class:`~moc.state.adam.Rules` of the next update."""


class FoldOutcome(NamedTuple):
    """Result of an order.

    Attributes:
        folded: experts with a new base.
        gradients: number of gradients applied to these bases.
        equal: experts whose saved state equals the result of their chain.
        differing: experts whose saved state differs from it.
        superseded: experts whose chain, or state to compare, was removed or is damaged.
        why: why an expert's gradients cannot be applied; empty if all can.
    """

    folded: list[str]
    gradients: int
    equal: list[str]
    differing: list[str]
    superseded: list[str]
    why: str


def carry_out(store: Store, to_compare: Iterable[Chain], to_fold: Iterable[Chain]) -> FoldOutcome:
    """Compares the state at the end of some chains with the chain's result, and folds others.

    Removes earlier results in :func:`place_of_folded`, then commits the new bases there, one manifest per iteration.
    """
    into, done = place_of_folded(store), FoldOutcome([], 0, [], [], [], "")
    into.remove_all()
    steps = _Steps(store)
    for chain in to_compare:
        try:
            (done.equal if steps.is_right(chain) else done.differing).append(chain.operator)
        except _GONE:
            done.superseded.append(chain.operator)
        except ValueError as error:
            done = done._replace(why=f"{chain.operator}: {error}")
            done.superseded.append(chain.operator)
    parts: dict[int, dict[str, tuple[FileEntry, OperatorEntry]]] = {}
    for chain in to_fold:
        try:
            parts.setdefault(chain.until, {})[chain.operator] = steps.fold(chain, into)
        except _GONE:
            done.superseded.append(chain.operator)
        except ValueError as error:
            done = done._replace(why=f"{chain.operator}: {error}")
        else:
            done.folded.append(chain.operator)
            done = done._replace(gradients=done.gradients + chain.until - chain.base)
    for iteration, its in parts.items():
        files = {file_of_folded(name): file for name, (file, _) in its.items()}
        operators = {name: entry for name, (_, entry) in its.items()}
        into.publish(dataclasses.replace(steps.manifest(iteration), files=files, operators=operators, state={}))
    return done


class _Steps:
    """Repeats the updates of chains in a store; reads each manifest once.

    Methods raise an error of ``_GONE`` for removed or damaged state. They raise ValueError for state that is not Adam's
    in fp32, or without update rules.
    """

    def __init__(self, store: Store):
        self._store = store
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, iteration: int) -> Manifest:
        if iteration not in self._manifests:
            self._manifests[iteration] = self._store.read_manifest(iteration)
        return self._manifests[iteration]

    def is_right(self, chain: Chain) -> bool:
        """Returns whether the state saved with a chain's last gradients has the hashes of the chain's result."""
        boxes, step = self._follow(chain)
        saved = ShardReader(self._files(chain.until, chain.operator), verifies=True)
        same = [
            compute_digest(tensor_bytes(values)) == compute_digest(tensor_bytes(saved.read_region(name, slot, region)))
            for (name, region), state in boxes.items()
            for slot, values in state.items()
        ]
        self._check(chain)
        return all(same) and step == self._step(chain.until, chain.operator)

    def fold(self, chain: Chain, into: Store) -> tuple[FileEntry, OperatorEntry]:
        """Writes the state that a chain leads to; returns its entries in a manifest."""
        boxes, step = self._follow(chain)
        base = ShardReader(self._files(chain.base, chain.operator))
        tensors = [
            BoxTensor(name, slot, base.global_shape(name, slot), region, values)
            for (name, region), its in boxes.items()
            for slot, values in its.items()
        ]
        by_entry = {tensor.box: tensor_bytes(tensor.values) for tensor in tensors}
        layout = FileLayout(by_entry)
        data = [by_entry[entry] for entry in layout.entries]
        header = layout.header(list(map(compute_digest, data)))
        path = f"{checkpoint_name(chain.until)}/{file_of_folded(chain.operator)}"
        into.storage.write(path, [header, *data], is_durable=False)
        elements = dict.fromkeys(sorted(SLOTS), sum(region.numel for _, region in boxes))
        file = FileEntry(layout.nbytes, len(header), compute_digest(header))
        return file, OperatorEntry(Detail.FULL.value, step, elements)

    def _follow(self, chain: Chain) -> tuple[dict[tuple[str, Region], dict[str, torch.Tensor]], int]:
        """Returns the state at the end of a chain, by tensor, box and slot, and its number of updates."""
        name, base = chain.operator, ShardReader(self._files(chain.base, chain.operator), verifies=True)
        entries = [source.box for source in base.sources()]
        slots = {entry.slot for entry in entries} - {"grad"}
        boxes = {  # slots may be split if several ranks save identical state
            (one.name, one.region): {slot: base.read_region(one.name, slot, one.region).clone() for slot in slots}
            for one in entries
            if one.slot == MASTER
        }
        step = self._step(chain.base, name)
        for iteration in range(chain.base + 1, chain.until + 1):
            record = self._told(iteration, "record")
            if record["skipped"]:
                continue
            rules = Rules.from_plain(self._told(iteration - 1, RULES))
            factor = gradient_factor(record["grad_norm"], rules.clip_grad, record["loss_scale"])
            gradients = ShardReader(self._files(iteration, name), verifies=True)
            for (tensor, region), state in boxes.items():
                if (rule := rules.by_kind.get(kind_of(tensor))) is None:
                    raise ValueError(f"the engine has no update rule for {kind_of(tensor)}")
                update(state, gradients.read_region(tensor, "grad", region), step, rule, factor)
            step += 1
        self._check(chain)
        return boxes, step

    def _check(self, chain: Chain) -> None:
        """Raises an error if a file of a chain was removed: its memory may have been overwritten during the read."""
        for iteration in range(chain.base, chain.until + 1):
            self._files(iteration, chain.operator)

    def _told(self, iteration: int, what: str) -> Mapping[str, Any]:
        if (told := self.manifest(iteration).state.get(what)) is None:
            raise ValueError(f"the snapshot of iteration {iteration} lacks {what}")
        return told

    def _step(self, iteration: int, name: str) -> int:
        entry = self.manifest(iteration).operators.get(name)
        if entry is None or entry.step is None:
            raise CheckpointError(
                f"the snapshot of iteration {iteration} lacks {name}. Fix: load another one (--ckpt-step)",
                code="operator-incomplete",
            )
        return entry.step

    def _files(self, iteration: int, name: str) -> list[Blob]:
        files = self.manifest(iteration).files.items()
        return [
            self._store.open_verified(iteration, file, entry) for file, entry in files if is_of_operator(file, {name})
        ]
