"""What a real run has saved is whole by tools/verify_checkpoint.py, and inspect_checkpoint.py knows every operator."""

import json
import random
import subprocess
import sys

import pytest

from tests.integration import entry_jobs
from tests.integration.entry_jobs import EP2, MOE, OWN_PROGRAM, ZERO1
from tests.worlds import REPOSITORY

RUNS = {  # flags, layers with experts, slots of optimizer state
    "bf16, ZeRO": (f"{EP2} {ZERO1} --bf16", [0, 1], 3),
    "sgd, stages": (f"{MOE} --pipeline-model-parallel-size 2 --optimizer sgd --moe-layer-freq [0,1]", [1], 2),
}


def run(name, *argv):
    """Runs a tool as a user does."""
    command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_tools_read_checkpoint_of_real_run(name, tmp_path):
    flags, layers, slots = RUNS[name]
    saves = "--train-iters 3 --save saved --save-interval 2"
    ended = entry_jobs.run(tmp_path, OWN_PROGRAM, 2, f"{flags} {saves}")
    assert ended.code == 0, ended.output[-4000:]
    saved = tmp_path / "saved"
    whole = run("verify_checkpoint", saved, "--all")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert whole.stdout.count(": whole, ") == 2

    told = json.loads(run("inspect_checkpoint", saved, "--by", "operator", "--json").stdout)
    assert told["complete"] and told["iteration"] == 3
    rows = {row["name"]: row for row in told["rows"]}
    assert all(row["bytes"] == 4 * slots * row["parameters"] for row in rows.values())
    experts = {name: row["parameters"] for name, row in rows.items() if "expert" in name}
    assert experts == {f"layers.{layer}.expert.{expert}": 3 * 64 * 64 for layer in layers for expert in range(4)}
    assert "other" not in rows

    damaged = random.choice([path for path in (saved / "iter_0000003").rglob("*.*") if path.name != "manifest.json"])
    content = bytearray(damaged.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    damaged.write_bytes(content)
    found = run("verify_checkpoint", saved)
    assert found.returncode == 1 and f"{damaged.relative_to(saved / 'iter_0000003')}: " in found.stdout
    assert run("verify_checkpoint", saved, "--iteration", "2").returncode == 0
