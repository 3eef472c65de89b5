"""How models lie on nodes: whose ranks are numbered copy by copy, and which ranks megatron-core's groups then have."""

import pytest

from megatron.pretraining.config import stages_on_nodes
from tests.cases import each_row
from tests.unit.pretraining.flags import PP2, parse

ELASTIC = (
    "--elastic --elastic-slots 4 --calculate-per-token-loss --global-batch-size 12 --ckpt-policy full --ckpt-dir c"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def nodes():
    from megatron.pretraining.process import cpu

    cpu.install()
    from megatron.pretraining.process import nodes

    return nodes


@each_row(
    ("flags", "varies", "stages"),
    [
        (PP2, True, 2),
        (PP2, False, 2),
        (f"{PP2} {TP2}", True, 2),
        (f"{PP2} {TP2}", False, 1),  # the order that such jobs have always had
        (TP2, True, 1),
    ],
)
def test_node_stage_count_follows_layout(flags, varies, stages):
    assert stages_on_nodes(parse(f"{ELASTIC} {flags}"), 4, varies) == stages


@each_row("tensor", [1, 2])
def test_groups_follow_rank_numbering_by_copies(nodes, monkeypatch, tensor):
    monkeypatch.setattr(nodes, "ranks_are_by_copies", lambda config: True)
    sizes = f"{PP2} {TP2}" if tensor == 2 else PP2
    with nodes.order_of_ranks(parse(f"{ELASTIC} {sizes}")):
        generator = nodes.parallel_state.RankGenerator
        dense = generator(tp=tensor, ep=1, dp=3, pp=2, cp=1, order="tp-cp-ep-dp-pp")
        experts = generator(tp=1, ep=1, dp=3 * tensor, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert nodes.parallel_state.RankGenerator is not generator
    model = 2 * tensor
    copies = [list(range(first, first + model)) for first in range(0, 3 * model, model)]
    assert dense.get_ranks("tp-pp") == copies
    assert dense.get_ranks("pp") == experts.get_ranks("pp") == [[n, n + tensor] for c in copies for n in c[:tensor]]
    stage0 = [rank for copy in copies for rank in copy[:tensor]]
    assert dense.get_ranks("tp-dp-cp")[0] == experts.get_ranks("dp")[0] == stage0  # who exchanges experts
    assert dense.get_ranks("dp")[0] == [copy[0] for copy in copies]


@each_row("tensor", [1, 2])
def test_groups_include_partial_model_nodes(nodes, monkeypatch, tensor):
    """Two copies of two stages, each on a node, and two nodes of the second stage and one of the first that help."""
    monkeypatch.setattr(nodes, "ranks_are_by_copies", lambda config: True)
    monkeypatch.setattr(nodes.dist, "get_world_size", lambda group=None: 7 * tensor)
    sizes = f"{PP2} {TP2}" if tensor == 2 else PP2
    with nodes.order_of_ranks(parse(f"{ELASTIC} {sizes}"), (0, 1, 1)):
        told, generator = nodes.dist.get_world_size(), nodes.parallel_state.RankGenerator
        dense = generator(tp=tensor, ep=1, dp=told // (2 * tensor), pp=2, cp=1, order="tp-cp-ep-dp-pp")
        experts = generator(tp=1, ep=1, dp=told // 2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert nodes.dist.get_world_size() == 7 * tensor
    first = [*range(tensor)]
    of_stage = [[rank + node * tensor for node in held for rank in first] for held in ((0, 2, 4), (1, 3, 5, 6))]
    assert dense.get_ranks("tp-dp-cp") == experts.get_ranks("dp") == of_stage
    pipelines = [[somebody(rank) for rank in of] for of in dense.get_ranks("pp")]
    assert dense.get_ranks("pp") == experts.get_ranks("pp")
    whole = [[rank + copy * 2 * tensor, rank + (copy * 2 + 1) * tensor] for copy in (0, 1) for rank in first]
    assert [of for of in pipelines if None not in of] == whole
    help_first = [[rank + 4 * tensor, None] for rank in first]
    help_second = [[None, rank + node * tensor] for node in (5, 6) for rank in first]
    assert [of for of in pipelines if None in of] == help_first + help_second
    tensor_parallel = [of for of in dense.get_ranks("tp") if None not in map(somebody, of)]
    assert sorted(tensor_parallel) == [[*range(n * tensor, (n + 1) * tensor)] for n in range(7)]


def test_partial_model_nodes_may_cover_several_stages(nodes):
    ranks = nodes.RanksByCopies(size=6, inner=1, stages=4, stages_per_node=2, model_parts=(1,))
    assert (ranks.copies, ranks.core_ranks) == (1, 12)
    assert [somebody(ranks.rank(told)) for told in range(12)] == [0, 1, 2, 3, None, None, 4, None, None, None, None, 5]
    assert len({ranks.rank(told) for told in range(12)}) == 12


def somebody(rank):
    return rank if rank >= 0 else None
