"""Random layouts, models and items."""

from hypothesis import strategies as st

from moc.sharding import ParallelLayout, SaveItem
from tests.model_shape import ModelShape


@st.composite
def layouts(draw) -> ParallelLayout:
    """Layouts of up to a few dozen ranks."""
    tp, ep, pp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    etp = draw(st.sampled_from([1, tp]))
    return ParallelLayout(world=tp * ep * pp * draw(st.integers(1, 3)), tp=tp, pp=pp, ep=ep, expert_tp=etp)


@st.composite
def models_in_layouts(draw) -> tuple[ModelShape, ParallelLayout]:
    """A small model and a layout that it divides into."""
    layout = draw(layouts())
    layers = layout.pp * draw(st.integers(1, 3))
    width = 12 * layout.tp
    shape = ModelShape(
        expert_layers=tuple(draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))),
        hidden_size=width,
        ffn_hidden_size=2 * width,
        query_width=width,
        key_width=width,
        head_width=12,
        vocab_size=12 * draw(st.integers(1, 20)),
        num_experts=layout.ep * draw(st.integers(1, 3)),
        expert_ffn_hidden_size=24,
        tied=draw(st.booleans()),
        positions=draw(st.integers(0, 5)),
    )
    return shape, layout


@st.composite
def item_lists(draw, holders=None) -> list[SaveItem]:
    """Items of random sizes; each held by ``holders``, by default by ranks of its own."""
    some_ranks = st.sets(st.integers(0, 7), min_size=1, max_size=5).map(lambda ranks: tuple(sorted(ranks)))
    result = []
    for index in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["attention", "expert.3"]))
        ranks = draw(some_ranks) if holders is None else holders
        result.append(SaveItem(f"layers.{index}.{kind}", "weights", 0, 0, draw(st.integers(1, 30)), ranks))
    return result
