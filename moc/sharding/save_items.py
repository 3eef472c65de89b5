"""Lists the save items of a checkpoint of a model, from the shapes of its operators and a parallel layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from moc.sharding.assignment import SaveItem
from moc.sharding.parallel_layout import LayoutError, ParallelLayout
from moc.state.operators import Operator


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a checkpoint per parameter: 2 + 12 in MoC (section 2.3, Figure 2).

    Attributes:
        weights: bytes of the compute weights: B_w.
        master: bytes of the fp32 master weights; 0 if the compute weights are fp32 themselves.
        moments: bytes of both Adam moments; with ``master``: B_o.
    """

    weights: int = 2
    master: int = 4
    moments: int = 8

    @property
    def optimizer(self) -> int:
        """B_o, bytes of master weights and moments."""
        return self.master + self.moments

    @property
    def gradient(self) -> float | None:
        """Bytes of fp32 gradients relative to the saved state; None without moments, which their application needs."""
        return 4 / ((self.master or self.weights) + self.moments) if self.moments else None


@dataclass(frozen=True)
class _Segment:
    """Part of an operator at the same position of the buffer on every tensor-parallel rank."""

    operator: Operator
    elements: int
    is_sliced: bool
    """Whether each tensor-parallel rank holds its own slice; otherwise all hold the same data."""


@dataclass(frozen=True)
class _Buffer:
    """Consecutive segments in the flat buffers of some ranks: ``grid[slice][data-parallel position]``."""

    segments: list[_Segment]
    grid: list[tuple[int, ...]]

    def holders_by_slice(self, segment: _Segment) -> Iterator[tuple[int | None, list[tuple[int, ...]]]]:
        """Yields the holders of each slice of a segment (None if unsliced), by data-parallel position."""
        if not segment.is_sliced:
            yield None, list(zip(*self.grid, strict=True))
            return
        for number, ranks in enumerate(self.grid):
            yield number, [(rank,) for rank in ranks]


def list_save_items(
    operators: Sequence[Operator],
    layout: ParallelLayout,
    state: StateBytes | None = None,
    *,
    uses_zero: bool = True,
    chosen_experts: Collection[str] | None = None,
    keeps_master: bool = False,
) -> list[SaveItem]:
    """Returns the save items of a checkpoint.

    The first pipeline stage saves a weight shared by embedding and output.

    Args:
        operators: operators of the unpartitioned model, in order.
        layout: parallel layout of the ranks.
        state: bytes per parameter; by default for 16-bit training with Adam.
        uses_zero: ZeRO-1 or ZeRO-2: each data-parallel rank holds a part of the optimizer state.  Otherwise it is
            replicated, and rules shard it like weights.
        chosen_experts: names of the experts that partial experts checkpointing saves (MoC, section 3); None for all.
        keeps_master: also save the master weights of experts that are not chosen.

    Raises:
        LayoutError: layers, experts or slices do not divide evenly over ranks.
    """
    state = state or StateBytes()
    items: list[SaveItem] = []
    for buffer in _buffers(operators, layout):
        items += [
            *_weight_items(buffer, state, chosen_experts),
            *_optimizer_items(buffer, state, uses_zero, chosen_experts, keeps_master),
        ]
    return items


def _weight_items(buffer: _Buffer, state: StateBytes, chosen_experts: Collection[str] | None) -> Iterator[SaveItem]:
    for segment in buffer.segments:
        if not state.weights or not _is_saved(segment.operator, chosen_experts):
            continue
        for number, ranks_by_position in buffer.holders_by_slice(segment):
            yield SaveItem(
                segment.operator.name,
                "weights",
                number,
                0,
                segment.elements * state.weights,
                _all_ranks(ranks_by_position),
            )


def _optimizer_items(
    buffer: _Buffer, state: StateBytes, uses_zero: bool, chosen_experts: Collection[str] | None, keeps_master: bool
) -> Iterator[SaveItem]:
    sizes = [segment.elements for segment in buffer.segments]
    for index, part, start, stop in partition_flat_buffer(sizes, len(buffer.grid[0]) if uses_zero else 1):
        segment = buffer.segments[index]
        slot, size = "optimizer", state.optimizer
        if not _is_saved(segment.operator, chosen_experts):
            slot, size = "master", state.master * keeps_master
        if not size:
            continue
        for number, ranks_by_position in buffer.holders_by_slice(segment):
            holders = ranks_by_position[part] if uses_zero else _all_ranks(ranks_by_position)
            yield SaveItem(segment.operator.name, slot, number, start * size, stop * size, holders)


def partition_flat_buffer(sizes: Sequence[int], parts: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts a buffer of consecutive segments into equal contiguous parts, as ZeRO does.

    DeepSpeed's ZeRO-1 and ZeRO-2 and megatron-core's distributed optimizer all give each data-parallel rank one
    such part of the optimizer state.  The buffer is padded to a multiple of the parts.

    Yields:
        (segment, part, first element in the segment, one past the last), ascending, none empty.
    """
    part_elements = -(-sum(sizes) // parts)
    segment_start = 0
    for segment, size in enumerate(sizes):
        start = 0
        while start < size:
            part = (segment_start + start) // part_elements
            stop = min(size, (part + 1) * part_elements - segment_start)
            yield segment, part, start, stop
            start = stop
        segment_start += size


def _is_saved(operator: Operator, chosen_experts: Collection[str] | None) -> bool:
    return chosen_experts is None or operator.kind != "expert" or operator.name in chosen_experts


def _all_ranks(ranks_by_position: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for ranks in ranks_by_position for rank in ranks))


def _buffers(operators: Sequence[Operator], layout: ParallelLayout) -> Iterator[_Buffer]:
    num_layers = 1 + max((o.layer for o in operators if o.layer is not None), default=-1)
    num_experts = 1 + max((o.expert for o in operators if o.expert is not None), default=-1)
    if num_experts % layout.ep:
        raise LayoutError(
            f"{num_experts} experts are not a multiple of ep = {layout.ep}. Fix: change the number of experts, or the "
            "expert-parallel size",
            code="experts-not-divisible",
        )
    experts_are_dense = (
        layout.ep == 1 and layout.etp == layout.tp
    )  # megatron-core then treats experts as ordinary parameters
    for stage in range(layout.pp):
        stage_operators = [o for o in operators if _stage(o, layout, num_layers) == stage]
        dense = [o for o in stage_operators if experts_are_dense or o.kind != "expert"]
        yield _buffer(dense, [layout.replicas(tp, stage) for tp in range(layout.tp)])
        for ep in range(0 if experts_are_dense else layout.ep):
            expert_operators = [
                o for o in stage_operators if o.expert is not None and o.expert * layout.ep // num_experts == ep
            ]
            yield _buffer(expert_operators, [layout.expert_replicas(etp, ep, stage) for etp in range(layout.etp)])


def _stage(operator: Operator, layout: ParallelLayout, num_layers: int) -> int:
    if operator.layer is not None:
        return layout.stage_of_layer(operator.layer, num_layers)
    return layout.pp - 1 if operator.kind == "output" else 0


def _buffer(operators: Sequence[Operator], grid: list[tuple[int, ...]]) -> _Buffer:
    slices, segments = len(grid), []
    for operator in operators:
        unsliced = operator.unsliced if slices > 1 else 0
        elements, remainder = divmod(operator.parameters - unsliced, slices)
        if remainder:
            raise LayoutError(
                f"{operator.name} does not divide into {slices} tensor-parallel slices. Fix: change the "
                "tensor-parallel size",
                code="tensors-not-divisible",
            )
        segments += [_Segment(operator, elements, True), _Segment(operator, unsliced, False)]
    return _Buffer([segment for segment in segments if segment.elements], grid)
