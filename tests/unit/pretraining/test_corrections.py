"""Corrections of megatron-core, and the load of experts, on stand-ins of a model's parts."""

from types import SimpleNamespace

import pytest

from megatron.pretraining.config.groups import CORRECTIONS, corrections_named
from megatron.pretraining.process import cpu
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import parse

cpu.install()

import torch  # noqa: E402

from megatron.pretraining.engine.routing import ExpertLoad  # noqa: E402
from megatron.pretraining.entry.model import more_padding, with_rows  # noqa: E402
from megatron.pretraining.model import corrections  # noqa: E402
from megatron.pretraining.model.corrections import PaddedVocabulary, mask_padding, scale_global_loss  # noqa: E402


@each_row(
    ("text", "named"),
    [
        ("all", {*CORRECTIONS}),
        ("none", set()),
        ("global-aux-loss,expert-counters", {"global-aux-loss", "expert-counters"}),
    ],
)
def test_flag_selects_corrections(text, named):
    assert corrections_named(text) == named
    assert parse(f"--correct {text}").training.corrections == named


def test_unknown_correction_is_refused():
    with raises("value-unreadable", "--correct", "'magic'"):
        parse("--correct magic")


@each_row(
    ("kinds", "coefficients", "scaled"),
    [
        ("global_aux_loss", 0.5, 2.0),
        ("aux_loss", 0.5, 0.5),
        (["aux_loss", "global_aux_loss"], [0.5, 0.25], [0.5, 1.0]),
    ],
)
def test_only_global_loss_coefficient_is_scaled_once(kinds, coefficients, scaled):
    config = SimpleNamespace(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coefficients)
    scale_global_loss([SimpleNamespace(config=config), SimpleNamespace(config=config)], 4)
    assert config.moe_aux_loss_coeff == scaled


class Output(torch.nn.Module):
    def forward(self, logits):
        return logits, None


def masked(monkeypatch, logits, rank, vocabulary):
    monkeypatch.setattr(corrections.parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
    model: torch.nn.Module = torch.nn.Module()
    model.post_process, model.output_layer = True, Output()
    mask_padding([model], vocabulary)
    return model.output_layer(logits)[0]


@each_row(
    ("rank", "width", "kept"),
    [(0, 4, 4), (1, 4, 2), (2, 4, 0), (2, 12, 6)],  # the last has the logits of all workers
)
def test_padding_logits_are_smallest_number(rank, width, kept, monkeypatch):
    logits = torch.zeros(2, 3, width, dtype=torch.bfloat16)
    found = masked(monkeypatch, logits, rank, PaddedVocabulary(6, 12))
    assert (found[..., :kept] == 0).all() and (found[..., kept:] == torch.finfo(torch.bfloat16).min).all()


def test_padding_has_no_gradient(monkeypatch):
    hidden = torch.randn(2, 1, 6, requires_grad=True)
    logits = masked(monkeypatch, hidden * 1.0, 0, PaddedVocabulary(4, 6))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor([1, 3])).backward()
    assert hidden.grad is not None and (hidden.grad[..., 4:] == 0).all() and hidden.grad[..., :4].abs().sum() > 0


def test_model_without_output_layer_is_refused():
    model: torch.nn.Module = torch.nn.Module()
    model.post_process = True
    with raises("correction-unsupported", "vocabulary-padding"):
        mask_padding([model], PaddedVocabulary(6, 12))


def test_shape_is_adjusted_to_padding_rows():
    assert with_rows({"embedding": 80, "output": 84, "router": 3}, {"embedding": 8, "output": 8}, -2) == {
        "embedding": 64, "output": 68, "router": 3
    }  # fmt: skip


SAVED = {"tokenizer_type": "NullTokenizer", "vocab_size": 6, "padded_vocab_size": 12}


@each_row(
    ("here", "more"),
    [
        ({}, 0),
        ({"padded_vocab_size": 8}, 4),
        ({"padded_vocab_size": 8, "vocab_size": 7}, 0),
        ({"padded_vocab_size": None}, 0),
    ],
)
def test_only_padding_of_same_vocabulary_may_differ(here, more):
    assert more_padding(SAVED | here, SAVED) == more
    assert more_padding(SAVED | here, {}) == 0


def test_expert_load_gives_violations_and_dropped_share():
    load = ExpertLoad({0: [6, 2, 0, 0], 3: [0, 0, 0, 0]}, {0: 10, 3: 0})
    assert load.violations == {0: 2.0, 3: 0.0}
    assert load.dropped == {0: pytest.approx(0.2), 3: 0.0}
