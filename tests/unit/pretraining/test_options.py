"""The kept options of Megatron-LM's parser: they read and refuse the same words as the parser."""

import argparse
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moc.megatron  # noqa: F401  # adapts megatron-core before others import it
from megatron.pretraining import reference
from megatron.pretraining.entry import command_line, options
from megatron.pretraining.entry.options import RELEASED, Option, ParserOptions, parser_of
from megatron.pretraining.entry.own_flags import add_own_flags
from moc.errors import codes_in
from moc.files import decode
from moc.store.dense_files import TRACKER_FILE
from tests.unit.pretraining.flags import BASE
from tests.worlds import REPOSITORY

ELASTIC = "--elastic --elastic-slots 8 --calculate-per-token-loss --global-batch-size 12"

ARGUMENTS = Path(import_module("megatron.training.arguments").__file__ or "")
CORE = ARGUMENTS.parents[2]


def stock_parser() -> argparse.ArgumentParser:
    module = import_module("megatron.training.arguments")
    return module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture(scope="module")
def stock() -> argparse.ArgumentParser:
    return stock_parser()


@pytest.fixture(scope="module")
def kept(stock) -> tuple[Option, ...]:
    """The options after a file."""
    return decode.decode(ParserOptions.of(ARGUMENTS, stock).to_json(), ParserOptions).options


def test_kept_options_equal_installed_release(stock):
    assert reference.released_options() == RELEASED.read_text(), f"run {reference.COMMAND} and commit the file"
    options.remember(ARGUMENTS, stock)
    assert options.remembered([CORE]) == ParserOptions.of(ARGUMENTS, stock).options


def test_options_of_other_megatron_are_cached_per_user(stock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "other" / ARGUMENTS.relative_to(CORE)
    source.parent.mkdir(parents=True)
    source.write_bytes(ARGUMENTS.read_bytes() + b"\n")
    assert options.remembered([tmp_path / "other"]) == ()
    options.remember(source, stock)
    assert options.remembered([tmp_path / "other"]) == ParserOptions.of(ARGUMENTS, stock).options
    (kept,) = tmp_path.glob("moc/*")
    kept.write_text("[")  # damaged
    assert options.remembered([tmp_path / "other"]) == ()


def read(parser, words):
    """Values and sentences of problems."""
    values = command_line.prepared(parser, ()).parse_args(words)
    return vars(values), [str(problem) for problem in command_line.read().problems]


def words_of(action):
    """Words with a value that an option accepts, and with one that it may refuse."""
    count = action.nargs if isinstance(action.nargs, int) else 1
    choices = [getattr(one, "name", str(one)) for one in action.choices or ("3", "0.5", "word")]
    for spelling in action.option_strings:
        yield [spelling, *choices[:1] * count]
        yield [spelling, *["?"] * count]
        yield [f"{spelling}=1.5"]
    yield [action.option_strings[0]]


def test_cached_options_agree_with_parser(stock, kept):
    ours, theirs = add_own_flags(parser_of(kept, ())), add_own_flags(stock_parser())
    plain = {option.name for option in kept if option.kind or option.choices or option.nargs == 0}
    for action in stock._actions:
        for words in words_of(action) if action.dest != "help" else ():
            (values, problems), (known, expected) = read(ours, words), read(theirs, words)
            if action.dest in plain and not action.const:
                assert problems == expected, words
            assert problems == expected or not problems, words  # others are left to Megatron-LM
            if action.dest in plain and not expected:
                assert str(values[action.dest]) == str(known[action.dest]), words


def test_option_named_by_script_accepts_any_value(kept):
    parser = add_own_flags(parser_of(kept, {"--lr", "--of-script"}))
    assert read(parser, ["--lr", "word", "--of-script", "1", "2"])[1] == []
    assert read(parser, ["--min-lr", "word"])[1]


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        ("", []),
        ("--hidden-size ten --optimizer lamb", ["value-unreadable", "value-not-a-choice"]),
        (
            "--num-layers 0 --ckpt-policy foo --pec-k-persist 0",
            ["value-out-of-range", "value-not-a-choice", "value-out-of-range"],
        ),
        (
            "--step-batch-size-schedule bad --ckpt-policy foo --ckpt-dir d --persist-interval 4 --seed 2 "
            "--deterministic-mode --allow-nondeterministic",
            ["value-not-a-choice", "tier-lacks-flag", "value-unreadable", "flags-exclude-each-other"],
        ),
        ("--ckpt-keep 0 --log-straggler", ["value-out-of-range", "loop-argument-unsupported"]),
        ("--vocab-file /no/such --save /proc/no", ["input-missing", "output-not-writable"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/such", ["input-missing"]),
        ("--ckpt-polcy full --sparse-windw 4 --hidden-size ten", ["value-unreadable", "flag-unknown", "flag-unknown"]),
        ("--ckpt-policy full", ["snapshot-directory-missing"]),
        ("--ckpt-policy full --save x --ckpt-tier peers --replicas 2", ["too-many-replicas"]),
        (
            "--ckpt-policy pec --save x --pec-k 9 --bf16 --fp16",
            ["flags-exclude-each-other", "experts-per-snapshot-invalid"],
        ),
        (
            "--num-attention-heads 3 --tensor-model-parallel-size 2",
            ["flag-not-a-multiple"] * 2 + ["workers-not-divisible"],
        ),
        (
            "--tokenizer-type SentencePieceTokenizer --max-position-embeddings 32 --log-dir x "
            "--inject 'kill rank=1 iteration=2'",
            ["flag-exceeds-another", "flag-needs-another", "fault-without-target"],
        ),
        ("--tensor-model-parallel-size 0 --ckpt-policy foo", ["value-out-of-range", "value-not-a-choice"]),
        (
            "--num-layers-per-virtual-pipeline-stage 0 --step-batch-size-schedule bad --moe-router-topk 9",
            ["value-out-of-range", "value-out-of-range", "value-unreadable"],
        ),
        (f"{ELASTIC} --elastic-min-replicas 1", []),
        (f"{ELASTIC} --bf16 --fp16", ["flags-exclude-each-other", "nodes-too-few"]),
        (
            f"{ELASTIC} --moe-grouped-gemm --use-mup --eval-micro-batch-size 4 --grad-norm stock",
            ["elastic-excludes-flag"] * 2 + ["grad-norm-unsupported", "elastic-excludes-flag"],
        ),
        (
            "--deepspeed --zero-stage 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--use-mup --optimizer-cpu-offload",
            ["deepspeed-excludes-flag"] * 4 + ["workers-not-divisible"],
        ),
        ("--deepspeed --gradient-accumulation-steps 3 --global-batch-size 4", ["batch-not-divisible"]),
        (  # values that are not known do not hide others, and count as given
            f"{ELASTIC} --moe-grouped-gemm --hidden-size ten --ckpt-polcy full",
            ["value-unreadable", "flag-unknown", "elastic-excludes-flag"],
        ),
    ],
)
def test_first_start_refuses_values_and_paths_without_torch(flags, codes, tmp_path):
    assert_refused_without_torch(f"{BASE} {flags}", codes, tmp_path)


def assert_refused_without_torch(flags, codes, tmp_path):
    program = f"""if True:
        import sys
        sys.modules["torch"] = sys.modules["megatron.core"] = None
        sys.argv = ["pretrain_gpt_moe.py"]
        from megatron.pretraining.pretrain_gpt_moe import check_arguments
        check_arguments({shlex.split(flags)!r}, 1, 1, 1)
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert codes_in(ended.stderr) == codes, ended.stderr
    assert ended.returncode == (2 if codes else 0) and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        ("--load {}/invalid", ["tracker-invalid"]),
        ("--load {}/absent", ["checkpoint-missing"]),
        ("--load {0}/absent --save {0}/absent", ["checkpoint-missing"]),
        ("--load {}/absent --ckpt-step 6", ["checkpoint-missing"]),
        ("--load {}/absent --ckpt-policy full --ckpt-dir {}/snapshots", []),  # a snapshot may replace it
        ("--load {0}/interrupted --save {0}/interrupted", []),  # a worker restores it
        ("--load {}/new", []),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model {}/damaged", ["tokenizer-unusable"]),
        ("--tokenizer-type TikTokenizer --tokenizer-model {}/damaged", ["tokenizer-unusable"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model no/such", ["tokenizer-not-cached"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/damaged", ["tokenizer-unusable"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/snapshots", ["tokenizer-unusable"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/cut", ["tokenizer-unusable"]),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/valid", []),
        ("--load {0}/invalid --tokenizer-type TikTokenizer --tokenizer-model {0}/damaged",
         ["tokenizer-unusable", "tracker-invalid"]),
    ],
)  # fmt: skip
def test_first_start_refuses_damaged_files_without_torch(flags, codes, tmp_path):
    for name, iteration in {"invalid": "latest", "absent": "7", "interrupted": "7"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / TRACKER_FILE).write_text(iteration)
    (tmp_path / "interrupted/.iter_0000007.replaced").mkdir()
    for name, text in {"snapshots/other": "", "cut/tokenizer.json": '{"model":', "valid/tokenizer.json": "{}"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "damaged").write_bytes(b"\xff" * 64)
    assert_refused_without_torch(f"{BASE} {flags.format(tmp_path, tmp_path)}", codes, tmp_path)
