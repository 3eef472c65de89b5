"""What is there to save: every byte of every operator once, with all the ranks that hold it."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from moc.sharding import ParallelLayout, SaveItem, StateBytes, cut_large_items, list_save_items
from moc.sharding.save_items import partition_flat_buffer
from tests.cases import each_row
from tests.errors import raises
from tests.model_shape import ModelShape, model_operators
from tests.unit.sharding.strategies import item_lists, models_in_layouts

STATE = StateBytes()


def covered(items) -> dict:
    """The bytes of each part, after a check that no two items of it overlap and none is missing between them."""
    ranges = defaultdict(list)
    for item in items:
        ranges[item.operator, item.slot, item.slice].append((item.start, item.stop))
    for parts in ranges.values():
        parts.sort()
        assert parts[0][0] == 0
        assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    return {key: parts[-1][1] for key, parts in ranges.items()}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 8))
def test_zero_splits_elements_equally_without_overlap(sizes, parts):
    seen, of_part = defaultdict(list), Counter()
    for segment, part, start, stop in partition_flat_buffer(sizes, parts):
        assert start < stop and part < parts
        seen[segment].extend(range(start, stop))
        of_part[part] += stop - start
    assert {s: list(range(n)) for s, n in enumerate(sizes) if n} == seen
    assert max(of_part.values(), default=0) <= -(-sum(sizes) // parts)


@given(models_in_layouts(), st.booleans())
def test_every_byte_of_model_is_one_item(case, zero):
    shape, layout = case
    items = list_save_items(model_operators(shape), layout, STATE, uses_zero=zero)
    total = Counter()
    for (operator, slot, _), size in covered(items).items():
        total[operator, slot] += size
    for o in model_operators(shape):
        assert total[o.name, "weights"] == 2 * o.parameters
        assert total[o.name, "optimizer"] == 12 * o.parameters


@given(models_in_layouts())
def test_holders_are_replicas_and_zero_leaves_one_of_each(case):
    shape, layout = case
    for item in list_save_items(model_operators(shape), layout, STATE):
        copies = layout.expert_dp if item.is_expert else layout.dp
        places = 1 if item.slot == "optimizer" else copies
        slices = 1 if item.slice is not None else (layout.etp if item.is_expert else layout.tp)
        assert len(set(item.holders)) == places * slices
        assert len({layout.stage(rank) for rank in item.holders}) == 1


EXPERTS = ModelShape((1, 0), 8, 8, 8, 8, 8, 8, num_experts=4, expert_ffn_hidden_size=8)


def test_operators_are_on_ranks_of_megatron_core():
    """Two stages of four ranks; two expert-parallel groups of two ranks in each."""
    weights = list_save_items(model_operators(EXPERTS), ParallelLayout(8, pp=2, ep=2), StateBytes(master=0, moments=0))
    holders = {item.operator: item.holders for item in weights}
    first, last = (0, 1, 2, 3), (4, 5, 6, 7)
    assert holders["embedding"] == holders["layers.0.attention"] == holders["layers.0.router"] == first
    assert holders["layers.1.mlp"] == holders["output"] == last
    assert [holders[f"layers.0.expert.{e}"] for e in range(4)] == [(0, 2), (0, 2), (1, 3), (1, 3)]


def test_only_chosen_experts_are_saved():
    chosen = {"layers.0.expert.2"}
    items = list_save_items(model_operators(EXPERTS), ParallelLayout(4, ep=2), STATE, chosen_experts=chosen)
    assert {item.operator for item in items if item.is_expert} == chosen
    everything = list_save_items(model_operators(EXPERTS), ParallelLayout(4, ep=2), STATE)
    others = [item for item in everything if not item.is_expert]
    assert [item for item in items if not item.is_expert] == others


def test_master_weights_of_unselected_experts_can_be_kept():
    items = list_save_items(
        model_operators(EXPERTS),
        ParallelLayout(4, ep=2),
        STATE,
        chosen_experts={"layers.0.expert.2"},
        keeps_master=True,
    )
    sizes = covered(items)
    parameters = next(o.parameters for o in model_operators(EXPERTS) if o.kind == "expert")
    for expert in (0, 1, 3):
        name = f"layers.0.expert.{expert}"
        assert {slot: size for (o, slot, _), size in sizes.items() if o == name} == {"master": 4 * parameters}
    assert sizes["layers.0.expert.2", "optimizer", 0] == 12 * parameters


@each_row(
    "layout, code, named",
    [
        (ParallelLayout(6, ep=3), "experts-not-divisible", "ep = 3"),
        (ParallelLayout(6, tp=3, expert_tp=1), "tensors-not-divisible", "embedding"),
        (ParallelLayout(4, pp=4), "layers-not-divisible", "4 pipeline stages"),
    ],
)
def test_indivisible_model_is_refused(layout, code, named):
    with raises(code, named):
        list_save_items(model_operators(EXPERTS), layout, STATE)


@each_row("begin", [0, 4096])
def test_chunks_are_a_64th_of_even_share_in_full_pages(begin):
    item = SaveItem("embedding", "weights", None, begin, begin + (64 << 20), (0, 1))
    size = 32 * 1024 * 1024 // 64
    starts = [piece.start for piece in cut_large_items([item])]
    assert starts == list(range(begin, begin + (64 << 20), size))
    odd = cut_large_items([SaveItem("embedding", "weights", None, 0, 20_001, (0, 1))])
    assert [piece.stop for piece in odd] == [4096, 8192, 12288, 16384, 20_001]


@given(item_lists(holders=(0, 1, 2)), st.integers(1, 50_000))
def test_split_keeps_bytes_and_limits_part_size(items, factor):
    items = [type(i)(i.operator, i.slot, i.slice, 0, i.stop * factor, i.holders) for i in items]
    pieces = cut_large_items(items)
    assert covered(pieces) == covered(items)
    share = sum(item.nbytes for item in items if not item.is_expert) // 3
    assert all(p.nbytes <= max(share, 4096) for p in pieces if not p.is_expert)
    whole = [item for item in items if item.is_expert or item.nbytes <= share]
    assert all(item in pieces for item in whole)
