"""The programs of ``benchmarks/save_stall.py`` measure real saves: tiny model, real workers."""

import json

import pytest

from benchmarks.save_peers.cases import LAYOUTS, model_flags
from tests.worlds import run_world


def run_program(tmp_path, module: str, *argv) -> dict:
    result = tmp_path / "result.json"
    own = ["--directory", str(tmp_path), "--result", str(result), *map(str, argv)]
    assert run_world(4, "tests.integration.benchmark_bodies:run_program", module=module, argv=own) == [0] * 4
    return json.loads(result.read_text())


@pytest.mark.parametrize(
    ("module", "mode", "layout", "saves"),
    [("torch_dcp", "sync", "DP4xEP2", 2), ("torch_dcp", "thread", "PP2xEP2", 2), ("mcore_dist", "sync", "PP2xEP2", 1)],
)
def test_peer_benchmark_saves_weights_masters_and_moments(tmp_path, module, mode, layout, saves):
    counts = ["--saves", saves, "--every", 1, "--plain", 1]
    told = run_program(tmp_path, module, "--mode", mode, *counts, *model_flags(quick=True), *LAYOUTS[layout])
    assert len(told["plain_s"]) == 1 and len(told["rounds"]) == saves
    for save in [told["first"], *told["rounds"]]:
        assert save["bytes"] >= 14 * told["parameters"]  # bf16 weights, fp32 masters and moments
        assert 0 < save["stall_s"] < save["round_s"]
        assert 0 < save["complete_s"] < save["round_s"]
    assert sorted(path.name for path in tmp_path.glob("save_*")) == [f"save_{saves - 1}", f"save_{saves}"]


def test_machine_limits_are_rates_of_same_bytes(tmp_path):
    told = run_program(tmp_path, "limits", "--bytes", 4 << 20, "--repeats", 3)
    assert told["bytes"] == 4 << 20
    for name in ("memcpy", "write", "read_cold", "read_warm"):
        assert told[f"{name}_bytes_per_s"] == sorted(told["samples"][name])[1] > 0
    assert not list(tmp_path.glob("share_*")), "files are removed"
