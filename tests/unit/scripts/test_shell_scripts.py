"""The launch scripts: their style, their --help, and that the trainer understands the flags they pass."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each_row

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(p for p in (ROOT / "scripts").glob("*.sh") if p.name != "common.sh")
BATCH_SCRIPTS = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
TRAIN = ROOT / "scripts" / "train.sh"
RECIPES = sorted(path.stem for path in (ROOT / "scripts" / "recipes").iterdir())
MODEL = ("num_layers", "hidden_size", "num_experts", "moe_router_topk", "world_size", "pipeline_model_parallel_size")
MODEL += ("expert_model_parallel_size",)


def run(*command, cwd=None, **environment):
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def flags_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The launcher's options and the trainer's flags in a printed command."""
    words = shlex.split(command)
    program = words.index(str(ROOT / "pretrain_gpt_moe.py"))
    launcher = words[2:program]
    options = {a: b for a, b in zip(launcher, launcher[1:], strict=False) if a.startswith("--")}
    return options, words[program + 1 :]


def configured(*commands: tuple[dict[str, str], list[str]]) -> list[dict]:
    """What the trainer makes of its flags, with as many workers as the launcher starts."""
    asked = [(int(own["--nproc-per-node"]) * int(own.get("--nnodes", 1)), flags) for own, flags in commands]
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.scripts.configured"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["error"] for one in found if "error" in one] == []
    return found


@pytest.fixture
def data(tmp_path):
    """Files with the names of a dataset and a tokenizer: flags are only checked for their presence."""
    for name in ("data.bin", "data.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    return [tmp_path / "data", tmp_path / "tokenizer.model", tmp_path / "checkpoints"]


def test_shellcheck_reports_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; it comes with the extra [dev]")
    files = [ROOT / ".ci" / "run", ROOT / ".ci" / "install", *(ROOT / "scripts").rglob("*.sh"), *BATCH_SCRIPTS]
    result = run("shellcheck", "--external-sources", *files, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@each_row("script", [*SCRIPTS, *BATCH_SCRIPTS], ids=lambda p: p.name)
def test_help_is_text_without_side_effects(script, tmp_path):
    result = run("bash", script, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert script.name.split(".")[0] in result.stdout
    assert "#" not in result.stdout and "set -euo" not in result.stdout
    assert not list(tmp_path.iterdir())


@each_row("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_executable(script):
    assert os.access(script, os.X_OK)


@pytest.mark.slow
def test_trainer_accepts_flags_of_all_recipes(data):
    """With the options of the recipe's model, its precision and its layout, on GPUs."""
    runs = [run(TRAIN, recipe, "--dry-run", *data) for recipe in RECIPES]
    found = dict(zip(RECIPES, configured(*(flags_of(one.stdout) for one in runs)), strict=True))
    assert all(one["bf16"] for one in found.values())
    shapes = {name: [one[key] for key in MODEL] for name, one in found.items()}
    assert shapes == {
        "deepseek_moe_16b": [28, 2048, 64, 8, 112, 14, 8],
        "gpt_125m_8e": [12, 768, 8, 1, 8, 1, 8],
        "gpt_350m_16e": [24, 1024, 16, 1, 8, 1, 8],
        "gpt_moe_7b": [12, 1536, 32, 6, 96, 3, 8],
        "moc_system": [24, 1024, 16, 1, 8, 1, 8],
        "moetion": [48, 1600, 64, 1, 64, 8, 4],
        "qwen_moe_14b": [24, 2048, 64, 8, 96, 6, 8],
    }


def test_list_names_and_describes_recipes():
    lines = run(TRAIN, "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == RECIPES
    assert all(len(line.split()) > 3 for line in lines)


def test_recipe_may_be_user_file(data, tmp_path):
    (tmp_path / "own.yaml").write_text("# Nodes: 2\nmodel: tiny\n")
    options, flags = flags_of(run(TRAIN, tmp_path / "own.yaml", "--dry-run", *data).stdout)
    assert flags[:2] == ["--config", str(tmp_path / "own.yaml")] and options["--nnodes"] == "2"


def test_launcher_is_selectable_and_gets_flags(data):
    said = run(TRAIN, RECIPES[0].replace("_", "-"), "--launcher", "mocrun", "--nproc-per-node=2", "--dry-run", *data)
    assert said.stdout.startswith("python -m moc.launch ")
    assert said.stdout.index("--nproc-per-node=2") > said.stdout.index("--nproc-per-node 8")


@pytest.mark.parametrize(
    "nodes, token, launcher", [("1", "", "moc.launch"), ("2", "t", "moc.launch"), ("2", "", "torchrun")]
)
def test_mocrun_is_default_where_it_can_start(data, nodes, token, launcher):
    said = run(TRAIN, RECIPES[0], "--dry-run", *data, NNODES=nodes, MOC_TOKEN_FILE=token, MOC_TOKEN="")
    assert launcher in shlex.split(said.stdout)[2 if token or nodes == "1" else 1]
    assert ("whoever reaches" in said.stderr) == (launcher == "torchrun")


@each_row("name", ["NNODES", "GPUS_PER_NODE", "NODE_RANK", "SPARES", "MASTER_PORT"])
@each_row("value", ["a[$(touch ran)]", "-1", "1 2", "0x1", "9999999"])
def test_non_numeric_variable_is_refused_and_not_executed(data, tmp_path, name, value):
    said = run(TRAIN, RECIPES[0], "--dry-run", *data, cwd=tmp_path, **{name: value})
    assert said.returncode == 1 and f"{name} is a number" in said.stderr
    assert not (tmp_path / "ran").exists()


def test_user_flags_come_last(data):
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", *data, "--train-iters", "7").stdout)
    assert flags[-2:] == ["--train-iters", "7"]


def test_blend_in_one_argument_is_split(data):
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", "0.7 /a 0.3 /b", *data[1:]).stdout)
    at = flags.index("--data-path")
    assert flags[at + 1 : at + 6] == ["0.7", "/a", "0.3", "/b", "--split"]
    _, again = flags_of(run(TRAIN, RECIPES[0], "--dry-run", "0.7 /a\n0.3\t/b\n", *data[1:]).stdout)
    assert again == flags


def test_data_prefix_may_contain_spaces(data, tmp_path):
    (tmp_path / "my data.bin").touch()
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", tmp_path / "my data", *data[1:]).stdout)
    assert flags[flags.index("--data-path") + 1] == str(tmp_path / "my data")


def test_node_options_come_from_environment(data):
    result = run(TRAIN, RECIPES[0], "--dry-run", *data, NNODES="3", NODE_RANK="2", MASTER_ADDR="n0", MASTER_PORT="5")
    options, _ = flags_of(result.stdout)
    assert options.items() >= {"--nnodes": "3", "--node-rank": "2", "--master-addr": "n0", "--master-port": "5"}.items()


def test_mocrun_options_come_from_environment(data):
    nodes = {"NNODES": "3", "SPARES": "1", "NODE_RANK": "2", "RDZV_ENDPOINT": "a:5,b:5,c:5"}
    options, _ = flags_of(run(TRAIN, RECIPES[0], "--dry-run", *data, LAUNCHER="mocrun", **nodes).stdout)
    assert options.items() >= {"--nnodes": "3", "--node-rank": "2", "--rdzv-endpoint": "a:5,b:5,c:5"}.items()


@each_row(
    "arguments, complaint",
    [
        ((), "NAME of a recipe"),
        ((RECIPES[0], "a"), "are needed"),
        (("--unknown", RECIPES[0], "a", "b", "c"), "unknown option --unknown"),
        (("gpt", "a", "b", "c"), f"no recipe gpt; give a .yaml file, or one of: {' '.join(RECIPES)}."),
        ((RECIPES[0], "--launcher", "mpirun", "a", "b", "c"), "give torchrun or mocrun"),
    ],
)
def test_train_script_refuses_in_one_line(arguments, complaint):
    result = run(TRAIN, *arguments)
    assert result.returncode == 1
    assert complaint in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("template", ["pretrain", "mocrun"])
def test_slurm_templates_refuse_unknown_recipe(template):
    result = run("bash", f"scripts/slurm/{template}.sbatch", "train_gpt_125m_8e.sh", "a", "b", "c", cwd=ROOT)
    assert result.returncode == 1 and f"one of: {' '.join(RECIPES)}." in result.stderr


@pytest.mark.slow
def test_trainer_accepts_flags_of_quickstart(tmp_path):
    for name in ("data_text_document.bin", "data_text_document.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    (tmp_path / ".quickstart").write_text("text= iters=9 workers=4\n")  # a run begun, and so continued
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path, "--iters", "9")
    assert result.returncode == 0, result.stderr
    stops, resumes = map(flags_of, result.stdout.splitlines())
    assert stops[1] == [*resumes[1], "--exit-interval", "6"]
    stopping, resuming = configured(stops, resumes)
    assert (stopping["exit_interval"], resuming["exit_interval"], resuming["train_iters"]) == (6, None, 9)


@pytest.mark.slow
def test_trainer_accepts_flags_of_smoke_test(tmp_path):
    (tmp_path / "pretrain_gpt_moe.py").touch()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    srun = 'while [ "$1" != smoke_cpu.sbatch ]; do shift; done; shift; printf "%q " "$@"'
    for name, text in {"srun": srun, "scontrol": "echo node0"}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run("bash", ROOT / "scripts/slurm/smoke_cpu.sbatch", cwd=tmp_path, PATH=path, **environment)
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    program = words.index("pretrain_gpt_moe.py")
    launcher = dict(zip(words[0:program:2], words[1:program:2], strict=True))
    (found,) = configured((launcher, words[program + 1 :]))
    assert found["data_parallel_size"] == 2


def test_quickstart_keeps_finished_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "loss.png").touch()
    (tmp_path / "run" / ".quickstart").write_text("text= iters=9 workers=4\n")
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path / "run", "--iters", "9")
    assert f"{tmp_path}/run-2/checkpoints" in result.stdout


@each_row("arguments", [("--iters", "2"), ("--workers", "6"), ("--text", "/no/such"), ("--iters",)])
def test_quickstart_refuses_in_one_line(arguments, tmp_path):
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path, *arguments)
    assert result.returncode == 1
    assert arguments[0] in result.stderr and len(result.stderr.splitlines()) == 1
