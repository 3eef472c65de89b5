"""The plan of the house in CONTRIBUTING.md: who may import whom."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOC = sorted(path for path in (ROOT / "moc").rglob("*.py"))


def arrows() -> dict[str, set[str]]:
    """By room of ``moc``, the rooms that it may import, over any number of arrows."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    direct: dict[str, set[str]] = {}
    for line in re.findall(r"^ +([\w& ]+(?: --> [\w& ]+)+)$", text, re.MULTILINE):
        steps = [re.split(r" & ", step.strip()) for step in line.split("-->")]
        for sources, targets in zip(steps, steps[1:], strict=False):
            for source in sources:
                direct.setdefault(source, set()).update(targets)
    for _ in direct:
        direct = {room: set().union(targets, *(direct.get(t, ()) for t in targets)) for room, targets in direct.items()}
    return direct


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also where only a type checker looks."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_the_plan_is_read():
    assert arrows()["snapshot"] == {"store", "sharding", "state", "faults"}
    assert not any(room in reached for room, reached in arrows().items())  # no circles


@pytest.mark.parametrize("path", MOC, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_what_its_arrows_point_to(path):
    room, allowed = path.relative_to(ROOT / "moc").parts[0].removesuffix(".py"), arrows()
    for module in imported(path):
        assert not module.startswith(("megatron", "deepspeed", "pretrain_gpt_moe")), module
        if module.startswith("moc."):
            other = module.split(".")[1]
            assert other == room or other in allowed.get(room, set()), f"{room} may not import {module}"


WITHOUT_AN_ENGINE = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "deepspeed"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import moc
print(sum(importlib.import_module(one.name) is not None for one in pkgutil.walk_packages(moc.__path__, "moc.")))
"""


def test_every_room_can_be_imported_without_an_engine():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_AN_ENGINE], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 100
