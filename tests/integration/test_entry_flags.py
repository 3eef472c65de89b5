"""The command line of Megatron-LM's scripts under mocrun: problems before workers start, files of options, help."""

from __future__ import annotations

import pytest
import yaml

from moc.errors import codes_in
from tests.integration.entry_jobs import BASE, MOE, OWN_PROGRAM, USER_SCRIPT, run

OWN_FORWARD = """
from options_of_a_user import add_options
from megatron.training.arguments import parse_and_validate_args
if __name__ == "__main__":
    arguments = parse_and_validate_args(extra_args_provider=add_options)
    print("parsed", arguments.of_a_user, arguments.of_a_computed_name, arguments.data_impl)
"""
OPTIONS = """
def add_options(parser):
    parser.add_argument("--of-a-user", type=int)
    parser.add_argument("--data-impl")  # also an option of older releases of Megatron-LM
    for name in ("of-a-computed-name",):
        parser.add_argument(f"--{name}", type=int)
    return parser
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The directory in which launchers keep the option strings of Megatron-LM."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/moc"


def test_all_flag_problems_are_reported_before_workers_start(tmp_path):
    wrong = "--hidden-size ten --attention-backend foo --bf16=1 --no-such-option --log-straggler --log-energy --pec-k 0"
    ended = run(tmp_path, USER_SCRIPT, 2, wrong, launcher=f"--log-dir {tmp_path / 'workers'}")
    assert ended.code == 2
    assert sorted(codes_in(ended.output)) == sorted(
        "value-unreadable value-unreadable value-not-a-choice value-not-taken flag-unknown loop-argument-unsupported "
        "loop-argument-unsupported".split()
    )
    for word in (
        "--hidden-size",
        "ten",
        "--attention-backend",
        "--bf16",
        "--no-such-option",
        "--log-straggler",
        "--log-energy",
        "--pec-k",
    ):
        assert word in ended.output
    assert "Traceback" not in ended.output and not [*(tmp_path / "workers").rglob("*/stderr*")]


@pytest.mark.parametrize(
    ("flags", "codes", "named"),
    [
        ("--tensor-model-parallel-size 3", ["flag-not-a-multiple", "workers-not-divisible"], ""),
        ("--ckpt-policy full", ["snapshot-directory-missing"], "--ckpt-dir"),
        ("--yaml-cfg some.yaml --num-layer 3", ["flag-unknown", "loop-argument-unsupported"], "--config"),
        ("--use-checkpoint-args", ["flag-needs-another"], "--load"),
        ("--deepspeed --gradient-accumulation-steps 3", ["batch-not-divisible"], "--global-batch-size 8"),
        ("--deepspeed --decoupled-lr 1e-3 --grad-norm stock", ["grad-norm-unsupported", "deepspeed-excludes-flag"], ""),
        (
            f"{MOE} --elastic --elastic-slots 1 --optimizer lion --calculate-per-token-loss --moe-permute-fusion",
            ["elastic-excludes-flag", "elastic-excludes-flag"],
            "lion",
        ),
        (f"{MOE} --elastic --elastic-slots 1 --calculate-per-token-loss", ["slots-too-few"], "--elastic-slots"),
        (
            "--ckpt-policy pec --ckpt-dir x --sparse-window 2 --log-straggler",
            ["policy-lacks-flag", "loop-argument-unsupported"],
            "",
        ),
    ],
)
def test_flag_combinations_are_checked_before_workers_start(flags, codes, named, tmp_path):
    ended = run(tmp_path, USER_SCRIPT, 2, flags)
    assert ended.code == 2 and codes_in(ended.output) == codes and named in ended.output
    assert "(worker" not in ended.output and "Traceback" not in ended.output


@pytest.mark.parametrize("skips", ["", "--skip-train"])
def test_run_without_data_and_length_is_refused_early(skips, tmp_path):
    base = BASE.replace("--train-iters 8", "").replace("--mock-data", "")
    ended = run(tmp_path, OWN_PROGRAM, 2, skips, base=base)
    assert ended.code == 2 and codes_in(ended.output) == ["flag-missing"] * 2
    assert "--mock-data" in ended.output and "--train-iters" in ended.output
    assert "(worker" not in ended.output and "Traceback" not in ended.output
    assert run(tmp_path, OWN_PROGRAM, 2, "--print-config", base=base).code == 0


def test_script_without_length_is_refused(tmp_path):
    ended = run(tmp_path, USER_SCRIPT, 1, "", base=BASE.replace("--train-iters 8", ""))
    assert ended.code == 2 and codes_in(ended.output) == ["flag-missing"] and "Traceback" not in ended.output


def test_launcher_refuses_unknown_options_without_torch(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    ended = run(tmp_path, USER_SCRIPT, 1, "--num-layer 3 --user-gate", cold=True)
    assert ended.code == 2 and codes_in(ended.output) == ["flag-unknown"] and "--num-layers" in ended.output
    assert "| torch\n" not in ended.output and "moc.errors" in ended.output
    assert not cache.exists()  # the package has the options


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        (f"{MOE} --exp-avg-sq-dtype fp8 --profile", ["optimizer-excludes-flag", "device-unsupported"]),
        (f"{MOE} --moe-grouped-gemm --transformer-impl transformer_engine", ["cuda-needed"] * 2),
        ("--num-layers 4 --num-layers-per-virtual-pipeline-stage 3", ["flag-not-a-multiple", "flag-needs-another"]),
        ("--num-layers 4 --num-virtual-stages-per-pipeline-rank 4", ["flag-needs-another"]),
        (f"{MOE} --moe-single-grouped-weight --moe-single-grouped-bias", ["flag-needs-another"] * 2),
    ],
)
def test_device_format_and_stage_checks_need_no_torch(flags, codes, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = run(tmp_path, USER_SCRIPT, 1, flags, cold=True)
    assert ended.code == 2 and codes_in(ended.output) == codes, ended.output
    assert "| torch\n" not in ended.output


def test_megatron_error_in_script_is_reported_without_traceback(tmp_path):
    flags = f"{MOE} --recompute-granularity selective --recompute-modules moe_act"
    ended = run(tmp_path, USER_SCRIPT, 1, flags)
    assert ended.code == 2 and codes_in(ended.output) == ["megatron-options-refused"]
    assert "Traceback" not in ended.output


def test_script_options_are_neither_refused_nor_translated(tmp_path):
    (tmp_path / "options_of_a_user.py").write_text(OPTIONS)
    (tmp_path / "script.py").write_text(OWN_FORWARD)
    for _ in range(2):  # without and with a list of Megatron-LM's options
        ended = run(tmp_path, tmp_path / "script.py", 1, "--of-a-user 3 --of-a-computed-name 4 --data-impl lazy")
        assert ended.code == 0 and "parsed 3 4 lazy" in ended.output, ended.output[-2000:]


def test_script_may_ignore_unknown_options(tmp_path):
    (tmp_path / "options_of_a_user.py").write_text(OPTIONS)
    ignoring = OWN_FORWARD.replace("=add_options)", "=add_options, ignore_unknown_args=True)")
    (tmp_path / "script.py").write_text(ignoring)
    for _ in range(2):  # without and with a list of Megatron-LM's options
        ended = run(tmp_path, tmp_path / "script.py", 1, "--of-a-user 3 --of-another 4 --num-layer 5 stray")
        assert ended.code == 0 and "parsed 3 None None" in ended.output, ended.output[-2000:]


def test_printed_configuration_reproduces_itself(tmp_path):
    flags = "--ckpt-policy full --ckpt-dir here --no-ckpt-blocking --bf16 --user-gate --seed 77"
    printed = run(tmp_path, USER_SCRIPT, 2, f"{flags} --print-config")
    assert printed.code == 0
    values = yaml.safe_load(printed.output)
    assert values["ckpt_policy"] == "full" and values["bf16"] is True and values["seed"] == 77
    assert values["user_gate"] is True and values["add_bias_linear"] is False
    (tmp_path / "all.yaml").write_text(printed.output)
    again = run(tmp_path, USER_SCRIPT, 2, "--config all.yaml --print-config", base="")
    assert yaml.safe_load(again.output) == values
    other = run(tmp_path, USER_SCRIPT, 2, "--config all.yaml --seed 78 --print-config", base="")
    assert yaml.safe_load(other.output) == values | {"seed": 78}


def test_precedence_of_preset_file_and_command_line(tmp_path):
    (tmp_path / "some.yaml").write_text("model: gpt-125m-8e\nnum_layers: 6\nhidden_size: 96\n")
    words = "--config some.yaml --hidden-size 48 --num-attention-heads 6 --print-config"
    needed = BASE.partition("--micro-batch-size")[2].replace("--swiglu", "").replace("--normalization RMSNorm", "")
    printed = run(tmp_path, USER_SCRIPT, 1, words, base=f"--micro-batch-size {needed}")
    assert printed.code == 0, printed.output[-2000:]
    values = yaml.safe_load(printed.output)
    assert [values[name] for name in ("num_layers", "hidden_size", "num_attention_heads")] == [6, 48, 6]
    assert values["num_experts"] == 8 and values["moe_layer_freq"] == [0, 1] * 3
    assert values["max_position_embeddings"] == values["seq_length"] == 2048
    unreadable = run(tmp_path, USER_SCRIPT, 1, f"{words} --num-layers ten", base=f"--micro-batch-size {needed}")
    assert unreadable.code == 2 and codes_in(unreadable.output) == ["value-unreadable"]
    unknown = run(tmp_path, USER_SCRIPT, 1, "--model gpt-126m --print-config")
    assert unknown.code == 2 and codes_in(unknown.output) == ["value-not-a-choice"] and "gpt-125m-8e" in unknown.output


def test_script_option_replaces_option_of_same_name(tmp_path):
    options = OPTIONS.replace('parser.add_argument("--of-a-user", type=int)', 'parser.add_argument("--model")')
    (tmp_path / "options_of_a_user.py").write_text(options)
    (tmp_path / "script.py").write_text(OWN_FORWARD.replace("of_a_user,", "model,"))
    ended = run(tmp_path, tmp_path / "script.py", 1, "--model own --of-a-computed-name 4")
    assert ended.code == 0 and "parsed own 4" in ended.output, ended.output[-2000:]


def test_config_file_problems_are_reported(tmp_path):
    (tmp_path / "wrong.yaml").write_text("num_layer: 3\nbf16: 7\ntrain_samples: many\ninject: []\n")
    ended = run(tmp_path, USER_SCRIPT, 1, "--config wrong.yaml --config /no/such.yaml --lr fast --print-config")
    assert ended.code == 2
    assert sorted(codes_in(ended.output)) == ["config-file-unreadable", "flag-unknown", *["value-unreadable"] * 3]
    assert "--train-samples" in ended.output and ended.output.count("--lr ") == 1


def test_dialect_options_in_config_file_are_translated(tmp_path):
    (tmp_path / "older.yaml").write_text("checkpoint_activations: true\nDDP_impl: local\nlog_interval: 3\n")
    ended = run(tmp_path, USER_SCRIPT, 1, "--config older.yaml --print-config")
    assert ended.code == 0, ended.output[-2000:]
    assert "# --DDP-impl local: ignored" in ended.output and "recompute_method: uniform" in ended.output


def test_help_lists_own_options_and_help_all_lists_all(tmp_path):
    ours, both = (run(tmp_path, USER_SCRIPT, 1, flag) for flag in ("--help", "--help-all"))
    assert ours.code == both.code == 0
    assert "--ckpt-policy" in ours.output and "--num-layers" not in ours.output
    for flag in ("--ckpt-policy", "--num-layers", "--user-gate"):
        assert flag in both.output


def test_unusable_tokenizer_is_reported_without_traceback(tmp_path):
    for name in ("vocabulary", "merges"):
        (tmp_path / name).write_text("{")
    words = "--tokenizer-type GPT2BPETokenizer --vocab-file vocabulary --merge-file merges"
    ended = run(tmp_path, USER_SCRIPT, 1, words)
    assert ended.code == 2 and codes_in(ended.output) == ["tokenizer-unusable"] and "Traceback" not in ended.output
    for named in ("GPT2BPETokenizer", "--vocab-file vocabulary", "--merge-file merges"):
        assert named in ended.output


def test_run_prints_effective_options_once(tmp_path):
    ended = run(tmp_path, USER_SCRIPT, 2, "--train-iters 1 --lr-warmup-iters 0")
    assert ended.code == 0, ended.output[-3000:]
    assert ended.output.count("  hidden_size: 64\n") == 1
    assert ended.output.count("\n") < 200  # and not all of Megatron-LM's arguments
