"""Elastic training with the same workers throughout: results do not depend on their number."""

import pytest

from tests.integration.test_layouts import CLOSE, assert_alike
from tests.integration.tiny import known, train

PLAIN = dict(calculate_per_token_loss=True, moe_token_dispatcher_type="alltoall", global_batch_size=4)
ELASTIC = dict(elastic=True, elastic_slots=3)


@pytest.mark.parametrize("layout", ["DP4", "PP2xDP2", "TP2xDP2"])
@pytest.mark.parametrize("zero", [False, True])
def test_thirty_iterations_as_with_plain_experts(layout, zero, data):
    flags = data | PLAIN | dict(train_iters=30, use_distributed_optimizer=zero)
    assert_alike(train(layout, flags | ELASTIC), known("EP4" if layout == "DP4" else "1", flags))


@pytest.mark.parametrize("layout", ["DP4", "PP2xDP2", "TP2xDP2"])
def test_dropout(layout, data):
    flags = data | PLAIN | ELASTIC | dict(train_iters=30, hidden_dropout=0.1, attention_dropout=0.1, global_batch_size=5)
    alone = {"PP2xDP2": "PP2", "TP2xDP2": "TP2"}.get(layout, "1")
    reference = train(alone, flags | dict(elastic_min_replicas=1, elastic_slots=4))
    assert_alike(train(layout, flags), reference)
