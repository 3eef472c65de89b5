"""The commands of docs/get-started/first-run.md, one after the other, with less text and fewer iterations."""

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

from tests.unit.test_doc_commands import commands
from tests.unit.test_docs import ROOT

SMALLER = {"32000": "300", "1000": "2", "100": "1", "8": "2", "10": "1"}
PAGE = ROOT / "docs/get-started/first-run.md"


def text(directory: Path) -> None:
    """Fewer documents than the default split needs."""
    rng, letters = random.Random(3), "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(400)]
    directory.mkdir()
    for number in range(60):
        (directory / f"{number}.txt").write_text(" ".join(rng.choices(words, k=600)))


def test_first_run_commands_of_documentation_work(tmp_path):
    text(tmp_path / "text")
    for name in ("tools", "pretrain_gpt_moe.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for command in commands(PAGE):
        if command.startswith("./scripts"):
            continue
        words = [SMALLER.get(word, word) for word in shlex.split(command)]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    events = [json.loads(line) for line in (tmp_path / "log/events.jsonl").read_text().splitlines()]
    assert {event["split"] for event in events if event["type"] == "evaluation"} == {"valid", "test"}
    assert (tmp_path / "loss.png").exists() and (tmp_path / "checkpoints/iter_0000002").is_dir()
