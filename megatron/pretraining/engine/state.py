"""Provides and freezes the state of a model (:class:`moc.state.interface.TrainingState`) of megatron-core."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.owned import (
    MASTER,
    AdamGroup,
    adam_groups,
    drop_gradients,
    gather_layers,
    layer_wise_parts,
    members,
    owned_gradients,
    owned_slices,
    sharded_part,
    write_step,
)
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.model.parameters import Pieces, parameter_pieces, unwrap
from moc.runtime.collectives import synchronize_group
from moc.state.adam import kind_of
from moc.state.interface import FreezingError
from moc.state.operators import Detail, Fragment, OwnedSlice, fragments_of, operator_of


class Freezer:
    """Freezes and activates operators of this rank's model chunks between iterations."""

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, pieces: Pieces):
        self._chunks, self._optimizer = chunks, optimizer
        self._skips_gradients = not any(isinstance(chunk, ZeroChunk) for chunk in chunks)
        self._operators = {  # owners of each parameter in the gradient buffers
            parameter: {operator_of(piece.name) for piece in own_pieces}
            for parameter, own_pieces in pieces.items()
            if own_pieces and (hasattr(parameter, "main_grad") or not self._skips_gradients)
        }
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.frozen: frozenset[str] = frozenset()

    def freeze(self, operators: Iterable[str]) -> None:
        operators = set(operators)
        if operators and any(
            c.ddp_config.overlap_grad_reduce or c.ddp_config.overlap_param_gather for c in self._chunks
        ):
            raise FreezingError(
                "operators cannot be frozen while communication overlaps with computation. "
                "Fix: turn off --overlap-grad-reduce and --overlap-param-gather"
            )
        self._keep_frozen(self.frozen | operators)

    def activate(self, operators: Iterable[str]) -> None:
        self._keep_frozen(self.frozen - set(operators))

    def _keep_frozen(self, frozen: frozenset[str]) -> None:
        for owners in self._operators.values():
            if owners & frozen and not owners <= frozen:
                raise FreezingError(
                    f"{', '.join(sorted(owners))} share one parameter, and can only be frozen or activated together. "
                    "Fix: drop --moe-single-grouped-weight and --moe-single-grouped-bias, or name all of them"
                )
        for parameter, owners in self._operators.items():
            self._set_frozen(parameter, bool(owners & frozen))
        self.frozen = frozen
        if frozen and not self._hooks:
            self._hooks = [*self._optimizer_hooks(), *self._embedding_hooks()]
        elif not frozen:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _set_frozen(self, parameter: Any, frozen: bool) -> None:
        if self._skips_gradients:
            parameter.requires_grad_(not frozen)
        else:  # DeepSpeed fills buckets in order of arrival: a missing gradient would regroup all later sums
            parameter.frozen = frozen

    def _optimizer_hooks(self):
        for member in members(self._optimizer):
            yield member.optimizer.register_step_pre_hook(lambda *_, member=member: drop_gradients(member))

    def _embedding_hooks(self):
        for model in map(unwrap, self._chunks):
            if getattr(model, "embedding", None) is not None:
                embedding: Any = model.embedding
                yield embedding.register_forward_hook(_let_gradients_through)


def _let_gradients_through(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    # recomputed layers compute weight gradients only if their input requires a gradient, unlike a frozen embedding's
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


PARAM = "param"


class MegatronState:
    """The state of this rank's model chunks and their megatron-core optimizer, by operator.

    Only :meth:`gather_weights` communicates.  Call the methods only between iterations; gradients can be read from
    their reduction until the next iteration starts.

    Raises:
        ValueError: a parameter belongs to no known operator.
    """

    def __init__(self, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, modules: ModuleState):
        self._chunks, self._optimizer, self._modules = chunks, optimizer, modules
        self._zero, self._peers = chunks[0].ddp_config.use_distributed_optimizer, chunks[0].dp_cp_group
        self._sharded = sharded_part(optimizer)
        self.describe()

    def describe(self) -> None:
        """Rebuilds the description of the state after experts have moved; nothing may be frozen."""
        self._parameters = parameter_pieces(self._chunks)
        self._user_state = self._modules.user_state_pieces()
        self._pieces = self._parameters | self._modules.shared_pieces() | self._user_state
        self._masters: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for owned in owned_slices(self._optimizer):
            self._masters[owned.parameter].append((owned.start, owned.slots[MASTER]))
        self._counters = list(self._find_counters())
        self._freezer = Freezer(self._chunks, self._optimizer, self._parameters)

    def operators(self) -> list[str]:
        """Returns the names of the operators with a part on this rank, in model order."""
        names = (operator_of(piece.name) for pieces in self._parameters.values() for piece in pieces)
        return list(dict.fromkeys(names))

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields this rank's tensor chunks of some operators, as views of live memory, in model order.

        Over all ranks, the chunks with ``first_copy`` hold every element of every optimizer-state key exactly once.
        """
        names = set(operators)
        for part in self._slices(detail):
            for fragment in fragments_of(part, self._pieces[part.parameter]):
                if fragment.operator in names:
                    yield fragment

    def parameters(self, operators: Iterable[str]) -> list[torch.nn.Parameter]:
        """Returns the parameters of some operators on this rank.

        Raises:
            FreezingError: a parameter also belongs to other operators, so it cannot be updated separately.
        """
        names, parameters = set(operators), []
        for parameter, pieces in self._parameters.items():
            owners = {operator_of(piece.name) for piece in pieces}
            if owners and owners <= names:
                parameters.append(parameter)
            elif owners & names:
                raise FreezingError(
                    f"{', '.join(sorted(owners))} share one parameter. Fix: drop --moe-single-grouped-weight and "
                    "--moe-single-grouped-bias"
                )
        return parameters

    def adam_groups(self, operators: Iterable[str]) -> list[tuple[str, AdamGroup]]:
        """Returns the kinds of the operators' parameters on this rank, each with the Adam group that updates it."""
        names, groups = set(operators), {}
        for parameter, group in adam_groups(self._optimizer):
            for piece in self._pieces[parameter]:
                if operator_of(piece.name) in names:
                    groups[kind_of(piece.name), id(group.values)] = group
        return [(kind, group) for (kind, _), group in groups.items()]

    @torch.no_grad()
    def load(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes values into the live memory of a tensor chunk, and keeps weights and masters consistent.

        Loading a ``master`` sets the same elements of the model's weight, rounded to its dtype; loading a ``param``
        sets the same elements of the master.  So they agree at the next update.  If both are loaded, the later wins:
        load ``COMPUTE`` first.  With ZeRO-1, either is a slice of the weight, and the rest is on the data-parallel
        peers: call :meth:`gather_weights` after all of them have loaded.

        Args:
            fragment: a tensor chunk from :meth:`fragments`, of any state subset.
            values: ``fragment.region.numel`` elements in any shape, of the dtype of ``fragment.view``, on any device.

        Raises:
            ValueError: the number of elements or the dtype differs.
        """
        view = fragment.view
        if values.numel() != view.numel() or values.dtype != view.dtype:
            raise ValueError(
                f"{fragment.slot} of {fragment.name} at {fragment.region.offset} takes {view.numel()} elements of "
                f"{view.dtype}, not {values.numel()} of {values.dtype}"
            )
        view.copy_(values.reshape(-1))
        if fragment.tensor not in self._parameters:
            self._modules.loaded(fragment.tensor)
        elif fragment.slot == MASTER:
            _flat(fragment.tensor)[fragment.start : fragment.start + view.numel()].copy_(view)
        elif fragment.slot == PARAM:
            for first, master in self._masters.get(fragment.tensor, ()):
                start, stop = max(first, fragment.start), min(first + master.numel(), fragment.start + view.numel())
                if start < stop:
                    master[start - first : stop - first].copy_(view[start - fragment.start : stop - fragment.start])

    def gather_weights(self) -> None:
        """All-gathers every weight that only one data-parallel peer updates; a collective call of the peers.

        Also broadcasts the router biases from the peer that owns them.  Required after masters or weights are loaded;
        does nothing with a replicated optimizer.

        Another call repairs everything that a loss leaves undefined.  No peer's own part of the weights changes, and
        biases change only if all peers have received them.
        """
        if self._zero:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        if self._sharded is not None:
            self._sharded.gather_weights()
        gather_layers(self._optimizer)
        if self._is_sharded and (biases := self._modules.committed):
            arriving = {buffer: committed.clone() for buffer, committed in biases.items()}
            for values in arriving.values():
                dist.broadcast(values, group=self._peers, group_src=self._first_peer)
            synchronize_group(self._peers, next(iter(arriving.values())).device)
            for buffer, values in arriving.items():
                biases[buffer].copy_(values)
                self._modules.loaded(buffer)

    def steps(self) -> dict[str, int]:
        """Returns Adam's update count of each operator with a slice in this rank's optimizer; empty with SGD."""
        counted = {}
        for operator, counter in self._counters:
            if "step" in counter:
                counted[operator] = int(counter["step"])
        return counted

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates of operators on this rank; ignores others.

        The fused Adam of Transformer Engine and apex counts for a complete parameter group: the last operator set wins.
        """
        for operator, counter in self._counters:
            if operator in steps:
                write_step(counter, steps[operator])

    @property
    def frozen(self) -> frozenset[str]:
        """All frozen operators, including those on other ranks."""
        return self._freezer.frozen

    def freeze(self, operators: Iterable[str]) -> None:
        """Freezes operators until they are activated; call it with the same operators on all ranks.

        A frozen operator computes forward and the gradients of its inputs; the gradients of all other operators stay
        bit-identical.  It computes no weight gradients, except the router's (experts times hidden size), which
        megatron-core always computes.  It receives no update: weights, moments, decay, update count and router biases
        do not change.  Its gradients count neither in the norm nor among the zeros.  Its part of megatron-core's
        gradient buffers holds zeros, which are reduced with their bucket; ZeRO-1's gather includes its unchanged
        weights.  A fused Adam, which counts updates for a complete parameter group, continues counting.

        Raises:
            FreezingError: communication of gradients or weights overlaps with computation, or an operator shares a
                parameter with one that is not to be frozen.  Nothing has changed.
        """
        self._freezer.freeze(operators)

    def activate(self, operators: Iterable[str]) -> None:
        """Resumes updates of frozen operators; raises FreezingError as :meth:`freeze` does."""
        self._freezer.activate(operators)

    def _slices(self, detail: Detail) -> Iterator[OwnedSlice]:
        parts = owned_gradients(self._optimizer) if detail is Detail.GRAD else owned_slices(self._optimizer)
        owned: dict[torch.Tensor, list[OwnedSlice]] = defaultdict(list)
        for part in parts:
            owned[part.parameter].append(part)
        ordered = [part for parameter in self._parameters for part in owned.get(parameter, ())]
        yield from (_SUBSET_OF[detail](part) for part in ordered)
        if detail is not Detail.MOMENTS:
            for data in self._user_state:  # an update repeated from saved gradients runs no module
                yield OwnedSlice(data, 0, data.numel(), {PARAM: data}, sharded=True)
        if detail not in (Detail.GRAD, Detail.MOMENTS):
            yield from self._owned_buffers()

    def _owned_buffers(self) -> Iterator[OwnedSlice]:
        # no optimizer shards buffers; with ZeRO-1, one peer saves them once, and gather_weights broadcasts them
        if not self._is_sharded or self._peers.rank() == self._first_peer:
            for buffer, committed in self._modules.committed.items():
                yield OwnedSlice(buffer, 0, buffer.numel(), {PARAM: _flat(committed)}, sharded=self._is_sharded)

    @property
    def _is_sharded(self) -> bool:
        return self._zero or self._sharded is not None or bool(layer_wise_parts(self._optimizer))

    @property
    def _first_peer(self) -> int:
        return 0 if self._sharded is None else self._sharded.first

    def _find_counters(self) -> Iterator[tuple[str, dict]]:
        for part in owned_slices(self._optimizer):
            for operator in {operator_of(piece.name) for piece in self._pieces[part.parameter]}:
                yield operator, part.counter


def optimizer_fragments(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Fragment]:
    """Yields every tensor chunk of optimizer state on this rank, in a fixed order."""
    pieces = parameter_pieces(chunks)
    for owned in owned_slices(optimizer):
        yield from fragments_of(owned, pieces[owned.parameter])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _weights(owned: OwnedSlice) -> OwnedSlice:
    return dataclasses.replace(owned, slots={PARAM: _flat(owned.parameter)[owned.start : owned.stop]})


def _moments(owned: OwnedSlice) -> OwnedSlice:
    return dataclasses.replace(owned, slots={slot: v for slot, v in owned.slots.items() if slot != MASTER})


_SUBSET_OF = {
    Detail.FULL: lambda owned: owned,
    Detail.MASTER: lambda owned: dataclasses.replace(owned, slots={MASTER: owned.slots[MASTER]}),
    Detail.MOMENTS: _moments,
    Detail.COMPUTE: _weights,
    Detail.GRAD: lambda owned: owned,
}
