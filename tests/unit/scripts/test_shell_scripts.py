"""The launch scripts: their style, their --help, and that the trainer understands the flags they pass."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(p for p in (ROOT / "scripts").glob("*.sh") if p.name != "common.sh")
BATCH_SCRIPTS = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
TRAIN = ROOT / "scripts" / "train.sh"
RECIPES = sorted(path.stem for path in (ROOT / "scripts" / "recipes").iterdir())


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


def accepts(launcher: dict[str, str], flags: list[str]) -> None:
    """Lets the trainer read its flags, and check them against the number of workers."""
    from megatron.pretraining.arguments import parse_config
    from megatron.pretraining.config import check_world

    check_world(parse_config(flags), int(launcher["--nproc-per-node"]) * int(launcher.get("--nnodes", 1)))


@pytest.fixture
def data(tmp_path):
    """Files with the names of a dataset and a tokenizer: flags are only checked for their presence."""
    for name in ("data.bin", "data.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    return [tmp_path / "data", tmp_path / "tokenizer.model", tmp_path / "checkpoints"]


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; it comes with the extra [dev]")
    files = [ROOT / ".ci" / "run", ROOT / ".ci" / "install", *(ROOT / "scripts").rglob("*.sh"), *BATCH_SCRIPTS]
    result = run("shellcheck", "--external-sources", *files, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, *BATCH_SCRIPTS], ids=lambda p: p.name)
def test_help_is_text_without_side_effects(script, tmp_path):
    result = run("bash", script, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert script.name.split(".")[0] in result.stdout
    assert "#" not in result.stdout and "set -euo" not in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_can_be_started(script):
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer_accepts_the_flags_of_a_recipe(recipe, data):
    result = run(TRAIN, recipe, "--dry-run", *data)
    assert result.returncode == 0, result.stderr
    accepts(*flags_of(result.stdout))


@pytest.mark.parametrize("line", (Path(__file__).parent / "recipe_flags.txt").read_text().splitlines())
def test_a_recipe_is_what_these_flags_are(line, data):
    from megatron.pretraining.arguments import parse_config

    recipe, nodes, *expected = shlex.split(line)
    options, flags = flags_of(run(TRAIN, recipe, "--dry-run", *data).stdout)
    assert flags[0] == "--config" and options["--nnodes"] == nodes
    assert parse_config(flags) == parse_config(expected + flags[2:])


def test_list_names_recipes_and_what_they_are():
    lines = run(TRAIN, "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == RECIPES
    assert all(len(line.split()) > 3 for line in lines)


def test_a_recipe_may_be_a_file_of_ones_own(data, tmp_path):
    (tmp_path / "own.yaml").write_text("# Nodes: 2\nmodel: tiny\n")
    options, flags = flags_of(run(TRAIN, tmp_path / "own.yaml", "--dry-run", *data).stdout)
    assert flags[:2] == ["--config", str(tmp_path / "own.yaml")] and options["--nnodes"] == "2"


def test_the_launcher_is_chosen_and_gets_flags(data):
    said = run(TRAIN, RECIPES[0].replace("_", "-"), "--launcher", "mocrun", "--nproc-per-node=2", "--dry-run", *data)
    assert said.stdout.startswith("python -m moc.launch ")
    assert said.stdout.index("--nproc-per-node=2") > said.stdout.index("--nproc-per-node 8")


@pytest.mark.parametrize(
    "nodes, token, launcher", [("1", "", "moc.launch"), ("2", "t", "moc.launch"), ("2", "", "torchrun")]
)
def test_mocrun_is_preferred_where_it_can_start(data, nodes, token, launcher):
    said = run(TRAIN, RECIPES[0], "--dry-run", *data, NNODES=nodes, MOC_TOKEN_FILE=token)
    assert launcher in shlex.split(said.stdout)[2 if token or nodes == "1" else 1]
    assert ("whoever reaches" in said.stderr) == (launcher == "torchrun")


@pytest.mark.parametrize("name", ["NNODES", "GPUS_PER_NODE", "NODE_RANK", "SPARES", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["a[$(touch ran)]", "-1", "1 2", "0x1", "9999999"])
def test_what_should_be_a_number_is_not_run(data, tmp_path, name, value):
    said = run(TRAIN, RECIPES[0], "--dry-run", *data, cwd=tmp_path, **{name: value})
    assert said.returncode == 1 and f"{name} is a number" in said.stderr
    assert not (tmp_path / "ran").exists()


def test_flags_of_the_user_come_last(data):
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", *data, "--train-iters", "7").stdout)
    assert flags[-2:] == ["--train-iters", "7"]


def test_a_blend_in_one_argument_becomes_many(data):
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", "0.7 /a 0.3 /b", *data[1:]).stdout)
    at = flags.index("--data-path")
    assert flags[at + 1 : at + 6] == ["0.7", "/a", "0.3", "/b", "--split"]
    _, again = flags_of(run(TRAIN, RECIPES[0], "--dry-run", "0.7 /a\n0.3\t/b\n", *data[1:]).stdout)
    assert again == flags


def test_a_prefix_may_have_spaces(data, tmp_path):
    (tmp_path / "my data.bin").touch()
    _, flags = flags_of(run(TRAIN, RECIPES[0], "--dry-run", tmp_path / "my data", *data[1:]).stdout)
    assert flags[flags.index("--data-path") + 1] == str(tmp_path / "my data")


def test_several_nodes_find_each_other_by_the_environment(data):
    result = run(TRAIN, RECIPES[0], "--dry-run", *data, NNODES="3", NODE_RANK="2", MASTER_ADDR="n0", MASTER_PORT="5")
    options, _ = flags_of(result.stdout)
    assert options.items() >= {"--nnodes": "3", "--node-rank": "2", "--master-addr": "n0", "--master-port": "5"}.items()


def test_several_nodes_may_have_the_controller(data):
    nodes = {"NNODES": "3", "SPARES": "1", "NODE_RANK": "2", "RDZV_ENDPOINT": "a:5,b:5,c:5"}
    options, _ = flags_of(run(TRAIN, RECIPES[0], "--dry-run", *data, LAUNCHER="mocrun", **nodes).stdout)
    assert options.items() >= {"--nnodes": "3", "--node-rank": "2", "--rdzv-endpoint": "a:5,b:5,c:5"}.items()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ((), "NAME of a recipe"),
        ((RECIPES[0], "a"), "are needed"),
        (("--unknown", RECIPES[0], "a", "b", "c"), "unknown option --unknown"),
        (("gpt", "a", "b", "c"), f"no recipe gpt; give a .yaml file, or one of: {' '.join(RECIPES)}."),
        ((RECIPES[0], "--launcher", "mpirun", "a", "b", "c"), "give torchrun or mocrun"),
    ],
)
def test_train_script_refuses_in_one_sentence(arguments, complaint):
    result = run(TRAIN, *arguments)
    assert result.returncode == 1
    assert complaint in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("template", ["pretrain", "mocrun"])
def test_templates_refuse_what_is_no_recipe(template):
    result = run("bash", f"scripts/slurm/{template}.sbatch", "train_gpt_125m_8e.sh", "a", "b", "c", cwd=ROOT)
    assert result.returncode == 1 and f"one of: {' '.join(RECIPES)}." in result.stderr


def test_trainer_accepts_the_flags_of_quickstart(tmp_path):
    for name in ("data_text_document.bin", "data_text_document.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    (tmp_path / ".quickstart").write_text("text= iters=9 workers=4\n")  # a run begun, and so continued
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path, "--iters", "9")
    assert result.returncode == 0, result.stderr
    stops, resumes = map(flags_of, result.stdout.splitlines())
    assert stops[1] == [*resumes[1], "--exit-interval", "6"]
    accepts(*stops)
    accepts(*resumes)


def test_trainer_accepts_the_flags_of_the_smoke_test(tmp_path):
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
    accepts(dict(zip(words[0:program:2], words[1:program:2], strict=True)), words[program + 1 :])


def test_quickstart_keeps_a_finished_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "loss.png").touch()
    (tmp_path / "run" / ".quickstart").write_text("text= iters=9 workers=4\n")
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path / "run", "--iters", "9")
    assert f"{tmp_path}/run-2/checkpoints" in result.stdout


@pytest.mark.parametrize("arguments", [("--iters", "2"), ("--workers", "6"), ("--text", "/no/such"), ("--iters",)])
def test_quickstart_refuses_in_one_sentence(arguments, tmp_path):
    result = run(ROOT / "scripts" / "quickstart.sh", "--dry-run", "--out", tmp_path, *arguments)
    assert result.returncode == 1
    assert arguments[0] in result.stderr and len(result.stderr.splitlines()) == 1
