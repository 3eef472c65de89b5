"""Presets, files, the command line: which of them wins, and that what is printed is read again."""

import json
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pretraining.arguments import build_parser, read_config_file
from megatron.pretraining.config import (
    ConfigError,
    compose,
)
from megatron.pretraining.config.composed import all_flags
from tests.unit.pretraining.flags import BASE, assert_refused, parse, refusal, without, write

RUN = "--micro-batch-size 1 --train-iters 5 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"


def test_preset_then_file_then_command_line(tmp_path):
    path = write(tmp_path, {"network": {"num_layers": 8, "hidden_size": 256}, "seed": 7})
    config = parse(f"--model tiny --config {path} --hidden-size 64", RUN)
    assert config.model == "tiny"
    assert config.network.hidden_size == 64  # command line
    assert (config.network.num_layers, config.rng.seed) == (8, 7)  # file
    assert config.moe.num_experts == 8  # preset
    assert config.network.ffn_hidden_size == 256  # follows from what is in force


def test_presets_are_overridden_flag_by_flag():
    assert parse("--model gpt-125m-8e --moe-layer-freq 3", RUN).moe.expert_layers(12) == (1, 0, 0) * 4
    assert not parse("--model qwen-moe-14b --no-swiglu", RUN).network.swiglu
    dense = parse("--model tiny --num-experts none", RUN)
    assert dense.moe.num_experts is None and dense.network.num_layers == 4


@pytest.mark.parametrize(
    "content",
    [
        {"num_layers": 6},
        {"num-layers": 6},
        {"network": {"num-layers": 6}},
        {"--num-layers": "6"},
        {"num_layers": 6.0},
    ],
)
def test_keys_are_spelled_as_one_likes(tmp_path, content):
    assert read_config_file(write(tmp_path, content)).keys() == {"num_layers"}
    path = write(tmp_path, content)
    assert parse(f"--config {path}", without("--num-layers")).network.num_layers == 6


def test_aliases_and_negations_are_keys_too(tmp_path):
    path = write(tmp_path, {"topk": 3, "no-load-optim": True, "disable_bias_linear": False, "moe": {"topk": 3}})
    with pytest.raises(ConfigError, match="gives moe_router_topk twice"):
        read_config_file(path)
    path = write(tmp_path, {"topk": 3, "no-load-optim": True, "disable_bias_linear": False})
    values = {"moe_router_topk": 3, "load_optim": False, "add_bias_linear": True}
    assert read_config_file(path) == values


@pytest.mark.parametrize(
    "content, code, named",
    [
        ({"hiden_size": 1}, "flag-unknown", "hidden_size"),
        ({"network": {"seed": 1}}, "config-key-misplaced", "seed"),
        ({"qwertyuiop": 1}, "flag-unknown", "qwertyuiop"),
        ({"swiglu": "yes"}, "value-unreadable", "--swiglu 'yes'"),
        ({"hidden_size": True}, "value-unreadable", "--hidden-size True"),
        ({"hidden_size": 1.5}, "value-unreadable", "--hidden-size 1.5"),
        ({"hidden_size": float("inf")}, "value-unreadable", "--hidden-size inf"),
        ({"num_layers": 1 << 31}, "value-out-of-range", "--num-layers"),
        ({"seed": 10**400}, "value-out-of-range", "--seed"),
        ({"no_swiglu": 1}, "value-unreadable", "no_swiglu"),
        ({"rotary_base": None}, "value-missing", "--rotary-base"),
        ({"save": ["a"]}, "value-unreadable", "--save"),
        ({"model": "huge"}, "preset-unknown", "huge"),
        ({"model": ["tiny"]}, "preset-unknown", "tiny"),
    ],
)
def test_files_that_are_refused(capsys, tmp_path, content, code, named):
    codes, sentences = refusal(f"--config {write(tmp_path, content)}", "")
    assert code in codes and named in sentences
    assert "--hidden-size is missing" not in sentences or "hid" not in str(content)  # does not follow from the mistake


@pytest.mark.parametrize("content", [[1], "a: [", "[" * 20_000])
def test_of_a_file_that_cannot_be_read_nothing_else_is_reported(capsys, tmp_path, content):
    path = write(tmp_path, content)
    codes, sentence = refusal(f"--config {path}", "")
    assert codes == ["config-file-unreadable"] and str(path) in sentence


def test_the_stronger_of_two_ways_to_say_a_thing_wins(tmp_path, dataset):
    base = without("--train-iters", without("--mock-data"))
    path = write(tmp_path, {"train_iters": 5, "mock_data": True, "bf16": True})
    config = parse(f"--config {path} --train-samples 40 --data-path {dataset} --fp16", base)
    assert (config.training.train_iters, config.training.train_samples) == (None, 40)
    assert not config.data.mock_data and not config.mixed_precision.bf16 and config.mixed_precision.fp16


def test_a_later_file_overrides_an_earlier_one(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("{model: tiny, seed: 7, train_iters: 5}")
    second.write_text("{model: micro, train_samples: 40}")
    config = parse(f"--config {first} --config {second}", without("--train-iters"))
    assert (config.model, config.rng.seed) == ("micro", 7)
    assert (config.training.train_iters, config.training.train_samples) == (None, 40)


def test_two_models_contradict(capsys, tmp_path):
    path = write(tmp_path, {"model": "tiny"})
    assert_refused(refusal(f"--model micro --config {path}"), "flags-exclude-each-other --model")
    assert parse(f"--config {path}").model == "tiny"


def printed(capsys, flags, base=BASE):
    with pytest.raises(SystemExit) as exit:
        parse(f"{flags} --print-config", base)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_print_config_is_read_again(capsys, tmp_path, dataset):
    flags = f"--model gpt-125m-8e --data-path 0.5 {dataset} 0.5 {dataset} --bf16 --lr-warmup-fraction 0.01"
    base = without("--mock-data")
    text = printed(capsys, flags, base)
    assert parse(f"--config {write(tmp_path, text)}", "") == parse(flags, base)
    assert yaml.safe_load(text)["moe"]["moe_layer_freq"] == [0, 1, 0, 1]
    json.dumps(yaml.safe_load(text))


SIMPLE = {
    name: flag
    for name, flag in all_flags().items()
    if not flag.required and flag.parse is None and flag.kind is not tuple and not name.startswith("tokenizer")
}


def values_of(flag):
    if flag.choices:
        return st.sampled_from(flag.choices)
    limits = {sign: number for sign, number, _ in flag.limits}
    if flag.kind is bool:
        return st.booleans()
    if flag.kind is int:
        return st.integers(int(limits.get(">=", 0)), 64)
    if flag.kind is float:
        low = limits.get(">=", limits.get(">", 0))
        high = limits.get("<=", limits.get("<", 10))
        return st.floats(low, high, exclude_min=">" in limits, exclude_max="<" in limits)
    return st.text("abc/", min_size=1, max_size=5)


@st.composite
def random_flags(draw):
    names = draw(st.lists(st.sampled_from(sorted(SIMPLE)), max_size=6, unique=True))
    return {name: draw(values_of(SIMPLE[name])) for name in names}


@settings(deadline=None, max_examples=60)
@given(random_flags())
def test_any_config_that_works_survives_yaml(tmp_path_factory, values):
    base = vars(build_parser().parse_args(shlex.split(BASE)))
    try:
        config = compose({**base, **values})
    except ConfigError:
        return
    path = write(tmp_path_factory.mktemp("yaml"), config.to_yaml())
    again = read_config_file(path)
    assert again.pop("model") is None
    assert compose(again) == config


def test_replace_derives_anew():
    config = parse()
    smaller = config.replace("network", hidden_size=64)
    assert (smaller.network.ffn_hidden_size, smaller.moe.moe_ffn_hidden_size) == (256, 256)
    assert config.replace("training", train_iters=3).training.train_iters == 3
    assert config.network.hidden_size == 128
    with pytest.raises(AttributeError):
        config.replace("training", hidden_size=1)
    with pytest.raises(ConfigError):
        config.replace("training", micro_batch_size=0)


def test_config_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        parse().network.hidden_size = 3
    assert hash(parse().moe) == hash(parse().moe)
