"""A trained model goes to transformers, computes the same there, and comes back to be trained on."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megatron.pretraining.convert import program
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.hugging_face.family import FULL_WIDTH
from tests.integration.entry_jobs import BASE, EP2, OWN_PROGRAM, run

GROUPS = "--num-layers 4 --group-query-attention --num-query-groups 2 --train-iters 2"
MODELS = {
    "mixtral": GROUPS,
    "qwen": f"""{GROUPS} --moe-shared-expert-intermediate-size 40 --add-qkv-bias --moe-layer-freq [0,1,1,1]
        --moe-router-pre-softmax --bf16""",
    "olmoe": f"{GROUPS} --qk-layernorm --spec {' '.join(FULL_WIDTH)}",
}
# transformers is imported by a process of its own
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def convert(*argv):
    assert program.main([str(word) for word in argv]) == 0


def train(directory, flags, size=2, base=BASE):
    ended = run(directory, OWN_PROGRAM, size, f"{flags}", base=base)
    assert ended.code == 0, ended.output[-4000:]
    return ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with checkpoints and snapshots of two iterations of each model."""
    root = tmp_path_factory.mktemp("trained")
    for name, flags in MODELS.items():
        train(root / name, f"{EP2} {flags} --save saved --ckpt-policy full --snapshot-interval 2 --ckpt-dir snapshots")
    return root


def values(path):
    contents = DenseContents(path).weights(None)
    return {entry.name: contents.read(entry.name, "param", entry.region) for entry in contents.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_both_formats_convert_to_identical_directory(name, trained, tmp_path, capsys):
    convert(trained / name / "saved", tmp_path / "hf", "--to", "hf", "--verify")
    convert(trained / name / "snapshots", tmp_path / "other", "--to", "hf", "--verify")
    assert "not verified" not in capsys.readouterr().err
    files = [path.name for path in (tmp_path / "hf").iterdir() if path.name != "conversion.json"]
    assert sorted(files) == ["config.json", "model.safetensors"]
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_converted_model_is_converted_back_and_trained(name, trained, tmp_path):
    convert(trained / name / "saved", tmp_path / "hf", "--to", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "--verify")
    before, after = values(trained / name / "saved/iter_0000002"), values(tmp_path / "back/iter_0000000")
    assert before.keys() == after.keys()
    for weight, there in after.items():
        assert torch.equal(there, before[weight][: len(there)]), weight
    training = """--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-3 --mock-data --num-workers 0
        --log-interval 1 --eval-iters 0 --finetune --seq-length 32"""
    again = train(tmp_path, f"--config back/model.yaml --load back {training}", base="")
    flags = f"{EP2} {MODELS[name]} --load {trained / name / 'saved'} --finetune --lr-decay-iters 2 --lr-warmup-iters 0"
    wanted = train(tmp_path / "wanted", f"{flags} --lr-decay-style linear --min-lr 0")
    assert again.losses[1][0] == pytest.approx(wanted.losses[1][0], abs=1e-5)


@needs_transformers
@pytest.mark.parametrize("name", ["qwen", "olmoe"])
def test_transformers_computes_same_logits(name, trained, tmp_path, capsys):
    convert(trained / name / "saved", tmp_path / "hf", "--to", "hf", "--check-logits")
    assert "logits" in capsys.readouterr().out
    settings = json.loads((tmp_path / "hf/config.json").read_text())
    kind = {"qwen": ("qwen2_moe", "bfloat16"), "olmoe": ("olmoe", "float32")}[name]
    assert (settings["model_type"], settings["dtype"]) == kind


def transformers_program(command, directory):
    """Runs the program that makes a model, or generates with it; returns what it prints."""
    words = [sys.executable, "tests/integration/generation_of_transformers.py", command, str(directory)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_transformers
def test_converted_model_generates_as_its_source(tmp_path, capsys):
    transformers_program("make", tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "back", "--to", "hf", "--verify")
    assert "dense/iter_0000000 is not verified: it has no digests" in capsys.readouterr().err
    wanted = json.loads(transformers_program("generate", tmp_path / "source"))
    assert 0 < len(wanted["new"]) <= 10 and wanted["new"][-1] in wanted["ends"]
    assert json.loads(transformers_program("generate", tmp_path / "back")) == wanted
    training = "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --num-workers 0"
    flags = f"{training} --eval-iters 0 --finetune --seq-length 32 --save {tmp_path / 'saved'}"
    train(tmp_path, f"--config dense/model.yaml --load dense {flags}", size=1, base="")
    convert(tmp_path / "saved", tmp_path / "trained", "--to", "hf")
    there = json.loads(transformers_program("generate", tmp_path / "trained"))
    assert {**there, "new": wanted["new"]} == wanted
