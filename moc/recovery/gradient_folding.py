"""Applies the gradients of chains in a node's memory to their bases.

MoEtion (section 5.2, Algorithm 3) updates experts in the background from the gradients saved instead of their state.
Here a process of each node, the background optimizer, applies them (:mod:`moc.session.node_service`). It reads files of
retained experts (:mod:`moc.recovery.expert_versions`), and commits new bases as checkpoints of Format v1 in a separate
store. The process that retains experts installs them from there. So a snapshot in memory has a single writer, and
chains stay complete if the background optimizer is killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from moc.recovery.gradient_chains import Chain, is_operator_file, updated_file_name, updated_store
from moc.state.adam import MASTER, SLOTS, Rules, gradient_factor, kind_of, update
from moc.state.operators import Detail, Region
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, compute_digest
from moc.store.shard_file import BoxTensor, FileLayout, ShardReader, tensor_bytes
from moc.store.storage import Blob
from moc.store.store import Store, checkpoint_name

_UNREADABLE = (CheckpointError, MissingTensorError, OSError)
RULES = "adam"
"""Key in a snapshot's state for the :class:`~moc.state.adam.Rules` of the next update."""


class UpdateOutcome(NamedTuple):
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


def execute_order(store: Store, to_compare: Iterable[Chain], to_apply: Iterable[Chain]) -> UpdateOutcome:
    """Compares the state at the end of some chains with the chain's result, and applies the gradients of others.

    Removes earlier results in :func:`updated_store`, then commits the new bases there, one manifest per iteration.
    """
    into, outcome = updated_store(store), UpdateOutcome([], 0, [], [], [], "")
    into.remove_all()
    steps = _Steps(store)
    for chain in to_compare:
        try:
            (outcome.equal if steps.matches(chain) else outcome.differing).append(chain.operator)
        except _UNREADABLE:
            outcome.superseded.append(chain.operator)
        except ValueError as error:
            outcome = outcome._replace(why=f"{chain.operator}: {error}")
            outcome.superseded.append(chain.operator)
    by_iteration: dict[int, dict[str, tuple[FileEntry, OperatorEntry]]] = {}
    for chain in to_apply:
        try:
            by_iteration.setdefault(chain.until, {})[chain.operator] = steps.apply(chain, into)
        except _UNREADABLE:
            outcome.superseded.append(chain.operator)
        except ValueError as error:
            outcome = outcome._replace(why=f"{chain.operator}: {error}")
        else:
            outcome.folded.append(chain.operator)
            outcome = outcome._replace(gradients=outcome.gradients + chain.until - chain.base)
    for iteration, entries in by_iteration.items():
        files = {updated_file_name(name): file for name, (file, _) in entries.items()}
        operators = {name: entry for name, (_, entry) in entries.items()}
        into.publish(dataclasses.replace(steps.manifest(iteration), files=files, operators=operators, state={}))
    return outcome


class _Steps:
    """Repeats the updates of chains in a store; reads each manifest once.

    Methods raise an error of ``_UNREADABLE`` for removed or damaged state. They raise ValueError if the state is not
    Adam's in fp32, or has no update rules.
    """

    def __init__(self, store: Store):
        self._store = store
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, iteration: int) -> Manifest:
        if iteration not in self._manifests:
            self._manifests[iteration] = self._store.read_manifest(iteration)
        return self._manifests[iteration]

    def matches(self, chain: Chain) -> bool:
        """Returns whether the state saved with a chain's last gradients has the hashes of the chain's result."""
        tensors, step = self._follow(chain)
        saved = ShardReader(self._files(chain.until, chain.operator), verifies=True)
        equal = [
            compute_digest(tensor_bytes(values)) == compute_digest(tensor_bytes(saved.read_region(name, slot, region)))
            for (name, region), state in tensors.items()
            for slot, values in state.items()
        ]
        self._check(chain)
        return all(equal) and step == self._step(chain.until, chain.operator)

    def apply(self, chain: Chain, into: Store) -> tuple[FileEntry, OperatorEntry]:
        """Writes the state that a chain leads to; returns its entries in a manifest."""
        states, step = self._follow(chain)
        base = ShardReader(self._files(chain.base, chain.operator))
        tensors = [
            BoxTensor(name, slot, base.global_shape(name, slot), region, values)
            for (name, region), slots in states.items()
            for slot, values in slots.items()
        ]
        by_entry = {tensor.box: tensor_bytes(tensor.values) for tensor in tensors}
        layout = FileLayout(by_entry)
        data = [by_entry[entry] for entry in layout.entries]
        header = layout.header(list(map(compute_digest, data)))
        path = f"{checkpoint_name(chain.until)}/{updated_file_name(chain.operator)}"
        into.storage.write(path, [header, *data], is_durable=False)
        elements = dict.fromkeys(sorted(SLOTS), sum(region.numel for _, region in states))
        file = FileEntry(layout.nbytes, len(header), compute_digest(header))
        return file, OperatorEntry(Detail.FULL.value, step, elements)

    def _follow(self, chain: Chain) -> tuple[dict[tuple[str, Region], dict[str, torch.Tensor]], int]:
        """Returns the state at the end of a chain, by tensor chunk and slot, and its number of updates."""
        name, base = chain.operator, ShardReader(self._files(chain.base, chain.operator), verifies=True)
        entries = [source.box for source in base.sources()]
        slots = {entry.slot for entry in entries} - {"grad"}
        states = {  # slots may be split if several ranks save identical state
            (entry.name, entry.region): {
                slot: base.read_region(entry.name, slot, entry.region).clone() for slot in slots
            }
            for entry in entries
            if entry.slot == MASTER
        }
        step = self._step(chain.base, name)
        for iteration in range(chain.base + 1, chain.until + 1):
            record = self._state_entry(iteration, "record")
            if record["skipped"]:
                continue
            rules = Rules.from_plain(self._state_entry(iteration - 1, RULES))
            factor = gradient_factor(record["grad_norm"], rules.clip_grad, record["loss_scale"])
            gradients = ShardReader(self._files(iteration, name), verifies=True)
            for (tensor, region), state in states.items():
                if (rule := rules.by_kind.get(kind_of(tensor))) is None:
                    raise ValueError(f"the engine has no update rule for {kind_of(tensor)}")
                update(state, gradients.read_region(tensor, "grad", region), step, rule, factor)
            step += 1
        self._check(chain)
        return states, step

    def _check(self, chain: Chain) -> None:
        """Raises an error if a file of a chain was removed: its memory may have been overwritten during the read."""
        for iteration in range(chain.base, chain.until + 1):
            self._files(iteration, chain.operator)

    def _state_entry(self, iteration: int, key: str) -> Mapping[str, Any]:
        if (value := self.manifest(iteration).state.get(key)) is None:
            raise ValueError(f"the snapshot of iteration {iteration} lacks {key}")
        return value

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
            self._store.open_verified(iteration, file, entry) for file, entry in files if is_operator_file(file, {name})
        ]
