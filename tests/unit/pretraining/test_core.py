"""A foreign megatron.core is refused by one sentence, before it is imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry.exclusions import check_package
from megatron.pretraining.entry.offline import config_of_words
from megatron.pretraining.process.core import BEFORE, OLDEST, WANTED, version_in
from moc.errors import codes_in

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


def run(*command, **environment):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([sys.executable, "-W", "ignore", *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("start", [[], ["-m", "moc.launch", "--nproc-per-node", "1"]], ids=["by itself", "launched"])
def test_core_of_other_version_is_refused(start, tmp_path):
    place = checkout(tmp_path, 15)
    ended = run(*start, "pretrain_gpt_moe.py", *FLAGS, *MORE, PYTHONPATH=str(place), MOC_UNCHECKED_VERSIONS="0")
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "megatron-core-unusable" in codes_in(said) and f"{place}/megatron/core" in said and "0.15.0" in said
    assert "Traceback" not in said and "imported" not in said


def test_environment_selects_other_version(tmp_path):
    place = checkout(tmp_path, 20)
    ended = run("pretrain_gpt_moe.py", *FLAGS, *MORE, PYTHONPATH=str(place), MOC_UNCHECKED_VERSIONS="1")
    assert ended.returncode != 0 and "imported" in ended.stderr


def test_other_deepspeed_is_refused_unless_requested(monkeypatch):
    config = config_of_words([*FLAGS, *MORE, "--deepspeed", "--transformer-impl", "local"], None)
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.1")
    monkeypatch.setenv("MOC_UNCHECKED_VERSIONS", "0")
    check_package(config, found := Problems())
    assert [one.code for one in found.found] == ["deepspeed-version-unsupported"]
    monkeypatch.setenv("MOC_UNCHECKED_VERSIONS", "1")
    check_package(config, found := Problems())
    assert not found.found


TRANSFORMER_ENGINE = """
import importlib.machinery, sys, types
import moc.megatron
import megatron.pretraining.loop
from megatron.pretraining import pretrain_gpt_moe
module = sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
module.__spec__, module.__version__ = importlib.machinery.ModuleSpec("transformer_engine", None), "9.8.7"
sys.exit(pretrain_gpt_moe.main())
"""


def test_imported_transformer_engine_release_is_printed():
    ended = run("-c", TRANSFORMER_ENGINE, *FLAGS, *MORE, "--transformer-impl", "local", "--eval-iters", "0")
    assert ended.returncode == 0, ended.stderr
    assert "9.8.7" in ended.stdout


def test_version_bounds_match_package_metadata():
    assert f'"{WANTED}",' in (ROOT / "pyproject.toml").read_text()
    assert WANTED == f"megatron-core>={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BEFORE[:2]))}"


def test_directory_without_version_gives_no_version(tmp_path):
    assert version_in(tmp_path) is None
    (tmp_path / "package_info.py").write_text("MAJOR = 0\n")
    assert version_in(tmp_path) is None
