"""Tokens that two runs send elsewhere: where they part, and whether rounding could have decided it."""

import json
import math

import pytest
import torch

from benchmarks.faults.ties import Choice, Routed, decided, parting, read
from benchmarks.live.routing import CLOSE, described


def routes(experts=("3", "5"), close=None, iterations=(1, 2, 3)):
    """Two micro batches through two layers, alike."""
    routed = Routed(tuple(experts), close or {})
    return {(i, micro_batch, layer): routed for i in iterations for micro_batch in (0, 1) for layer in (1, 2)}


def test_runs_diverge_at_first_routing_difference():
    one, other = routes(close={1: 3e-8}), routes(close={1: 5e-8})
    assert parting(one, other, 3) == ()
    for key in ((2, 1, 1), (2, 1, 2), (3, 0, 1)):
        other[key] = Routed(("3", "6"), {1: 2e-8})
    (choice,) = parting(one, other, 3)
    assert choice == Choice(2, 1, 1, 1, (3e-8, 2e-8))
    assert parting(one, other, 1) == ()
    assert decided([choice], 1e-7) == [] and decided([choice], 2.5e-8) == [choice]


def test_each_micro_batch_needs_its_own_reason():
    one, other = routes(), routes()
    other[2, 0, 2] = Routed(("3", "6"), {1: 1e-8})
    other[2, 1, 1] = Routed(("6", "5"), {0: 1e-8})
    choices = parting(one | {(2, 0, 2): Routed(("3", "5"), {1: 1e-8})}, other, 3)
    assert [(choice.micro_batch, choice.layer, choice.token) for choice in choices] == [(0, 2, 1), (1, 1, 0)]
    assert decided(choices, 1e-7) == [choices[1]]  # in the first run, it was not close
    assert choices[1].margins == (math.inf, 1e-8)


def test_incomplete_run_is_not_compared():
    with pytest.raises(KeyError, match=r"\(2, 1, 2\)"):
        parting(routes(), {key: one for key, one in routes().items() if key != (2, 1, 2)}, 3)


def test_worker_reports_and_replayed_iterations_count(tmp_path):
    logits = torch.tensor([[0.5, 0.1, 0.5 - CLOSE / 4, 0.2], [0.1, 0.9, 0.2, 0.8]])
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(1).indices, True)
    told = dict(iteration=4, micro_batch=2, layer=1, time=9.0) | described(logits, chosen, 1)
    before = told | dict(time=8.0, experts=["4", "2"])
    (tmp_path / "7.jsonl").write_text(json.dumps(told) + '\n{"iteration": 5, "mic')  # and was killed
    (tmp_path / "8.jsonl").write_text(json.dumps(before) + "\n")
    ((key, routed),) = read(tmp_path).items()
    assert key == (4, 2, 1) and routed.experts == ("1", "2")
    assert routed.close == {0: pytest.approx(CLOSE / 4, rel=1e-3)}


def test_choosing_all_experts_has_no_close_decisions():
    logits = torch.tensor([[0.5, 0.1]])
    told = described(logits, torch.ones(1, 2, dtype=torch.bool), 2)
    assert told == {"experts": ["3"], "close": {}}
