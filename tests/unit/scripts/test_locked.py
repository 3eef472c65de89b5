"""What the scripts install is named with its hashes, and a file that is another ends the set-up."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cases import each_row

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {"base": PROJECT["dependencies"], "dev": PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]}


def locked(name: str) -> list[tuple[Requirement, str]]:
    """What is locked, each with its hashes."""
    lines = (ROOT / "scripts" / "locked" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    parts = [line.partition(" --hash=") for line in lines if not line.startswith("#")]
    return [(Requirement(what), f"--hash={hashes}") for what, _, hashes in parts]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@each_row("name", NEEDED)
@each_row("python", ["3.12", "3.13"])
def test_all_packages_but_torch_are_locked_per_python(name, python):
    here = {"python_version": python, "python_full_version": f"{python}.7", "sys_platform": "linux"}
    versions = {}
    for what, hashes in locked(name):
        assert re.fullmatch(r"(--hash=sha256:[0-9a-f]{64}\s*)+", hashes), what
        assert re.fullmatch(r"==[^*,]+", str(what.specifier)), what
        if what.marker is None or what.marker.evaluate(here):
            assert plain(what.name) not in versions, what
            versions[plain(what.name)] = str(what.specifier)[2:]
    assert not [one for one in versions if one == "torch" or re.match("nvidia|cuda|triton", one)]
    for needed in map(Requirement, NEEDED[name]):
        if needed.name != "torch" and (needed.marker is None or needed.marker.evaluate(here)):
            assert needed.specifier.contains(versions[plain(needed.name)], prereleases=True), needed


@pytest.mark.parametrize(
    "pip, code, sentence",
    [
        ("exit 0", 0, ""),
        ("echo 'ERROR: No matching distribution found for numpy==2.4.6'; exit 1", 7, ""),
        (
            "echo 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.'; exit 1",
            1,
            "has another hash",
        ),
    ],
    ids=["all there", "not to be had", "another file"],
)
def test_hash_mismatch_ends_setup_but_missing_package_does_not(tmp_path, pip, code, sentence):
    (tmp_path / "python").write_text(f"#!/usr/bin/env bash\n{pip}\n")
    (tmp_path / "python").chmod(0o755)
    script = (
        f". {ROOT}/scripts/common.sh; PYTHON={tmp_path}/python; if install_locked base; then exit 0; else exit 7; fi"
    )
    said = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True)
    assert said.returncode == code and sentence in said.stdout + said.stderr
