"""The implementation of the optimizer, which snapshots record."""

from types import SimpleNamespace

import pytest

from megatron.pretraining.process import cpu

cpu.install()

from megatron.pretraining.checkpoint import contents  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from tests.configs import config_of  # noqa: E402

FLAGS = dict(
    num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=16, num_experts=4, micro_batch_size=1,
    train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100,
)  # fmt: skip


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
        contents.check_package(config_of(exact), Optimizer("torch"), saved, "there")
    contents.check_package(config_of(exact), Optimizer("transformer_engine"), saved, "there")
    contents.check_package(config_of(exact | dict(allow_nondeterministic=True)), Optimizer("torch"), saved, "there")
    contents.check_package(config_of(exact), Optimizer("torch"), {}, "there")
