"""Every item is saved by exactly one holder, the same everywhere, and greedy is as good as it is known to be."""

import itertools
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from moc.sharding import (
    RULES,
    SCHEMES,
    SaveItem,
    ShardingScheme,
    assign_items,
    bytes_by_rank,
    list_save_items,
    parse_scheme,
    rule,
)
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import model_operators
from tests.unit.sharding.strategies import item_lists, models_in_layouts

EVERY_SCHEME = [ShardingScheme(a, b) for a in sorted(RULES) for b in sorted(RULES)]


@each_row("scheme", EVERY_SCHEME, ids=str)
@settings(max_examples=40)
@given(items=item_lists())
def test_every_item_is_saved_by_one_of_its_holders(scheme, items):
    savers = assign_items(items, scheme)
    assert len(savers) == len(items)
    assert all(rank in item.holders for item, rank in zip(items, savers, strict=True))
    assert sum(bytes_by_rank(items, savers, 8)) == sum(item.nbytes for item in items)
    assert savers == assign_items(list(items), scheme)


@settings(max_examples=20)
@given(models_in_layouts(), st.booleans())
def test_every_byte_of_model_is_saved_once(case, zero):
    shape, layout = case
    items = list_save_items(model_operators(shape), layout, uses_zero=zero)
    for scheme in SCHEMES.values():
        assert sum(bytes_by_rank(items, assign_items(items, scheme), layout.world)) == 14 * sum(
            o.parameters for o in model_operators(shape)
        )


def test_assignment_does_not_depend_on_hash_seed():
    program = """
from moc.sharding import *
items = [SaveItem(f"layers.{i}.mlp", "weights", 0, 0, i % 3 + 1, (0, 1, 2)) for i in range(20)]
print(assign_items(items, SCHEMES["EE+AN"]))
"""
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": s}, capture_output=True, text=True
        ).stdout
        for s in ("1", "2")
    }
    assert len(texts) == 1 and texts.pop().startswith("[")


def items(*sizes: int, holders=(0, 1), kind="mlp") -> list[SaveItem]:
    return [SaveItem(f"layers.{i}.{kind}", "weights", 0, 0, size, holders) for i, size in enumerate(sizes)]


def test_baseline_uses_rank_0_and_first_expert_parallel_group():
    here = items(5, 5, holders=(0, 1, 2, 3)) + items(3, holders=(0, 2), kind="expert.0")
    here += items(3, holders=(1, 3), kind="expert.1")
    assert assign_items(here, SCHEMES["baseline"]) == [0, 0, 0, 1]


def test_equal_experts_do_not_move_other_items():
    """MoC, Figure 7: half of what the first group saved goes to the second."""
    here = items(5, 5, holders=(0, 1, 2, 3)) + items(3, 3, holders=(0, 2), kind="expert.0")
    assert assign_items(here, SCHEMES["EE"]) == [0, 0, 0, 2]


def test_only_adaptive_sharding_considers_other_state():
    here = items(4, 4) + items(8, holders=(0,), kind="expert.0")
    assert assign_items(here, SCHEMES["EE+EN"]) == [0, 1, 0]
    assert assign_items(here, SCHEMES["EE+AN"]) == [1, 1, 0]


def test_adaptive_assigns_largest_item_first():
    assert assign_items(items(2, 3, 7, 4), SCHEMES["EE+AN"]) == [0, 1, 0, 1]


def test_ties_use_first_item_and_lowest_rank():
    assert assign_items(items(4, 4, 4, 4, holders=(1, 2, 5)), SCHEMES["EE+AN"]) == [1, 2, 5, 1]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_greedy_is_within_grahams_bound_of_optimum(sizes, ranks):
    here = items(*sizes, holders=tuple(range(ranks)))
    best = min(max(bytes_by_rank(here, savers, ranks)) for savers in itertools.product(range(ranks), repeat=len(here)))
    bottleneck = max(bytes_by_rank(here, assign_items(here, SCHEMES["EE+AN"]), ranks))
    assert 3 * ranks * bottleneck <= (4 * ranks - 1) * best


@given(st.lists(st.integers(1, 100), max_size=40), st.lists(st.integers(0, 200), min_size=4, max_size=4))
def test_greedy_from_any_load_is_within_one_item_of_even(sizes, before):
    here = items(*sizes, holders=(0, 1, 2, 3))
    fixed = [SaveItem(f"layers.0.expert.{r}", "optimizer", 0, 0, size, (r,)) for r, size in enumerate(before)]
    bottleneck = max(bytes_by_rank(here + fixed, assign_items(here + fixed, SCHEMES["EE+AN"]), 4))
    even = (sum(sizes) + sum(before)) / 4
    assert bottleneck <= max([*before, even + 0.75 * max(sizes, default=0)])


@given(item_lists(), st.lists(st.integers(0, 60), min_size=8, max_size=8))
def test_greedy_always_takes_least_loaded_holder(here, before):
    fixed = [SaveItem(f"layers.99.expert.{r}", "optimizer", 0, 0, size, (r,)) for r, size in enumerate(before) if size]
    expected, total = {}, dict(enumerate(before))
    for item in (item for item in here if len(item.holders) == 1):
        total[item.holders[0]] += item.nbytes
    shared = [item for item in here if len(item.holders) > 1]
    for kind in (True, False):
        for item in sorted((i for i in shared if i.is_expert == kind), key=lambda i: -i.nbytes):
            expected[item] = min(item.holders, key=lambda rank: (total[rank], rank))
            total[expected[item]] += item.nbytes
    savers = assign_items(fixed + here, SCHEMES["AE+AN"])[len(fixed) :]
    assert all(expected.get(item, item.holders[0]) == rank for item, rank in zip(here, savers, strict=True))


@each_row("name", SCHEMES)
def test_flag_names_scheme(name):
    assert parse_scheme(name) == SCHEMES[name]


def test_flag_names_two_rules():
    assert (
        parse_scheme("baseline,adaptive")
        == parse_scheme("baseline, adaptive")
        == ShardingScheme("baseline", "adaptive")
    )


@each_row(
    "text, named",
    [
        ("EE+XX", ["'EE+XX'", "baseline, EE, EE+EN, EE+AN, AE+AN"]),
        ("equal", ["'equal'", "equal,adaptive"]),
        ("equal,equal,equal", ["'equal,equal,equal'"]),
        ("equal,sideways", ["'sideways'", "adaptive", "baseline", "equal"]),
        (",", ["''"]),
    ],
)
def test_flag_with_unknown_rule_is_refused(text, named):
    with raises("sharding-rule-unknown", *named):
        parse_scheme(text)


def test_rule_file_is_registered_and_checked():
    @rule("last")
    def last(items, load):
        return [item.holders[-1] for item in items]

    @rule("nobody")
    def nobody(items, load):
        return [99 for _ in items]

    @rule("lazy")
    def lazy(items, load):
        return []

    @rule("failing")
    def failing(items, load):
        return [load[-1] for _ in items]

    try:
        assert assign_items(items(1, 2), ShardingScheme("last", "last")) == [1, 1]
        with raises("sharding-rule-broken", "failing", "KeyError: -1", "test_rules.py:"):
            assign_items(items(1), ShardingScheme("equal", "failing"))
        with raises("sharding-rule-broken", "nobody", "layers.0.mlp", "99"):
            assign_items(items(1), ShardingScheme("equal", "nobody"))
        with raises("sharding-rule-broken", "lazy", "0 of 1"):
            assign_items(items(1), ShardingScheme("equal", "lazy"))
        with raises("sharding-rule-broken", "last"):
            rule("last")(last)
    finally:
        for name in ("last", "nobody", "lazy"):
            del RULES[name]
    with raises("sharding-rule-unknown", "'last'", "adaptive", "baseline", "equal"):
        assign_items(items(1), ShardingScheme("equal", "last"))
