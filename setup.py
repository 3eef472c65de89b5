"""Packages and the address of the repository; everything else stands in pyproject.toml."""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import find_namespace_packages, setup


def repository() -> dict[str, str]:
    """The address of the repository that the wheel is built from, without credentials; empty where git has none."""
    if not shutil.which("git"):
        return {}
    git_dir = Path(__file__).parent / ".git"
    command = ["git", f"--git-dir={git_dir}", "remote", "get-url", "origin"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    over_ssh = re.fullmatch(r"(?:ssh://)?git@([^:/]+)[:/](.+)", found)
    url = f"https://{over_ssh[1]}/{over_ssh[2]}" if over_ssh else re.sub(r"(?<=https://)[^/@]*@", "", found)
    return {"Repository": url.removesuffix(".git")} if url.startswith("https://") else {}


setup(
    # Dynamic, since anybody could register a fixed address under which nothing is published.
    project_urls=repository(),
    # `megatron` is a namespace shared with pip's megatron-core: it has no __init__.py, here or there.
    packages=find_namespace_packages(
        include=["megatron.pretraining*", "moc*"], exclude=["megatron.pretraining.examples.files*"]
    ),
    # Naming the root makes `pip install -e .` a plain path entry, under which both halves of the
    # namespace are found; setuptools' import hooks for editable installs stay out of the way.
    package_dir={"": "."},
    package_data={
        "moc": ["py.typed"],
        "megatron.pretraining": ["py.typed", "entry/options.json", "presets/*.yaml"],
        # Links to files of the repository, which moc-examples copies.
        "megatron.pretraining.examples": [
            *(f"files/{name}" for name in ("pretrain_gpt_moe.py", "examples/*.*", "tools/*.py")),
            *(f"files/scripts/{name}" for name in ("common.sh", "quickstart.sh", "torchrun.py", "train.sh")),
            *("files/scripts/recipes/*", "files/scripts/slurm/*"),
        ],
    },
)
