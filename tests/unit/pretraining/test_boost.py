"""Experts that owe tokens process more of them, out of what others of their rank leave, and nobody else notices."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.pretraining.engine.routing import RouterCounts, slots_beyond
from moc.policy.token_ledger import CapacityBoost, TokenDebt, TokenLedger
from moc.session.tokens import TokenTracker
from moc.state.operators import Operator

EXPERTS, RANKS, TOPK, TOKENS, FRACTION = 8, 2, 2, 64, 0.25
OWED = [0, 5000, 0, 3, 0, 0, 7000, 0]
POLICIES = pytest.mark.parametrize("policy", ["probs", "position"])
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


class Layer(torch.nn.Module):
    """A router of uneven experts, its input, and what counts and boosts its tokens."""

    def __init__(self, policy="probs", dtype=torch.float32, tokens=TOKENS, calls=1, **flags):
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=1,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            moe_router_load_balancing_type="none",
            moe_expert_capacity_factor=1.0,
            moe_token_drop_policy=policy,
            params_dtype=dtype,
            **flags,
        )
        config.expert_model_parallel_size = RANKS  # checked against groups that a router does not need
        torch.manual_seed(1)
        self.router = TopKRouter(config, SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))
        self.router.set_layer_number(1)
        torch.nn.init.normal_(self.router.weight)
        if self.router.expert_bias is not None:
            self.router.expert_bias[1] = 0.5
        self.hidden = torch.randn(tokens, 1, 16).to(dtype).requires_grad_()
        self.counts = RouterCounts([self], [0], EXPERTS, False, torch.device("cpu"), calls=calls)

    def forward(self):
        """Probabilities, and which token goes to which expert."""
        return self.router(self.hidden)

    def boost(self, owed=OWED):
        self.counts.boost({0: owed} if any(owed) else {}, FRACTION)
        return self

    def taken(self):
        """Tokens of each expert, and those beyond its capacity, since the last call."""
        tally = {name: values.tolist() for name, values in self.counts.take().items()}
        return self.counts.by_layer(tally)[0][0], self.counts.beyond(tally).get(0)


CAPACITY = TOKENS * TOPK // EXPERTS


@POLICIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in bf16 many tokens are equally probable
def test_only_experts_owing_tokens_route_differently(policy, dtype):
    layer = Layer(policy, dtype)
    probabilities, routed = layer()
    more_probabilities, more = layer.boost()()
    others = [expert for expert, owed in enumerate(OWED) if not owed]
    assert torch.equal(probabilities[:, others], more_probabilities[:, others])
    assert torch.equal(routed[:, others], more[:, others])
    extra = more & ~routed
    assert not (routed & ~more).any() and extra.any()
    assert torch.equal(more_probabilities[routed], probabilities[routed])
    assert (more_probabilities[extra] > 0).all()


@POLICIES
def test_boost_takes_tokens_dropped_last(policy):
    layer = Layer(policy)
    _, routed = layer()
    _, more = layer.boost([9999] * EXPERTS)()
    layer.boost([0] * EXPERTS)
    layer.router.config.moe_expert_capacity_factor = None
    probabilities, wanted = layer()
    extra, left = more & ~routed, wanted & ~more
    both = [expert for expert in range(EXPERTS) if extra[:, expert].any() and left[:, expert].any()]
    assert both
    for expert in both:
        taken, dropped = extra[:, expert], left[:, expert]
        if policy == "probs":
            assert probabilities[taken, expert].min() >= probabilities[dropped, expert].max()
        else:
            assert taken.nonzero().max() < dropped.nonzero().min()


@POLICIES
def test_rank_never_processes_more_than_its_slots(policy):
    layer = Layer(policy).boost([9999] * EXPERTS)
    _, more = layer()
    tokens = more.sum(dim=0)
    assert (tokens > CAPACITY).any()
    assert (tokens.view(RANKS, -1).sum(dim=1) <= CAPACITY * EXPERTS // RANKS).all()
    assert (tokens <= CAPACITY * (1 + FRACTION)).all()


def test_calls_of_iteration_compensate_at_most_token_debt():
    """Even if each could make up all of it; a part that does not divide by the calls stays."""
    layer = Layer(calls=3).boost([8] * EXPERTS)
    for _ in range(3):
        layer()
    _, beyond = layer.taken()
    assert max(beyond) == 6
    layer.boost([2] * EXPERTS)()
    assert sum(layer.taken()[1]) == 0


def test_capacity_boost_is_rounded_down():
    layer = Layer(tokens=TOKENS - EXPERTS // TOPK)
    capacity = (TOKENS * TOPK - EXPERTS) // EXPERTS
    assert int(capacity * FRACTION) != capacity * FRACTION
    _, more = layer.boost([9999] * EXPERTS)()
    assert int(more.sum(dim=0).max()) == capacity + int(capacity * FRACTION)


numbers = st.lists(st.integers(0, 30), min_size=6, max_size=6)


@given(numbers, numbers, numbers, st.integers(0, 12), st.integers(0, 9), st.sampled_from([1, 2, 3]))
def test_unused_slots_go_to_experts_owing_most(processed, excess, owed, capacity, most, ranks):
    processed = [min(tokens, capacity) for tokens in processed]
    dropped = [tokens if within == capacity else 0 for tokens, within in zip(excess, processed, strict=True)]
    given_to = slots_beyond(*map(torch.tensor, (processed, dropped, owed)), capacity, most, ranks).tolist()
    size = 6 // ranks
    for rank in range(ranks):
        mine = slice(rank * size, (rank + 1) * size)
        asked = [min(*two, most) for two in zip(dropped[mine], owed[mine], strict=True)]
        unused = size * capacity - sum(processed[mine])
        assert sum(given_to[mine]) == min(unused, sum(asked))  # nothing is left unused that could be used
        assert all(0 <= got <= want for got, want in zip(given_to[mine], asked, strict=True))
        places = sorted(range(size), key=lambda one: -owed[mine][one])
        short = [given_to[mine][one] < asked[one] for one in places]
        assert short == sorted(short) or not any(given_to[mine][one] for one in places[short.index(True) + 1 :])


def test_extra_tokens_are_counted_once():
    layer = Layer()
    base = layer()[1].sum(dim=0)
    layer.taken()
    with torch.no_grad():  # as the first pass with activation recomputation
        first = layer.boost()()
    second = layer()
    assert all(map(torch.equal, first, second))
    more = second[1].sum(dim=0)
    tokens, beyond = layer.taken()
    assert tokens == more.tolist() and beyond == (more - base).tolist() and sum(beyond) > 0


def test_evaluation_ignores_boost():
    layer = Layer().eval()
    before = layer()
    assert all(map(torch.equal, before, layer.boost()()))


@pytest.mark.parametrize("flags", [{}, SIGMOID], ids=["softmax", "with expert bias"])
def test_ended_boost_has_no_later_effect(flags):
    boosted, plain = Layer(**flags), Layer(**flags)
    config = boosted.router.config
    boosted.boost()()
    assert plain()[1].sum() < boosted.boost()()[1].sum()
    boosted.boost([0] * EXPERTS)
    plain()
    assert boosted.router.config is config
    for layer in (boosted, plain):
        layer.hidden.grad = layer.router.weight.grad = None
        probabilities, layer.routed = layer()
        probabilities.square().sum().backward()
    assert torch.equal(boosted.routed, plain.routed)
    assert torch.equal(boosted.hidden.grad, plain.hidden.grad)
    assert torch.equal(boosted.router.weight.grad, plain.router.weight.grad)
    assert "tokens_beyond" in boosted.boost().counts.take() and "tokens_beyond" not in plain.counts.take()
    if flags:  # biases move by the tokens within capacity
        assert torch.equal(boosted.router.local_tokens_per_expert, plain.router.local_tokens_per_expert)
    boosted.counts.close()
    assert boosted.router.config is config and not boosted.router._forward_hooks


def test_sufficient_capacity_needs_no_boost():
    layer = Layer(tokens=4)
    before = layer()
    layer.boost()
    after = layer()
    assert all(map(torch.equal, before, after)) and not any(layer.taken()[1])


def tracker_of(layer, boost):
    """What keeps the ledger of that layer."""
    experts = [Operator(f"layers.0.expert.{expert}", "expert", 0, expert, 1) for expert in range(EXPERTS)]
    engine = SimpleNamespace(operators=experts, router_tally=lambda *_: layer.counts)
    recovery = SimpleNamespace(capacity_boost=boost)
    return TokenTracker(engine, 100, SimpleNamespace(requires=frozenset(), recovery=recovery))


def owing(owed, iterations):
    """The state of a ledger of experts that owe so many tokens."""
    debt = TokenDebt((tuple(owed),), ((0,) * EXPERTS,), iterations)
    return dataclasses.replace(TokenLedger.empty({0: EXPERTS}), debt=debt).state_dict()


def test_run_resumed_without_boost_drops_token_debt():
    layer = Layer()
    tracker = tracker_of(layer, None)
    tracker.continue_from(owing(OWED, 20))
    assert tracker.debt is None and "tokens_owed" not in tracker.gauges | tracker.contribution()


@pytest.mark.parametrize("everybody", [False, True])
def test_boost_ends_after_compensation_or_limit(everybody):
    layer, most = Layer(), 20
    _, routed = layer()
    dropping = (layer.boost([9] * EXPERTS)()[1] & ~routed).any(dim=0).tolist()
    owed = tuple(9 * (drops or everybody) for drops in dropping)  # others never have more tokens than capacity
    tracker = tracker_of(layer, CapacityBoost(FRACTION, most))
    tracker.continue_from(owing(owed, most))
    assert (layer()[1] & ~routed).any()
    layer.taken()
    made_up, iterations = [0] * EXPERTS, 0
    while tracker.debt.left and iterations <= most:
        more = layer()[1] & ~routed
        made_up = [sum(pair) for pair in zip(made_up, more.sum(dim=0).tolist(), strict=True)]
        tracker.on_totals({name: values.tolist() for name, values in tracker.contribution().items()})
        tracker.completed(skipped=False)
        iterations += 1
    assert tracker.debt.made_up == (tuple(made_up),)
    assert all((made >= lost) == (drops or not lost) for made, lost, drops in zip(made_up, owed, dropping, strict=True))
    assert iterations == most if everybody else 1 < iterations < most
    assert torch.equal(layer()[1], routed) and "tokens_owed" not in tracker.gauges
