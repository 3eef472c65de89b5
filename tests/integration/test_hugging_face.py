"""A trained model goes to transformers, computes the same there, and comes back to be trained on."""

import json

import pytest
import torch

from megatron.pretraining.config.derive import installed
from megatron.pretraining.convert import program
from megatron.pretraining.convert.dense import DenseContents
from tests.integration.test_precision import BF16
from tests.integration.tiny import FLAGS, train

RMS = dict(normalization="RMSNorm", group_query_attention=True, num_query_groups=2, max_position_embeddings=32)
QWEN = RMS | dict(moe_shared_expert_intermediate_size=40, add_qkv_bias=True, moe_layer_freq=[0, 1],
                  moe_router_pre_softmax=True)  # fmt: skip
# transformers is imported by a process of its own
needs_transformers = pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")


def convert(*argv):
    assert program.main([str(word) for word in argv]) == 0


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A directory with checkpoints of two iterations of each model."""
    root = tmp_path_factory.mktemp("trained")
    for name, flags in (("mixtral", RMS), ("qwen", QWEN | BF16)):
        train("EP2", data | flags | dict(save=str(root / name), train_iters=2))
    return root


def values(path):
    contents = DenseContents(path).weights(None)
    return {entry.name: contents.read(entry.name, "param", entry.region) for entry in contents.tensors}


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_either_format_becomes_the_same_directory(name, trained, tmp_path):
    convert(trained / name, tmp_path / "hf", "--to", "hf", "--verify")
    convert(trained / name, tmp_path / "snapshots")
    convert(tmp_path / "snapshots", tmp_path / "other", "--to", "hf", "--verify")
    files = [path.name for path in (tmp_path / "hf").iterdir() if path.name != "conversion.json"]
    assert sorted(files) == ["config.json", "model.safetensors"]
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_it_comes_back_and_is_trained_on(trained, data, tmp_path):
    convert(trained / "mixtral", tmp_path / "hf", "--to", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "--verify")
    before, after = values(trained / "mixtral/iter_0000002"), values(tmp_path / "back/iter_0000000")
    assert before.keys() == after.keys()
    for weight, there in after.items():
        assert torch.equal(there, before[weight][: len(there)]), weight
    whole = FLAGS | data | RMS | dict(make_vocab_size_divisible_by=1, finetune=True, train_iters=2)
    one, other = (train("1", whole | dict(load=str(root))) for root in (trained / "mixtral", tmp_path / "back"))
    assert one.start == other.start == 0 and one.records and one.losses == other.losses
    assert one.weights == other.weights


@needs_transformers
def test_transformers_computes_the_same(trained, tmp_path, capsys):
    convert(trained / "qwen", tmp_path / "hf", "--to", "hf", "--check-logits")
    assert "logits" in capsys.readouterr().out
    settings = json.loads((tmp_path / "hf/config.json").read_text())
    assert settings["model_type"] == "qwen2_moe" and settings["dtype"] == "bfloat16"
