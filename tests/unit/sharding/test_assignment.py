"""MoC's equations 8 and 9 by hand, and bounds that hold for every rule."""

from hypothesis import given, settings

from moc.sharding import (
    SCHEMES,
    ParallelLayout,
    SaveItem,
    assign_items,
    bytes_by_rank,
    equation_8,
    forced_bytes,
    ideal_bytes,
    list_save_items,
    pec_leaves_ranks_unequal,
)
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.unit.sharding.strategies import models_in_layouts

SHAPE = ModelShape((1, 1), 8, 16, 8, 8, 8, 32, num_experts=4, expert_ffn_hidden_size=16)


def test_equation_8_matches_manual_calculation():
    # 100 + 800 parameters, 2 + 12 bytes: optimizer 900 x 12 / 4, weights 100 x 2 / 8 and 800 x 2 / 4
    assert equation_8(100, 800, 2, 12, dp=8, ep=4) == 2700 + 25 + 400


def test_equation_8_is_mean_with_one_expert_parallel_group():
    operators = model_operators(SHAPE)
    expert = sum(o.parameters for o in operators if o.kind == "expert")
    other = sum(o.parameters for o in operators) - expert
    layout = ParallelLayout(4, ep=4)
    assert ideal_bytes(list_save_items(operators, layout), layout) == equation_8(other, expert, 2, 12, 4, 4)
    assert equation_8(other, expert, 2, 12, 4, 4) == 14 * (other + expert) / 4


def test_bounds_match_manual_calculation():
    items = [
        SaveItem("layers.0.attention", "weights", 0, 0, 6, (0, 1)),
        SaveItem("layers.1.attention", "weights", 0, 0, 10, (2, 3)),
        SaveItem("layers.1.attention", "optimizer", 0, 0, 7, (2,)),
        SaveItem("layers.1.attention", "optimizer", 0, 7, 10, (3,)),
    ]
    assert ideal_bytes(items, ParallelLayout(4, pp=2)) == (10 + 7 + 3) / 2
    assert forced_bytes(items) == 7


@each_row(
    "k, layers, dp, ep, unequal",
    [
        (1, 12, 8, 8, True),  # 12 experts over 8 ranks
        (2, 12, 8, 8, False),  # 3 each
        (1, 12, 16, 16, True),
        (4, 12, 16, 16, False),
        (2, 12, 16, 8, True),  # 3 for each expert-parallel rank, which are 2
        (4, 12, 16, 8, False),
        (1, 4, 3, 3, True),  # Figure 4: one rank saves two experts, the others one
    ],
)
def test_equation_9_matches_manual_calculation(k, layers, dp, ep, unequal):
    assert pec_leaves_ranks_unequal(k, layers, dp, ep) == unequal


@settings(max_examples=40)
@given(models_in_layouts())
def test_no_scheme_is_below_bounds(case):
    shape, layout = case
    items = list_save_items(model_operators(shape), layout)
    for scheme in SCHEMES.values():
        bottleneck = max(bytes_by_rank(items, assign_items(items, scheme), layout.world))
        assert bottleneck >= max(ideal_bytes(items, layout), forced_bytes(items))
