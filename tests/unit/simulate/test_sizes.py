"""Sizes are those of the real sharding rules; a window is that of Algorithm 1."""

import pytest

from moc.policy.windows import largest_snapshot, snapshot_bytes
from moc.sharding import (
    SCHEMES,
    ParallelLayout,
    StateBytes,
    assign_items,
    bytes_by_rank,
    cut_large_items,
    list_save_items,
)
from moc.simulate.sizes import OperatorSize, busiest_operator_bytes, full_sizes, pec_sizes
from tests.cases import each_row
from tests.unit.simulate.setups import OPERATORS, PARAMETERS


@each_row("layout", [ParallelLayout(8, ep=4), ParallelLayout(16, pp=2, ep=8), ParallelLayout(12, pp=3, ep=2)], ids=str)
def test_sizes_match_sharding_rules(layout):
    items = cut_large_items(list_save_items(OPERATORS, layout, StateBytes(weights=0)))
    whole = bytes_by_rank(items, assign_items(items, SCHEMES["EE+AN"]), layout.world)
    sizes = full_sizes(OPERATORS, layout)
    assert sizes.total == sum(whole) == 12 * PARAMETERS
    assert sizes.busiest == pytest.approx(max(whole), rel=0.02)


def test_uneven_stages_are_supported():
    sizes = full_sizes(OPERATORS, ParallelLayout(16, pp=4, ep=4))
    assert sizes.total == 12 * PARAMETERS and sizes.busiest > sizes.total / 16


@each_row("replicas", [64, 256])
def test_size_per_rank_decreases_with_number_of_replicas(replicas):
    layout = ParallelLayout(4 * replicas * 2, pp=2, ep=4)
    sizes, few = full_sizes(OPERATORS, layout), full_sizes(OPERATORS, ParallelLayout(4 * 32 * 2, pp=2, ep=4))
    assert sizes.total == few.total == 12 * PARAMETERS
    assert sizes.busiest == pytest.approx(few.busiest * 32 / replicas, rel=1e-3)
    items = cut_large_items(list_save_items(OPERATORS, layout, StateBytes(weights=0)))
    busiest = max(bytes_by_rank(items, assign_items(items, SCHEMES["EE+AN"]), layout.world))
    assert sizes.busiest == pytest.approx(busiest, rel=0.05)


def test_bytes_grow_with_experts_up_to_everything():
    layout = ParallelLayout(16, pp=4, ep=4)
    totals = [pec_sizes(OPERATORS, layout, k).total for k in (1, 2, 4, 8, 16)]
    assert totals == sorted(totals) and totals[-1] == 12 * PARAMETERS
    experts = 12 * sum(o.parameters for o in OPERATORS if o.kind == "expert")
    assert totals[0] == pytest.approx(12 * PARAMETERS - 15 / 16 * experts)


def test_fp32_training_saves_only_weights():
    assert full_sizes(OPERATORS, ParallelLayout(8, ep=4), StateBytes(weights=4, master=0)).total == 12 * PARAMETERS


def test_operator_bytes_of_busiest_rank_add_up():
    layout = ParallelLayout(16, pp=4, ep=4)
    sizes = busiest_operator_bytes(OPERATORS, layout)
    assert sum(size.full for size in sizes) == full_sizes(OPERATORS, layout).busiest
    assert sum(size.compute for size in sizes) == pytest.approx(2 / 12 * sum(size.full for size in sizes), rel=0.1)


def test_window_operators_have_window_order():
    names = [size.name for size in busiest_operator_bytes(OPERATORS, ParallelLayout(16, pp=4, ep=4))]
    experts = [".expert." in name for name in names]
    assert any(experts) and experts == sorted(experts, reverse=True)


def test_window_saves_all_state_once_and_weights_before():
    sizes = [OperatorSize(str(n), 12, 2) for n in range(6)]
    # MoEvement, Figure 6, with three iterations: 4 + 2, 2 + 4 and 6 operators' worth.
    assert sum(snapshot_bytes(sizes, 2)) == 6 * 12 + (4 + 2) * 2
    assert sum(snapshot_bytes(sizes, 6)) == 72
    assert largest_snapshot(sizes, 2) == 2 * 12 + 4 * 2
