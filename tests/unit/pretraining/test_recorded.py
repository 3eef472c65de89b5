"""What checkpoints record of the model, and what of it must be equal when a run resumes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
from megatron.pretraining.checkpoint import contents  # noqa: E402
from megatron.pretraining.config import MoeFlags, NetworkFlags, compose  # noqa: E402
from megatron.pretraining.config.flag import flags_of  # noqa: E402
from megatron.pretraining.config.tokenizer import TokenizerFlags  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

FLAGS = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100,
             num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, num_experts=4, moe_layer_freq=(0, 1),
             swiglu=True, add_bias_linear=False)  # fmt: skip
SHARED = dict(moe_shared_expert_intermediate_size=64)


def test_all_flags_of_the_model_are_recorded_as_json_has_them():
    model = contents.model(compose(FLAGS), 101)
    assert model == json.loads(json.dumps(model))
    assert model.keys() == {f.name for group in (NetworkFlags, MoeFlags) for f in flags_of(group)} | {"vocab_size"}
    assert (model["vocab_size"], model["moe_layer_freq"], model["kv_channels"]) == (101, [0, 1], 8)
    again = compose(FLAGS | {name: model[name] for name in model if name != "vocab_size" and model[name] is not None})
    assert contents.model(again, 101) == model


def test_the_tokenizer_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.model").touch()
    recorded = contents.tokenizer(TokenizerFlags(tokenizer_type="SentencePieceTokenizer", tokenizer_model="a.model"))
    assert recorded == {"type": "SentencePieceTokenizer", "model": str(tmp_path / "a.model"), "revision": None}
    nothing = contents.tokenizer(TokenizerFlags(tokenizer_type="NullTokenizer", vocab_size=9))
    assert nothing == {"type": "NullTokenizer", "model": None, "revision": None}


def test_a_flag_that_is_newer_than_the_checkpoint_had_its_default():
    config = compose(FLAGS | SHARED)
    newer = ("qk_layernorm_full_width", "moe_shared_expert_gate")
    old = {name: value for name, value in contents.shape(config).items() if name not in newer}
    contents.check_shape(config, old, "there")
    with pytest.raises(CheckpointError, match="--moe-shared-expert-gate is False there, True here"):
        contents.check_shape(compose(FLAGS | SHARED | dict(moe_shared_expert_gate=True)), old, "there")


def test_flags_that_may_change_between_runs_are_no_part_of_the_shape():
    config = compose(FLAGS)
    contents.check_shape(
        compose(FLAGS | dict(moe_aux_loss_coeff=0.5, rotary_base=500)), contents.shape(config), "there"
    )


class Optimizer:
    """An optimizer whose updates are made by the classes of some packages."""

    def __init__(self, *packages: str):
        adams = [type("Adam", (), {"__module__": f"{package}.optimizers"})() for package in packages]
        each = [SimpleNamespace(optimizer=adam, is_stub_optimizer=False) for adam in adams]
        self.core = SimpleNamespace(chained_optimizers=each)


def test_another_implementation_of_the_optimizer_is_warned_of():
    here, told = Optimizer("torch", "torch"), []
    for there in ("torch", None, "transformer_engine"):
        contents.warn_of_other_package(here, {"optimizer_package": there}, told.append)
    assert len(told) == 1 and "transformer_engine" in told[0] and "torch" in told[0]
    assert contents.package_of(Optimizer("torch", "apex").core) == "apex, torch"


def test_a_window_of_another_implementation_is_refused_where_recovery_is_exact():
    saved, exact = {"optimizer_package": "transformer_engine"}, FLAGS | dict(ckpt_policy="sparse", ckpt_dir="x")
    with pytest.raises(CheckpointError, match="--allow-nondeterministic"):
        contents.check_package(compose(exact), Optimizer("torch"), saved, "there")
    contents.check_package(compose(exact), Optimizer("transformer_engine"), saved, "there")
    contents.check_package(compose(exact | dict(allow_nondeterministic=True)), Optimizer("torch"), saved, "there")
    contents.check_package(compose(exact), Optimizer("torch"), {}, "there")
