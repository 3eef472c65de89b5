"""What a real run has saved is whole by tools/verify_checkpoint.py, and inspect_checkpoint.py knows every operator."""

import json
import random
import subprocess
import sys

import pytest

from tests.integration.test_precision import BF16, FP16
from tests.integration.tiny import FLAGS, LAYOUTS, train
from tests.worlds import REPOSITORY

RUNS = {
    "PP2xEP2": {},
    "TP2xEP2": BF16,
    "interleaved": FP16,
    "EP2": dict(use_distributed_optimizer=False, optimizer="sgd", moe_layer_freq=[0, 1]),
}


def run(name, *argv):
    """Runs a tool as a user does."""
    command = [sys.executable, str(REPOSITORY / "tools" / f"{name}.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("layout", RUNS)
def test_a_real_checkpoint(layout, data, tmp_path):
    train(layout, data | RUNS[layout] | dict(save=str(tmp_path), save_interval=2, train_iters=3))
    whole = run("verify_checkpoint", tmp_path, "--all")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert whole.stdout.count(": whole, ") == 2

    told = json.loads(run("inspect_checkpoint", tmp_path, "--by", "operator", "--json").stdout)
    assert told["complete"] and told["iteration"] == 3 and told["consumed_samples"] == 3 * FLAGS["global_batch_size"]
    assert (told["loss_scale"] is not None) == (layout == "interleaved")
    rows = {row["name"]: row for row in told["rows"]}
    slots = 2 if told["optimizer"] == "sgd" else 3
    assert all(row["bytes"] == 4 * slots * row["parameters"] for row in rows.values())
    expert = FLAGS["hidden_size"] * FLAGS["ffn_hidden_size"] * 3
    layers = (FLAGS | LAYOUTS[layout][1])["num_layers"]
    holds_experts = RUNS[layout].get("moe_layer_freq", [1] * layers)
    experts = {name: row["parameters"] for name, row in rows.items() if "expert" in name}
    assert experts == {
        f"layers.{i}.expert.{e}": expert
        for i, here in enumerate(holds_experts)
        if here
        for e in range(FLAGS["num_experts"])
    }
    assert "other" not in rows

    damaged = random.choice([path for path in (tmp_path / "iter_0000003").rglob("*.*") if path.name != "manifest.json"])
    content = bytearray(damaged.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    damaged.write_bytes(content)
    found = run("verify_checkpoint", tmp_path)
    assert found.returncode == 1 and f"{damaged.relative_to(tmp_path / 'iter_0000003')}: " in found.stdout
    assert run("verify_checkpoint", tmp_path, "--iteration", "2").returncode == 0
