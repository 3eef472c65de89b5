"""A ds_config becomes flags: its keys are honoured, or refused by name with a remedy; what is off never is."""

import json

import pytest

from megatron.pretraining.config import check_world, num_microbatches
from megatron.pretraining.config.deepspeed import WANTED
from megatron.pretraining.config.ds_config import _FIXED, _PAIRS, _REPLACED, _SUPPORTED, flags_of_section
from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.entry import exclusions
from tests.cases import each_row
from tests.unit.pretraining.flags import PP2, assert_refused, parse, refusal, without, write

TEMPLATE = {  # what Megatron-DeepSpeed's template for ZeRO-2 and experts says, filled in
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "fp16": dict(
        enabled=False, loss_scale=0, loss_scale_window=500, hysteresis=2, min_loss_scale=1, initial_scale_power=11
    ),
    "curriculum_learning": dict(
        enabled=False, curriculum_type="seqlen", min_difficulty=80, max_difficulty=64, schedule_type="fixed_linear",
        schedule_config=dict(total_curriculum_step=9, difficulty_step=8),
    ),
}  # fmt: skip
OFF = {  # what users leave in their files
    "scheduler": None,
    "tensorboard": {"enabled": False, "output_path": "x"},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "checkpoint": {},
    "amp": {"enabled": False},
    "some_key_of_tomorrow": {"enabled": False},
    "zero_optimization": {
        "overlap_comm": False, "offload_optimizer": {"device": "none", "pin_memory": True}, "offload_param": None,
        "contiguous_gradients": True, "reduce_scatter": True, "sub_group_size": 1e9, "zero_hpz_partition_size": 1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The package, as far as flags ask for it."""
    monkeypatch.setattr(exclusions, "deepspeed_version", lambda: "0.19.8")


@pytest.fixture
def given(tmp_path):
    """Writes a ds_config; the flags that read it."""

    def write_config(content: dict) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(content))
        return f"--deepspeed --deepspeed_config {path}"

    return write_config


def test_megatron_deepspeed_template_is_accepted(given):
    config = parse(given(TEMPLATE))
    assert config.zero.zero_stage == 2 and config.mixed_precision.bf16 and not config.mixed_precision.fp16
    assert config.training.global_batch_size == 32 and num_microbatches(config, 4) == 4
    assert config.arguments.log_interval == 10 and config.arguments.clip_grad == 1.0
    arguments = config.arguments
    assert (arguments.loss_scale, arguments.initial_loss_scale) == (None, 2**32)  # fp16 is off


def test_fp16_template_sets_loss_scaling(given):
    half = TEMPLATE | {"bf16": {"enabled": False}, "fp16": TEMPLATE["fp16"] | {"enabled": True}}
    precision = parse(given(half) + " --hysteresis 2").arguments
    assert precision.fp16 and precision.loss_scale is None and precision.initial_loss_scale == 2048
    assert precision.loss_scale_window == 500 and precision.min_loss_scale == 1


def test_disabled_sections_are_not_refused(given):
    assert parse(given(OFF)).zero.zero_stage == 1
    problems = Problems()
    assert not list(flags_of_section(dict(enumerate([None, False, 0, "none", {}, []])), "x", problems))
    assert not problems.found


def test_unknown_configuration_key_is_refused_by_name():
    keys = {key: True for key in _REPLACED} | {key: "other" for key in _FIXED} | {"tomorrow": 1, "bf16.new": 1}
    for key, value in keys.items():
        content = {}
        *outer, name = key.split(".")
        inner = content
        for section in outer:
            inner = inner.setdefault(section, {"enabled": True} if section in ("fp16", "bf16") else {})
        inner[name] = value
        problems = Problems()
        list(flags_of_section(content, "ds.json", problems))
        (problem,) = problems.found
        assert problem.code == "ds-config-key-unsupported"
        assert str(problem).startswith(f"{key} ") and "ds.json" in str(problem) and " Fix: " in str(problem)


def test_every_honoured_key_maps_to_flag():
    names = {one.flag for one in _SUPPORTED.values()} | {flag for pair in _PAIRS.values() for flag in pair}
    assert names <= set(all_flags()) | vars(parse().arguments).keys()


REFUSED = {  # ds_config: the code, and what the sentence names
    '{"zero_optimization": {"stage": 3}}': ("zero-stage-unsupported", "zero_optimization.stage"),
    '{"zero_optimization": {"overlap_comm": true}}': ("ds-config-key-unsupported", "overlap_comm true", "false"),
    '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}': (
        "ds-config-value-unsupported",
        "offload_optimizer.device",
        "--cpu-optimizer",
    ),
    '{"zero_optimization": {"reduce_bucket_size": "big"}}': ("value-unreadable", "--zero-reduce-bucket-size", "big"),
    '{"optimizer": {"type": "Lamb"}}': ("ds-config-value-unsupported", "optimizer.type", "Lamb", "AdamW"),
    '{"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}': (
        "ds-config-value-invalid",
        "optimizer.params.betas",
    ),
    '{"gradient_clipping": 0.5}': ("ds-config-contradicts-flag", "--clip-grad 2", "gradient_clipping", "0.5", "auto"),
    '{"bf16": {"enabled": true}, "bfloat16": {"enabled": false}}': (
        "ds-config-contradicts-itself",
        "bfloat16.enabled",
        "bf16.enabled",
    ),
    '{"communication_data_type": "int8"}': ("ds-config-value-unsupported", "communication_data_type", "int8"),
    '{"scheduler": {"type": "WarmupLR"}}': ("ds-config-key-unsupported", "scheduler", "--lr-decay-style"),
    '{"train_batch_size": 1, "train_batch_size": 2}': ("ds-config-contradicts-itself", "train_batch_size"),
    f'{{"optimizer": {{"params": {{"betas": [1{"0" * 400}, 0.9]}}}}}}': ("ds-config-value-invalid", "betas"),
    f'{{"tomorrow": {'{"a": ' * 600}1{"}" * 601}': ("ds-config-unreadable", "ds.json"),
    "{": ("ds-config-unreadable", "ds.json"),
    "[]": ("ds-config-unreadable", "ds.json"),
}


@each_row("content", REFUSED)
def test_invalid_ds_config_is_refused_by_code(content, tmp_path, capsys):
    (tmp_path / "ds.json").write_text(content)
    codes, sentence = refusal(f"--deepspeed --deepspeed_config {tmp_path}/ds.json --clip-grad 2")
    code, *named = REFUSED[content]
    assert codes == [code] and all(name in sentence for name in named), sentence


def test_long_keys_and_values_are_shortened(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps({"a" * 5000: "b" * 5000, "gradient_clipping": ["c" * 5000]}))
    codes, sentences = refusal(f"--deepspeed --deepspeed_config {tmp_path}/ds.json")
    assert sorted(codes) == ["ds-config-key-unsupported", "ds-config-value-invalid"] and len(sentences) < 2000


def test_all_refused_keys_are_reported_together(tmp_path, capsys):
    content = {"tomorrow": 1, "optimizer": {"type": "Lamb"}, "gradient_clipping": "much", "scheduler": {"a": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    codes, sentences = refusal(f"--deepspeed --deepspeed_config {tmp_path}/ds.json")
    unsupported = "ds-config-key-unsupported"
    expected = [unsupported, "ds-config-value-unsupported", "ds-config-value-invalid", unsupported]
    assert codes == expected, sentences


def test_flags_must_agree_and_auto_uses_flag_values(given):
    auto = dict.fromkeys(["train_batch_size", "gradient_clipping", "gradient_accumulation_steps"], "auto")
    auto |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}, "steps_per_print": 2000}
    config = parse(given(auto) + " --clip-grad 2 --log-interval 5 --zero-stage 2 --global-batch-size 8 --lr 0.001")
    assert config.arguments.clip_grad == 2 and config.training.global_batch_size == 8
    assert config.arguments.adam_beta2 == 0.95 and config.zero.zero_stage == 2
    assert config.arguments.log_interval == 5  # Megatron-DeepSpeed's scripts give both


def test_preset_yields_to_ds_config_but_yaml_file_conflicts(given, tmp_path, capsys):
    base = without("--micro-batch-size")
    flags = given({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 5e-4}}})
    assert parse(flags, without("--lr", base)).training.micro_batch_size == 4
    path = write(tmp_path, {"lr": 1e-3})
    codes, sentence = refusal(f"{flags} --config {path}", without("--lr", base))
    assert "ds-config-contradicts-flag" in codes and "optimizer.params.lr" in sentence


def test_batch_keys_set_batch_size(given):
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = parse(given(sizes), workers=4)
    assert num_microbatches(config, 4) == 3
    check_world(config, 4)
    codes, sentence = refusal(given(sizes | {"train_batch_size": 16}), workers=4)
    assert codes == ["batch-not-divisible"] and "--gradient-accumulation-steps 3" in sentence


@each_row("steps", ["three", [3], {"a": 3}, True, 2.5, 0, -1, float("inf")])
@each_row("stage", [0, 1])
def test_invalid_accumulation_steps_are_refused(steps, stage, given):
    flags = given({"gradient_accumulation_steps": steps, "zero_optimization": {"stage": stage}})
    codes, sentence = refusal(flags)
    assert codes in (["value-unreadable"], ["value-out-of-range"]), sentence
    assert "gradient" in sentence


def test_every_honoured_key_refuses_invalid_values(given):
    for key in (*_SUPPORTED, *_PAIRS):
        for value in ("much", ["much"], {"a": "much"}):
            content = value
            for part in reversed(key.split(".")):
                content = {part: content}
            codes, sentence = refusal(given(content))
            assert codes and "megatron-options-refused" not in codes, sentence


def test_stage_0_batch_size_follows_from_steps(given):
    flags = given({"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 0}})
    config = parse(flags, workers=4)
    assert not config.zero.deepspeed and config.training.global_batch_size == 24
    assert_refused(refusal(f"{flags} --global-batch-size 16", workers=4), "batch-not-divisible --gradient-accumulation")


@each_row("flag", ["--cpu-optimizer", "--zero-communication-dtype bf16", "--zero-grad-accum-dtype bf16"])
def test_stage_0_refuses_engine_only_flags(flag):
    expected = f"flag-has-no-effect {flag.split()[0]} --zero-stage"
    assert_refused(refusal(f"--deepspeed --zero-stage 0 {flag}"), expected)
    assert not parse("--deepspeed --zero-stage 0 --zero-reduce-bucket-size 5e8").zero.deepspeed


COMBINED = [  # flags, codes and what the sentences name
    (f"--zero-stage 2 {PP2}", "deepspeed-excludes-flag --zero-stage"),
    (
        f"{PP2} --untie-embeddings-and-output-weights --num-virtual-stages-per-pipeline-rank 2",
        "deepspeed-excludes-flag",
    ),
    ("--use-distributed-optimizer", "deepspeed-excludes-flag --use-distributed-optimizer"),
    ("--overlap-grad-reduce", "deepspeed-excludes-flag --overlap-grad-reduce"),
    ("--ddp-bucket-size 10", "deepspeed-excludes-flag --zero-reduce-bucket-size"),
    ("--optimizer sgd", "deepspeed-excludes-flag"),
    ("--exp-avg-dtype fp8", "deepspeed-excludes-flag --exp-avg-dtype"),
    ("--zero-stage 3", "zero-stage-unsupported"),
    ("--zero-stage 4", "zero-stage-unsupported"),
    ("--zero-allgather-bucket-size 3", "bucket-size-odd"),
    ("--use-pin-memory", "flag-needs-another --cpu-optimizer"),
]


@each_row(("flags", "expected"), COMBINED)
def test_invalid_combinations_are_refused(flags, expected, capsys):
    assert_refused(refusal(f"--deepspeed {flags} --transformer-impl local"), expected)


@each_row("flag", ["--zero-stage 2", "--deepspeed-config x.json", "--cpu-optimizer"])
def test_zero_flags_require_deepspeed_flag(flag, capsys):
    if "json" not in flag:
        assert_refused(refusal(flag), f"flag-needs-another {flag.split()[0]} --deepspeed")


def test_launch_script_flags_are_accepted():
    taken = "--local_rank 0 --zero-reduce-scatter --zero-contigious-gradients --create-moe-param-group "
    taken += "--no-pipeline-parallel --remote-device none --mlp-type standard --zero-reduce-bucket-size 5e8"
    assert parse(f"--deepspeed {taken}").zero.zero_reduce_bucket_size == 500_000_000


def test_missing_or_unsupported_package_is_named(monkeypatch, capsys):
    monkeypatch.setenv("MOC_UNCHECKED_VERSIONS", "0")
    monkeypatch.setattr(exclusions, "deepspeed_version", lambda: None)
    codes, sentence = refusal("--deepspeed")
    assert codes == ["package-missing"] and "pip install 'deepspeed>=0.19,<0.20'" in sentence
    monkeypatch.setattr(exclusions, "deepspeed_version", lambda: "0.20.1")
    codes, sentence = refusal("--deepspeed")
    assert codes == ["deepspeed-version-unsupported"] and "0.20.1" in sentence and WANTED in sentence
