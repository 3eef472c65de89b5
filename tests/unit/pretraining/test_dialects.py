"""Command lines of older releases and of copies of Megatron-LM, in the options of this one."""

import argparse

import pytest

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator  # noqa: E402

from megatron.pretraining.entry.dialects import DIALECTS, OLDER, translated  # noqa: E402
from megatron.pretraining.entry.dialects.rules import Line  # noqa: E402
from megatron.pretraining.entry.own_flags import add_own_flags  # noqa: E402
from tests.cases import each_row  # noqa: E402

MDS = "--deepspeed --no-pipeline-parallel --num-layers 4 --seq-length 8 --micro-batch-size 4 --global-batch-size 8"
MOE = f"{MDS} --num-experts 4 --moe-min-capacity 4"


@pytest.fixture(scope="module")
def known():
    """The option strings of Megatron-LM and of this project."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_own_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    return frozenset(parser._option_string_actions)


def values(words):
    """The values of options by name, and None for switches."""
    found = {}
    for word in words:
        if word.startswith("--"):
            found[word] = None
            last = word
        else:
            found[last] = word if found[last] is None else f"{found[last]} {word}"
    return found


@each_row("words", ["", "--num-layers 4 --lr 1e-3", "--swiglu --min-lr -1e-3 --bf16", "word --x=3 -h"])
def test_current_command_line_is_unchanged(words, known):
    found = translated(words.split(), known)
    assert " ".join(found.words) == words and not found.notices and not found.problems


TRANSLATED = {
    "--checkpoint-activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--DDP-impl local --log-batch-size-to-tensorboard --no-query-key-layer-scaling": "",
    "--override-lr-scheduler --layernorm-epsilon 1e-6": "--override-opt-param-scheduler --norm-epsilon 1e-6",
    "--global-batch-size 8 --seq-length 2 --rampup-batch-size 4 2 10": "--seq-length 2 --step-batch-size-schedule "
    "0:4,10:6,20:8",
    "--wandb-exp-name --wandb-save-dir --save a/b/": "--wandb-exp-name b --save a/b/",
    "--patch-tokenizer-type Qwen2Tokenizer --load d --dataset MMAP --train-mode pretrain": "--tokenizer-type "
    "HuggingFaceTokenizer --tokenizer-model d --load d",
    "--tokenizer-type QwenTokenizerFS --tokenizer-path d": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model d",
    "--use-fused-swiglu --first-k-dense-replace 1 --num-layers 3 --n-shared-experts 2 --moe-intermediate-size 8": ""
    "--moe-layer-freq [0,1,1] --num-layers 3 --moe-shared-expert-intermediate-size 16 --moe-ffn-hidden-size 8",
    "--no-pipeline-parallel --train-tokens 800 --seq-length 8 --train-samples 200 --lr-decay-tokens 1600": ""
    "--train-samples 100 --seq-length 8 --lr-decay-samples 200 --max-position-embeddings 8",
    "--no-pipeline-parallel --train-tokens 800 --seq-length 8 --train-iters 9 --global-batch-size 10 "
    "--lr-warmup-tokens 160": "--train-iters 9 --seq-length 8 --global-batch-size 10 --lr-warmup-iters 2 "
    "--max-position-embeddings 8",
    "--no-pipeline-parallel --loss-scale 0 --num-experts 1 --topk 1 --max-position-embeddings 4": ""
    "--max-position-embeddings 4",
    "--dialect megatron-lm --split '99,1,0'": "--split 99,1,0",
    "--log-dir l --expert-interval 2 --num-layers 4 --topk 1 --layernorm-epsilon 1e-6 --no-bf16 --eval-interval 5": ""
    "--log-dir l --moe-layer-freq [0,1,0,1] --num-layers 4 --moe-router-topk 1 --norm-epsilon 1e-6 --eval-interval 5 "
    "--correct none --transformer-impl local",
    "--swiglu --no-swiglu --num-experts none --no-bias-gelu-fusion --bias-gelu-fusion --save s": "--save s "
    "--eval-interval 1000000000 --correct none --transformer-impl local",
    "--tokenizer-model a/b --tokenizer-revision c0 --trust --eval-interval 5 --transformer-impl local": ""
    "--tokenizer-model /hub/models--a--b/snapshots/c0 --eval-interval 5 --transformer-impl local --correct none",
}


@each_row("words", TRANSLATED)
def test_options_are_translated_and_each_change_is_printed(words, known, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "/hub")
    found = translated(words.split(), known)
    expected = TRANSLATED[words].replace("--train-samples 200 ", "")
    assert " ".join(dict.fromkeys(found.words)) == " ".join(dict.fromkeys(expected.split())) and not found.problems
    lost = [word for word in words.split() if word.startswith("--") and word not in found.words]
    assert not [word for word in lost if word != "--dialect" and not any(word in line for line in found.notices)]


def test_megatron_deepspeed_experts_get_its_defaults(known):
    found = values(translated(MOE.split(), known).words)
    assert found["--moe-layer-freq"] == "[0,1,0,1]" and found["--moe-router-topk"] == "1"
    assert "--moe-router-pre-softmax" in found and found["--moe-aux-loss-coeff"] == "0.1"
    assert found["--moe-expert-capacity-factor"] == "1.0" and found["--moe-token-dispatcher-type"] == "alltoall"
    assert found["--num-experts"] == "4" and "--moe-min-capacity" not in found
    notices = translated(MOE.split(), known).notices
    for name in ("--moe-layer-freq", "--moe-router-topk", "--moe-aux-loss-coeff", "--moe-expert-capacity-factor"):
        assert any(name in line for line in notices)


def test_expert_options_override_defaults(known):
    more = (
        "--topk 2 --expert-interval 1 --moe-loss-coeff 0.01 --disable-moe-token-dropping --moe-expert-parallel-size 2"
    )
    found = values(translated([*MOE.split(), *more.split()], known).words)
    assert found["--moe-layer-freq"] == "[1,1,1,1]" and found["--moe-router-topk"] == "2"
    assert "--moe-router-pre-softmax" not in found and found["--moe-aux-loss-coeff"] == "0.01"
    assert "--moe-expert-capacity-factor" not in found and found["--expert-model-parallel-size"] == "2"


@each_row(
    ("words", "named"),
    [
        (f"{MDS} --num-experts 4 8", "--num-experts"),
        (f"{MOE} --mlp-type residual", "--mlp-type"),
        (f"{MDS} --num-experts 64 --moe-min-capacity 4 --moe-train-capacity-factor 1", "--moe-min-capacity"),
        ("--data-impl lazy", "--data-impl"),
        ("--enable-hf2mg-convert", "--enable-hf2mg-convert"),
        ("--rampup-batch-size 3 2 10 --global-batch-size 8 --seq-length 2", "--rampup-batch-size"),
        ("--dialect moc --main-params-dtype bf16", "--main-params-dtype"),
        ("--model tiny --no-untie-embeddings-and-output-weights", "--model tiny"),
        ("--model tiny --num-experts none --no-bf16", "--num-experts"),
    ],
)
def test_unsupported_dialect_option_is_refused_by_name(words, named, known):
    problems = translated(words.split(), known).problems
    assert [one.code for one in problems] == ["dialect-option-unsupported"] and named in str(problems[0])


def test_dialect_is_named_or_detected(known):
    assert [one.code for one in translated(["--dialect", "x"], known).problems] == ["value-not-a-choice"]
    both = ["--tokenizer-name-or-path", "d"]
    assert [one.code for one in translated(both, known).problems] == ["dialect-ambiguous"]
    assert translated([*both, "--dialect", "mindspeed"], known).words == ("--tokenizer-model", "d")
    assert translated([*both, "--deepspeed"], known).words[:2] == ("--tokenizer-model", "d")


@each_row(
    ("words", "named"),
    [
        ("--topk 2", "megatron-deepspeed"),
        ("--topk 2 --ckpt-policy full", "moc"),
        ("--topk 2 --moe-min-capacity 4 --ckpt-policy full", "megatron-deepspeed"),
        ("--topk 2 --deepspeed --ckpt-policy full", "megatron-deepspeed"),
        ("--no-bf16", "moc"),
        ("--layernorm-epsilon 1e-6 --ckpt-policy full", "megatron-lm"),
    ],
)
def test_shared_options_select_dialect_by_other_options(words, named, known):
    notice = next(iter(translated(f"--num-experts 4 {words}".split(), known).notices))
    assert f"(--dialect {named})" in notice


def test_script_option_keeps_its_meaning(known):
    words = ["--data-impl", "lazy", "--dialect", "x", "--rank", "3"]
    of_script = {"--data-impl", "--dialect", "--rank"}
    found = translated(words, known | of_script, of_script)
    assert list(found.words) == words and not found.problems and not found.notices


SAMPLE = """
    --num-layers 4 --seq-length 8 --micro-batch-size 8 --global-batch-size 8 --num-experts 4 --tokenizer-model d
    --train-samples 8 --num-attention-heads 4 --num-key-value-heads 2 --pp-partition-method uniform --ffn-hidden-size 8
    --pad-vocab-size-to 8 --first-k-dense-replace 1 --n-shared-experts 1 --train-tokens 64 --lr-decay-tokens 64
    --lr-warmup-tokens 64 --moe-min-capacity 4
"""


@each_row("name", DIALECTS)
def test_translations_are_options_of_this_release(name, known):
    words = iter(SAMPLE.split())
    line = Line([(option, [next(words)]) for option in words])
    for option, rule in (OLDER.rules | DIALECTS[name].rules).items():
        for value in (["1"], ["8"], ["2", "2", "8"], []):
            outcome = rule(line, value)
            new = {word for word in outcome.words if word.startswith("--")}
            assert new <= known, (option, outcome)
            assert bool(outcome.words or outcome.why or outcome.problem), option
    for outcome in DIALECTS[name].defaults(line):
        assert {word for word in outcome.words if word.startswith("--")} <= known


@each_row(("start", "step", "samples", "last"), [(4, 2, 10, 8), (2, 3, 100, 11), (8, 8, 33, 64), (2, 1, 2, 12)])
def test_batch_ramp_up_is_preserved(start, step, samples, last, known):
    words = f"--rampup-batch-size {start} {step} {samples} --global-batch-size {last} --seq-length 16".split()
    schedule = values(translated(words, known).words)["--step-batch-size-schedule"]
    new = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, 16)
    each = samples / ((last - start) // step)  # as in Megatron-LM until 0.18
    for consumed in range(2 * samples):
        new.update(consumed, False)
        size = last if consumed > samples else start + int(consumed / each) * step
        assert new.current_global_batch_size == size, consumed


UNREADABLE = ("inf", "-inf", "nan", "1e400", "1e300", "1e12", "0", "-1", "1.5", "²", "x" * 50, "", "none")


@each_row("value", UNREADABLE)
@each_row("name", DIALECTS)
def test_no_number_value_breaks_translation(name, value, known):
    words = SAMPLE.split()
    for place in range(1, len(words), 2):
        changed = [*words[:place], value, *words[place + 1 :]]
        assert translated(["--dialect", name, *changed], known).words
    for option in OLDER.rules | DIALECTS[name].rules:
        assert translated(["--dialect", name, *words, option, value], known).words
        assert translated(["--dialect", name, *words, option, value, value, value], known).words


@each_row("option", ["--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens"])
@each_row("value", ["many", "inf", ""])
def test_non_numeric_token_counts_are_refused(option, value, known):
    (problem,) = translated([*MDS.split(), "--train-iters", "3", option, value], known).problems
    assert problem.code == "dialect-option-unsupported" and option in str(problem)


@each_row(
    ("name", "option"),
    [
        ("megatron-deepspeed", "--expert-interval"),
        ("megatron-deepspeed", "--pad-vocab-size-to"),
        ("mindspeed", "--first-k-dense-replace"),
        ("mindspeed", "--n-shared-experts"),
        ("moc", "--expert-interval"),
    ],
)
@each_row("value", ["many", "inf", "1e1", "1.5", ""])
def test_translated_value_must_be_integer(name, option, value, known):
    (problem,) = translated([*MOE.split(), "--dialect", name, option, value], known).problems
    assert problem.code == "dialect-option-unsupported" and option in str(problem)


@each_row("option", ["--train-iters", "--train-samples"])
def test_parser_readable_length_is_unchanged(option, known):
    words = translated([*MDS.split(), option, "1e4"], known).words
    assert words[words.index(option) + 1] == "1e4"
