"""A foreign megatron.core is refused by one sentence, before it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.pretraining.process.core import BEFORE, OLDEST, WANTED, version_in

ROOT = Path(__file__).resolve().parents[3]
FLAGS = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8".split()
MORE = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9".split()


def checkout(directory, minor) -> Path:
    """What a checkout of Megatron-LM of another version has where it is on PYTHONPATH."""
    core = directory / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemExit('imported')")
    (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n")
    return directory


@pytest.mark.parametrize("start", [[], ["-m", "moc.launch", "--nproc-per-node", "1"]], ids=["by itself", "launched"])
def test_a_checkout_of_another_version_is_refused(start, tmp_path):
    place = checkout(tmp_path, 15)
    command = [sys.executable, "-W", "ignore", *start, "pretrain_gpt_moe.py", *FLAGS, *MORE]
    env = os.environ | {"PYTHONPATH": str(place), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert f"megatron.core is taken from {place}/megatron/core, whose version is 0.15.0" in said
    assert f"take {place} off PYTHONPATH" in said and "Traceback" not in said and "imported" not in said


def test_the_versions_are_those_of_the_package():
    assert f'"{WANTED}",' in (ROOT / "pyproject.toml").read_text()
    assert WANTED == f"megatron-core>={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BEFORE[:2]))}"


def test_what_does_not_say_its_version_has_none(tmp_path):
    assert version_in(tmp_path) is None
    (tmp_path / "package_info.py").write_text("MAJOR = 0\n")
    assert version_in(tmp_path) is None
