"""No control character of a foreign file or name reaches the output of a tool or a job."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.pretraining.convert.dense import write_dense
from megatron.pretraining.convert.snapshot import write_snapshot
from moc.store.host_memory import memory_storage
from moc.store.store import Run, record_run
from tests.unit.pretraining.convert.models import Model
from tests.unit.report.test_program import Story
from tests.worlds import REPOSITORY

CONTROLS = "\x1b[2J\x1b]0;t\x07\x08\r\x7f\x85\x9b31m\u202e\u2066\u2028\nFORGED $\\frac{$"
NAME = CONTROLS
"""A name of a file or directory."""


def problems(printed: bytes) -> list[str]:
    """What is wrong with the output of a process."""
    text = printed.decode("utf-8", "replace")
    found = [repr(one) for one in text if not one.isprintable() and one not in "\n\t"]
    return found + [line for line in text.split("\n") if line.startswith("FORGED")]


def run(*command, code: int = 0) -> bytes:
    """Runs a program without a terminal; returns its output after checks of it and of the exit code."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for variable in ("FORCE_COLOR", "RANK", "WORLD_SIZE"):
        env.pop(variable, None)
    done = subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], capture_output=True, env=env)
    printed = done.stdout + done.stderr
    assert problems(printed) == []
    assert done.returncode == code and b"Traceback" not in printed, printed.decode()
    assert done.stdout or done.stderr
    return done.stdout


def tool(name: str, *arguments, code: int = 0) -> bytes:
    return run(REPOSITORY / "tools" / f"{name}.py", *arguments, code=code)


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / NAME).mkdir()
    return tmp_path / NAME


def no_progress(count: int) -> None:
    pass


def spoilt(file: Path) -> None:
    """Puts control characters into all texts of a JSON file, and into names of fields that anybody may choose."""
    fields = json.loads(file.read_text())

    def change(value):
        if isinstance(value, dict):
            return {name: change(inner) for name, inner in value.items()} | {CONTROLS: CONTROLS}
        if isinstance(value, list):
            return [*map(change, value)]
        return value + CONTROLS if isinstance(value, str) else value

    file.write_text(json.dumps(change(fields)))


@pytest.fixture(params=["snapshot", "dense"])
def checkpoint(request, root) -> Path:
    if request.param == "snapshot":
        return write_snapshot(Model(), root, 2, no_progress)
    return write_dense(Model(), root, 2, torch.bfloat16, 10**9, no_progress)


def test_checkpoint_tools_escape_names_of_hostile_directory(checkpoint):
    (checkpoint / NAME).write_text(CONTROLS)
    (checkpoint.parent / f".{NAME}").write_text(CONTROLS)
    for flags in ([], ["--all"], ["--all", "--json"]):  # the other file is not listed in the manifest
        printed = tool("verify_checkpoint", checkpoint.parent, *flags, code=1)
        assert "--json" not in flags or json.loads(printed)["verified"]
    for flags in ([], ["--by", "file"], ["--json"]):
        printed = tool("inspect_checkpoint", checkpoint.parent, *flags)
        assert "--json" not in flags or CONTROLS in json.loads(printed)["path"]
    tool("convert_checkpoint", checkpoint.parent, checkpoint.parent / f"other{NAME}")


def test_checkpoint_tools_escape_hostile_contents(checkpoint):
    for file in checkpoint.rglob("*.json"):
        spoilt(file)
    for name in (".fence", ".run.json", "latest_checkpointed_iteration.txt"):
        (checkpoint.parent / name).write_text(CONTROLS)
    for flags in (["--all"], ["--all", "--json"]):
        tool("verify_checkpoint", checkpoint.parent, *flags, code=1)
    tool("inspect_checkpoint", checkpoint, code=1)
    tool("convert_checkpoint", checkpoint, checkpoint.parent / "other", code=1)


def test_conversion_escapes_hostile_transformers_directory(root):
    config = {"model_type": CONTROLS, "architectures": [CONTROLS], CONTROLS: CONTROLS}
    (root / "config.json").write_text(json.dumps(config))
    (root / "model.safetensors").write_bytes(CONTROLS.encode())
    tool("convert_checkpoint", root, root / "output", code=1)


@pytest.fixture
def log(root) -> Path:
    story = Story().start().usual(20).generation(0.5).resume(1.0).usual(10)
    choice = dict(policy=CONTROLS, iteration=30, reason=CONTROLS, cause=CONTROLS, chosen={CONTROLS: CONTROLS})
    events = [*story.events, {"type": "choice", "time": story.now, **choice}]
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return root


def test_reports_escape_hostile_log(log, tmp_path):
    tool("report", log, "--json", tmp_path / "report.json", "--plot", tmp_path / "report.png")
    assert json.loads((tmp_path / "report.json").read_text())
    shutil.copytree(log, tmp_path / f"second{NAME}")
    tool("report", log, tmp_path / f"second{NAME}")
    tool("plot_loss", log, tmp_path / f"second{NAME}", "--output", log / "loss.png")
    model = ["--model", "gpt-350m-16e", "--global-batch", "3072"]
    tool("simulate", *model, "--profile", log, "--runs", "1", "--csv", log / "table.csv")
    (log / "events.jsonl").write_text(json.dumps({"type": CONTROLS, "time": 1.0, CONTROLS: CONTROLS}) + "\n")
    tool("report", log, code=1)
    tool("simulate", *model, "--profile", log, "--runs", "1", code=1)


def test_clean_memory_escapes_hostile_job_memory(root):
    place = memory_storage(root, CONTROLS, "a" * 16)
    record_run(place, Run("a" * 16, "/data", 0.0))
    spoilt(place.root / ".run.json")
    (place.root.parent / NAME).mkdir()
    tool("clean_memory", "--memory-dir", root)
    tool("clean_memory", "--memory-dir", root, root / "none", code=1)
    tool("clean_memory", "--memory-dir", root, "--all", "--remove", "--ended")


@pytest.mark.parametrize("name", ["verify_checkpoint", "inspect_checkpoint", "convert_checkpoint", "train_tokenizer"])
def test_command_line_error_is_escaped(name, tmp_path):
    tool(name, tmp_path / NAME, "output", f"--{CONTROLS}", code=2)


def test_plan_checkpoint_escapes_hostile_model_name():
    tool("plan_checkpoint", "--model", CONTROLS, code=2)


def test_tokenizer_and_dataset_tools_escape_hostile_text(root):
    (root / f"{NAME}.jsonl").write_text(json.dumps({CONTROLS: CONTROLS}) + "\n{" + CONTROLS)
    tool("train_tokenizer", "--input", root / f"{NAME}.jsonl", "--output", root / "model", "--vocab-size", "32", code=1)
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", root / NAME]
    tool("preprocess_data", "--input", root / f"{NAME}.jsonl", "--output-prefix", root / "data", *flags, code=1)


def test_job_escapes_hostile_directory_on_resume(root):
    program = [REPOSITORY / "examples" / "pure_torch.py", "--ckpt-dir", root, "--log-dir", root / "log"]
    run(*program, "--iterations", "2")
    newest = max(root.glob("iter_*"))
    (root / "iter_0000009").symlink_to(NAME)
    run(*program, "--iterations", "3")
    spoilt(newest / "manifest.json")
    (root / ".fence").write_text(CONTROLS)
    (root / ".run.json").write_text(json.dumps({"run": CONTROLS, "address": CONTROLS, "made": 1.0}))
    run(*program, "--iterations", "4")


def test_check_finds_unescaped_output():
    assert problems(CONTROLS.encode()) and problems(b"ok\nFORGED") and not problems(b"ok \\x1b\n\t")
