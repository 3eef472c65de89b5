"""How models lie on nodes: whose ranks are numbered copy by copy, and which ranks megatron-core's groups then have."""

import pytest

from megatron.pretraining.config import stages_on_nodes
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


@pytest.mark.parametrize(
    ("flags", "varies", "stages"),
    [
        (PP2, True, 2),
        (PP2, False, 2),
        (f"{PP2} {TP2}", True, 2),
        (f"{PP2} {TP2}", False, 1),  # the order that such jobs have always had
        (TP2, True, 1),
    ],
)
def test_stages_of_which_a_node_has_workers(flags, varies, stages):
    assert stages_on_nodes(parse(f"{ELASTIC} {flags}"), 4, varies) == stages


@pytest.mark.parametrize("tensor", [1, 2])
def test_groups_of_ranks_that_are_numbered_copy_by_copy(nodes, monkeypatch, tensor):
    monkeypatch.setattr(nodes, "goes_by_copies", lambda config: True)
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
