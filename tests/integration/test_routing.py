"""Tokens of experts are counted exactly, whatever the layout, and what is computed twice counts once."""

import pytest

from tests.integration.tiny import DEEP, FLAGS, LAYOUTS
from tests.worlds import run_world

SENT = FLAGS["global_batch_size"] * FLAGS["seq_length"] * FLAGS["moe_router_topk"]
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def count(layout: str, data: dict, **flags) -> list[dict]:
    """Counts of two iterations; all workers agree."""
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | DEEP | parallel | data | dict(train_iters=2) | flags
    told = run_world(size, "tests.integration.routing_bodies:count", flags=flags)
    assert all(worker == told[0] for worker in told)
    return told[0]


@pytest.fixture(scope="module")
def one_worker(data):
    return count("1", data)


def test_every_expert_token_is_counted(one_worker):
    for iteration in one_worker:
        assert iteration["sent"] == {str(layer): SENT for layer in range(DEEP["num_layers"])}
        assert {layer: sum(tokens) for layer, tokens in iteration["experts"].items()} == iteration["sent"]
        for layer, sums in iteration["probabilities"].items():
            assert sum(sums) == pytest.approx(SENT / FLAGS["moe_router_topk"])  # those of a token's experts make 1
            assert all(0 < p < n for p, n in zip(sums, iteration["experts"][layer], strict=True))
    assert len({tuple(tokens) for tokens in one_worker[0]["experts"].values()}) > 1


@pytest.mark.parametrize("flags", [{}, RECOMPUTED], ids=["", "recomputed"])
@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2", "interleaved"])
def test_token_counts_are_equal_in_every_layout(layout, flags, one_worker, data):
    for here, there in zip(count(layout, data, **flags), one_worker, strict=True):
        assert here["probabilities"] == {layer: pytest.approx(p) for layer, p in there["probabilities"].items()}
        assert here | {"probabilities": None} == there | {"probabilities": None}


def test_dropped_tokens_count_as_sent_only(data):
    dropping = dict(moe_expert_capacity_factor=0.5, moe_token_drop_policy="probs")
    plain = count("EP2", data, **dropping)
    padded = count("EP2", data, **dropping, moe_pad_expert_input_to_capacity=True)
    for iteration in plain:
        assert iteration["sent"] == {str(layer): SENT for layer in range(DEEP["num_layers"])}
        assert all(0 < sum(tokens) < SENT for tokens in iteration["experts"].values())
        iteration.pop("probabilities")
    assert [{name: told[name] for name in ("experts", "sent")} for told in padded] == plain


def test_layers_without_experts_have_no_token_counts(data):
    told = count("PP2", data, moe_layer_freq=2)
    assert [sorted(iteration["experts"]) for iteration in told] == [["0", "2"]] * 2
