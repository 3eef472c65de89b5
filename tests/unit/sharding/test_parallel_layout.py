"""Our rank arithmetic is megatron-core's, for any sizes."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.process import cpu
from tests.errors import raises

cpu.install()  # comes before megatron.core
from megatron.core.parallel_state import RankGenerator  # noqa: E402

from moc.sharding import ParallelLayout  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.unit.sharding.strategies import layouts  # noqa: E402

ORDER = "tp-cp-ep-dp-pp"


def groups(ranks) -> set:
    return {tuple(group) for group in ranks}


@given(layouts())
def test_groups_match_megatron_core(layout):
    dense = RankGenerator(layout.tp, 1, layout.dp, layout.pp, 1, ORDER)
    stages, slices = range(layout.pp), range(layout.tp)
    assert groups(dense.get_ranks("dp")) == {layout.replicas(tp, pp) for tp in slices for pp in stages}
    assert groups(dense.get_ranks("tp")) == {
        tuple(layout.rank(tp, dp, pp) for tp in slices) for dp in range(layout.dp) for pp in stages
    }
    for group in dense.get_ranks("pp"):
        assert [layout.stage(rank) for rank in group] == list(stages)


@given(layouts())
def test_expert_groups_match_megatron_core(layout):
    experts = RankGenerator(layout.etp, layout.ep, layout.expert_dp, layout.pp, 1, ORDER)
    stages, slices, owners = range(layout.pp), range(layout.etp), range(layout.ep)
    assert groups(experts.get_ranks("dp")) == {
        layout.expert_replicas(etp, ep, pp) for etp in slices for ep in owners for pp in stages
    }
    assert groups(experts.get_ranks("ep")) == {
        tuple(layout.expert_rank(etp, ep, group, pp) for ep in owners)
        for etp in slices
        for group in range(layout.expert_dp)
        for pp in stages
    }


@given(layouts(), st.integers(1, 3), st.integers(1, 3))
def test_stages_get_equal_layers_and_virtual_stages_alternate(layout, per_chunk, vpp):
    layout = ParallelLayout(layout.world, layout.tp, layout.pp, layout.ep, layout.expert_tp, vpp)
    layers = layout.pp * vpp * per_chunk
    stages = [layout.stage_of_layer(layer, layers) for layer in range(layers)]
    assert stages == [stage for _ in range(vpp) for stage in range(layout.pp) for _ in range(per_chunk)]


@each_row(
    "sizes, code, named",
    [
        (dict(world=0), "value-out-of-range", "world"),
        (dict(world=6, tp=4), "workers-not-divisible", "tp x pp = 4"),
        (dict(world=4, ep=3), "workers-not-divisible", "expert_tp x ep x pp = 3"),
    ],
)
def test_mismatched_sizes_are_refused(sizes, code, named):
    with raises(code, named):
        ParallelLayout(**sizes)


def test_indivisible_layers_are_refused():
    with raises("layers-not-divisible", "5 layers"):
        ParallelLayout(2, pp=2).stage_of_layer(0, 5)
