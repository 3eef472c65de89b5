"""Every command that a page prints works: quick programs run, and others read their flags."""

import argparse
import functools
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.pretraining.config import check_world
from megatron.pretraining.entry.offline import config_of_words
from megatron.pretraining.entry.own_flags import add_own_flags
from moc import launch
from tests.cases import each_row
from tests.unit.test_docs import PAGES, ROOT

RUN = ("tools/plan_checkpoint.py", "tools/simulate.py")
"""Programs that need nothing but their flags, and write into the current directory at most."""

OURS = re.compile(r"(?:[A-Z]+=\S+ )*(?:python\S* |torchrun |mocrun |deepspeed |sbatch |\./scripts/|moc-)")
JOB = """--model micro --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 1
    --global-batch-size 1680 --train-iters 100 --lr 1e-3 --eval-iters 0""".split()
"""In place of the dots that stand for flags of a training."""

OF_MEGATRON_DEEPSPEED = """--deepspeed --zero-stage 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-experts 8""".split()
"""In place of FLAGS_OF_MEGATRON_DEEPSPEED."""

OF_THE_PREVIOUS = "FLAGS_OF_THE_PREVIOUS_RELEASE"
LAUNCHERS = ("mocrun", "torchrun", "deepspeed")
OF_THE_READER = {
    "busier", "--busier-experts", "rotating",  # policies and rules that a page explains how to write
    "pretrain_gpt.py",  # a script of Megatron-LM
}  # fmt: skip
TRAINING = "pretrain_gpt_moe.py"
INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
NUMBERS = {"N": "0"}
DIRECTORIES = {"TRACES": "traces", "CHECKOUT": ".", "PYTHON": sys.executable, "DATA_PREFIX": "data_text_document"}


def commands(page: Path) -> list[str]:
    """The commands in the indented blocks of a page, a line each."""
    found = re.findall(r"(?:\A|(?<=\n\n))((?:    .*\n)+)", page.read_text(encoding="utf-8"))
    lines = [line.strip() for block in found for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [line for line in lines if OURS.match(line) and not re.match(r"mocrun: ", line)]


PRINTED = [(page, command) for page in PAGES for command in dict.fromkeys(commands(page))]


class Understood(Exception):
    """The program has read its flags."""


def enter(directory: Path, monkeypatch) -> None:
    """Enters a directory with the files that pages name: programs start there."""
    for name in ("tools", "examples", "scripts", "benchmarks", TRAINING):
        (directory / name).symlink_to(ROOT / name)
    for name in ("data_text_document.bin", "data_text_document.idx", "tokenizer.model"):
        (directory / name).touch()
    (directory / "ds_zero2_moe.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (directory / "checkpoints").mkdir()
    (directory / "checkpoints/model.yaml").write_text("num_layers: 2")
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(ROOT))


def test_pages_print_commands():
    assert len(PRINTED) > 100
    assert {word for _, command in PRINTED for word in RUN if word in command} == set(RUN)


@pytest.mark.slow
@each_row(("page", "command"), PRINTED, ids=lambda one: one if isinstance(one, str) else one.stem)
def test_printed_commands_work(page, command, tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)
    words = shlex.split(re.sub(r"[<>\[\]]", "", command), comments=True)
    while "=" in words[0]:
        del words[0]
    if "--help" in words or OF_THE_READER & {part for word in words for part in word.split(",")}:
        pytest.skip("it needs what the page explains how to write")
    if words[:3] == ["python", "-m", "moc.launch"]:
        words[:3] = ["mocrun"]
    if words[0].startswith("moc-"):
        module = INSTALLED[words[0]].partition(":")[0]
        tools = (path for path in (ROOT / "tools").glob("*.py") if f"from {module} import main" in path.read_text())
        words[:1] = ["python", f"tools/{next(tools).name}"]
    program, *rest = words
    if "FLAGS_OF_MEGATRON_DEEPSPEED" in words:
        translated(words)
    elif program in LAUNCHERS and not any(word.startswith(("benchmarks/", "examples/")) for word in rest):
        training(program, rest)
    elif program.startswith("./scripts/") or program == "sbatch":
        script(page, words)
    elif rest[:1] == [TRAINING] and "--help" not in rest:
        config_of(rest[1:])
    elif rest[0] in RUN:
        completed(rest, monkeypatch)
    elif rest[:1] == ["-c"]:
        done = subprocess.run([sys.executable, *rest], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    elif rest[:2] == ["-m", "pip"] or program == "pip":
        pytest.skip("it needs a network")
    else:
        parsed(rest, monkeypatch)


def training(program: str, words: list[str]) -> None:
    """The launcher reads its flags, and the training its own, for as many workers as the launcher starts."""
    least, most, per_node = 1, 1, 8
    words = ["0" if word == "N" else word for word in words]
    if TRAINING in words and "..." in words[: words.index(TRAINING)]:
        words[words.index("...")] = "--rdzv-endpoint=h0"
    own = words.index(TRAINING) if TRAINING in words else words.index("...") if "..." in words else len(words)
    if program == "mocrun":
        flags = launch.parse([*words[:own], TRAINING])
        least, most, per_node = flags.min_nodes, flags.nnodes, flags.nproc_per_node
    elif "--nproc-per-node" in words:
        per_node = int(words[words.index("--nproc-per-node") + 1])
    if own < len(words):
        config = config_of([word for word in words[own:] if word != TRAINING], most * per_node)
        check_world(config, most * per_node)
        if least == most == 1:
            check_world(config, per_node)


def completed(words: list[str], monkeypatch) -> None:
    """Runs a program of Python in this process, to its end."""
    monkeypatch.setattr(sys, "argv", words)
    code = None
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code, words


def translated(words: list[str]) -> None:
    """A command line of Megatron-DeepSpeed is configured."""
    own = words.index("FLAGS_OF_MEGATRON_DEEPSPEED")
    assert words[0] == "mocrun"
    command = [sys.executable, "-m", "moc.launch", *words[1:own], *OF_MEGATRON_DEEPSPEED, "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "zero_stage" in done.stdout, done.stdout + done.stderr


def config_of(words: list[str], workers: int | None = None):
    """The training's configuration; flags after the dots weigh more than those that they stand for."""
    if "..." in words:
        words = [*JOB, *(word for word in words if word != "...")]
    if OF_THE_PREVIOUS in words:
        own = words.index(OF_THE_PREVIOUS)
        words = [*words[:own], *JOB, "--topk", "2", *words[own + 1 :]]
    words = [word for word in words if word not in ("FLAGS", "FLAGS...")]
    return config_of_words(words, workers)


def script(page: Path, words: list[str]) -> None:
    """Names the flags of its help; of a training, says the flags that the trainer then reads."""
    if words[0] == "sbatch":
        at = next(at for at, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[at]).is_file()
        words = ["./scripts/train.sh", *(word for word in words[at + 1 :] if not re.match("[A-Z_]+=", word))]
        if TRAINING in words or words[-1] == "...":  # another command of the page has the rest
            return
    path, *rest = words
    said = subprocess.run(["bash", path, "--help"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    if path != "./scripts/train.sh":
        assert [word for word in rest if word.startswith("--") and word not in said.stdout] == []
        return
    rest = ["tokenizer.model" if word == "TOKENIZER" else DIRECTORIES.get(word, word) for word in rest]
    printed = subprocess.run(["bash", path, "--dry-run", *rest], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    found = shlex.split(printed.stdout.strip().splitlines()[-1])
    config_of(found[next(at for at, word in enumerate(found) if word.endswith(TRAINING)) + 1 :])


@functools.cache
def options_of_training() -> frozenset[str]:
    """Option strings of Megatron-LM and of this project."""
    config_of_words([*JOB], None)  # adapts megatron-core before it is imported
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(parser)
    return frozenset(add_own_flags(parser)._option_string_actions)


def parsed(words: list[str], monkeypatch) -> None:
    """Starts a program of Python, which ends once it has read its flags."""
    if "torchrun" in words or words[0].startswith("--"):
        words = words[next(at for at, word in enumerate(words) if word.endswith(".py")) :]
    words = [DIRECTORIES.get(word, NUMBERS.get(word, word)) for word in words]
    parser, inside = argparse.ArgumentParser, []
    read_all, read_known = parser.parse_args, parser.parse_known_args

    def reading_all(own, args=None, namespace=None):
        inside.append(own)
        read_all(own, args, namespace)
        raise Understood

    def reading_known(own, args=None, namespace=None):
        inside.append(own)
        known, unknown = read_known(own, args, namespace)
        inside.pop()
        if not inside:  # the others are flags of a training
            assert {word for word in unknown if word.startswith("--") and word != "--"} <= options_of_training()
            raise Understood
        return known, unknown

    monkeypatch.setattr(parser, "parse_args", reading_all)
    monkeypatch.setattr(parser, "parse_known_args", reading_known)
    as_module = words[0] == "-m"
    name = words[1] if as_module else words[0]
    monkeypatch.setattr(sys, "argv", [name, *words[2 if as_module else 1 :]])
    with pytest.raises(Understood):
        runpy.run_module(name, run_name="__main__") if as_module else runpy.run_path(name, run_name="__main__")
