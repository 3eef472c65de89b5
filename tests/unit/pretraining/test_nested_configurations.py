"""Configurations of NeMo and of Megatron-Bridge are refused with the options that mean the same."""

import shlex

import yaml

from megatron.pretraining.entry.dialects.nested import content_of, refusal
from tests.cases import each_row

NEMO = """
trainer: {devices: 8, precision: bf16, max_steps: 1000, val_check_interval: 100, gradient_clip_val: 1.0}
exp_manager: {explicit_log_dir: "${training.run}"}
model:
  global_batch_size: 256
  sequence_parallel: true
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  bias: false
  activation: fast-swiglu
  normalization: rmsnorm
  data: {data_prefix: [1.0, "a b"], splits_string: "900,50,50"}
  optim: {name: distributed_fused_adam, betas: [0.9, 0.95], sched: {name: CosineAnnealing, warmup_steps: 500}}
"""
BRIDGE = """
model: {_target_: megatron.bridge.models.GPTModelProvider, num_layers: 2, num_moe_experts: 8, qk_layernorm: true}
train: {train_iters: 100, micro_batch_size: 1}
scheduler: {lr_decay_style: cosine}
checkpoint: {save: /ckpt, load: null}
"""
OPTIONS = {
    NEMO: "--bf16 --train-iters 1000 --eval-interval 100 --clip-grad 1.0 --global-batch-size 256 --sequence-parallel "
    "--seq-length 2048 --disable-bias-linear --swiglu --normalization RMSNorm --data-path 1.0 'a b' --split 900,50,50 "
    "--use-distributed-optimizer --adam-beta1 0.9 --adam-beta2 0.95 --lr-decay-style cosine --lr-warmup-iters 500",
    BRIDGE: "--num-layers 2 --num-experts 8 --qk-layernorm --train-iters 100 --micro-batch-size 1 --lr-decay-style "
    "cosine --save /ckpt",
}
KNOWN = {word: True for options in OPTIONS.values() for word in options.split() if word.startswith("--")} | {
    switch: False for switch in ("--sequence-parallel", "--qk-layernorm", "--swiglu", "--bf16", "--load")
}


@each_row("text", OPTIONS, ids=["NeMo", "Megatron-Bridge"])
def test_equivalent_options_are_named(text):
    found = refusal(yaml.safe_load(text), KNOWN, "--config x.yaml")
    assert found is not None and found.code == "config-of-another-program"
    assert shlex.split(str(found).partition("mean the same: ")[2]) == shlex.split(OPTIONS[text])


@each_row("text", ["{}", "num_layers: 3", "model: tiny\ntrain_iters: 3", "model: {}"])
def test_option_files_are_not_refused_as_nested(text):
    assert refusal(yaml.safe_load(text), KNOWN, "") is None


def test_dotted_words_become_nested_keys():
    words = ["--lr", "1", "model.optim.lr=1e-3", "+trainer.max_steps=7", "trainer.x=[", "trainer.x.y=1", "a=b"]
    assert content_of(words[:5]) == {"model": {"optim": {"lr": "1e-3"}}, "trainer": {"max_steps": 7, "x": "["}}
    assert content_of(words) == {}
    for text in ("2001-13-45", "[" * 3000):  # no date, and nested too deeply
        assert content_of([f"model.x={text}"]) == {"model": {"x": text}}
