"""The plan of the house in CONTRIBUTING.md: who may import whom."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

from tests.cases import each_row

ROOT = Path(__file__).resolve().parents[2]
MOC = sorted((ROOT / "moc").rglob("*.py"))
ENTRY = ROOT / "moc/megatron.py"
"""The import by which a script asks for the entry point: the only module of moc that imports an engine."""
OURS = {  # by dotted name
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*MOC, *(ROOT / "megatron/pretraining").rglob("*.py"), ROOT / "pretrain_gpt_moe.py"]
}


@functools.cache
def drawn() -> dict[str, set[str]]:
    """By box, those that an arrow of its own points to."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    direct: dict[str, set[str]] = {}
    for line in re.findall(r"^ +([\w& ]+(?: --> [\w& ]+)+)$", text, re.MULTILINE):
        steps = [re.split(r" & ", step.strip()) for step in line.split("-->")]
        for sources, targets in zip(steps, steps[1:], strict=False):
            for source in sources:
                direct.setdefault(source, set()).update(targets)
    return direct


def arrows() -> dict[str, set[str]]:
    """By box, those that it may import, over any number of arrows."""
    direct = drawn()
    for _ in direct:
        direct = {room: set().union(targets, *(direct.get(t, ()) for t in targets)) for room, targets in direct.items()}
    return direct


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Modules that a file imports anywhere: also in functions, and where only a type checker looks."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def boxes_of(module: str) -> set[str]:
    """The boxes of the plan that a module is in."""
    first, *rest = module.split(".")
    if first == "moc":
        return {"moc", *rest[:1]}
    named = {"megatron.pretraining": "training", "megatron.core": "core", "pretrain_gpt_moe": "program"}
    return {box for name, box in named.items() if f"{module}.".startswith(f"{name}.")}


def test_import_plan_is_read():
    assert arrows()["snapshot"] == {
        "store",
        "sharding",
        "state",
        "fault_points",
        "stream",
        "background",
        "cli_output",
        "files",
        "errors",
    }
    assert not any(room in reached for room, reached in arrows().items())  # no circles


def test_every_allowed_import_is_used():
    used = {
        (source, target)
        for name, path in OURS.items()
        for module in imported(path)
        for source in boxes_of(name)
        for target in boxes_of(module)
    }
    assert {(source, target) for source, targets in drawn().items() for target in targets} <= used


def test_module_imports_have_no_cycles():
    graph = {name: {one for one in imported(path) if one in OURS and one != name} for name, path in OURS.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


@each_row("path", [path for path in MOC if path != ENTRY], ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_only_allowed_packages(path):
    room, allowed = path.relative_to(ROOT / "moc").parts[0].removesuffix(".py"), arrows()
    for module in imported(path):
        assert not module.startswith(("megatron", "deepspeed", "pretrain_gpt_moe")), module
        if module.startswith("moc."):
            other = module.split(".")[1]
            assert other == room or other in allowed.get(room, set()), f"{room} may not import {module}"


def test_deepspeed_is_imported_only_in_functions_of_its_engine():
    of_engine = {name for name, path in OURS.items() if any(m.split(".")[0] == "deepspeed" for m in imported(path))}
    assert of_engine == {f"megatron.pretraining.engine.zero.{name}" for name in ("build",)}
    for name in of_engine:
        outside = [ast.unparse(node) for node in ast.parse(OURS[name].read_text()).body]
        assert not any(re.match(r"(from|import) deepspeed", line) for line in outside)


WITHOUT_AN_ENGINE = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "deepspeed"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import moc
others = {f"moc.{name}" for name in ("megatron", "transformers", "accelerate", "lightning", "torchtitan")}
names = {one.name for one in pkgutil.walk_packages(moc.__path__, "moc.")} - others
print(sum(importlib.import_module(name) is not None for name in names))
"""


def test_every_package_is_importable_without_engine():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_AN_ENGINE], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 100


def test_methods_without_docstrings_override_documented_ones():
    documented, lacking = set(), []
    for path in [*MOC, *(ROOT / "megatron/pretraining").rglob("*.py")]:
        for owner in ast.parse(path.read_text()).body:
            for member in owner.body if isinstance(owner, ast.ClassDef) else ():
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    documented.add(member.target.id)  # the docstring of its class explains it
                elif isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    if ast.get_docstring(member) or ast.unparse(member.body[-1]) == "...":  # as above
                        documented.add(member.name)
                    elif not member.name.startswith("_") and not owner.name.startswith("_"):
                        lacking.append((member.name, f"{path}:{member.lineno}"))
    assert not [where for name, where in lacking if name not in documented]


def test_test_names_have_at_most_60_characters():
    names = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert not sorted(name for name in names if len(name) > 60)
