"""Each use of something that torch, megatron-core or DeepSpeed does not document is in one table, which they fulfil."""

import ast
import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from megatron.pretraining.entry.offline import config_of_words
from megatron.pretraining.process import core, cpu
from moc import private_interfaces
from moc.private_interfaces import TABLE, Members, Parameters, Refers, StateHolder, check, refuse_import
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import BASE

cpu.install()

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *(ROOT / "moc").rglob("*.py"),
    *(ROOT / "megatron/pretraining").rglob("*.py"),
    ROOT / "pretrain_gpt_moe.py",
    ROOT / "examples/pure_torch.py",
]
LIBRARIES = ("torch", "megatron.core", "megatron.training", "deepspeed")
NAMES = {name for entry in TABLE for name in entry.names}
ELSEWHERE = {"mocrun", "cpu", "megatron.training", "megatron.training on a CPU", "lightning", "torchtitan"}
"""Features that no flag selects: of the launcher, machines without CUDA, Megatron-LM's scripts, and other trainers."""

DOCUMENTED = {
    "torch.compile", "torch.nn.Module.cuda", "torch.Tensor.cuda", "torch.Tensor.to", "torch.Tensor.type",
    "torch.distributed.get_world_size", "torch.utils.deterministic.fill_uninitialized_memory",
    "torch.backends.mkldnn.enabled",
    *(f"torch.cuda.{name}" for name in (
        "Stream", "Event", "current_stream", "default_stream", "stream", "current_device", "nvtx.range_push",
        "nvtx.range_pop", "is_available", "device_count", "memory_stats", "get_device_capability",
        "get_device_properties", "set_stream", "Stream.cuda_stream",
    )),
}  # fmt: skip
"""Public functions and settings that the project assigns."""

STANDARD = set("_exit _getframe _args_from_interpreter_flags _exit_function _replace _asdict _fields".split()) | {
    "_action_groups", "_group_actions", "_actions", "_ArgumentGroup", "_option_string_actions", "_SubParsersAction",
}  # fmt: skip
"""Names with an underscore of Python's standard library."""


def test_installed_libraries_match_table():
    pytest.importorskip("deepspeed")
    importlib.import_module("megatron.pretraining.engine.zero.build").load()
    features = {entry.feature for entry in TABLE}
    if importlib.util.find_spec("transformer_engine") is None:
        features.remove("fp8 by Transformer Engine")
    features -= {name for name in ("lightning", "torchtitan") if importlib.util.find_spec(name) is None}
    if "moc.megatron" in sys.modules:  # it has checked these, and replaced some of them since
        features = {feature for feature in features if not feature.startswith("megatron.training")}
    assert [str(mismatch) for mismatch in check(features)] == []


@each_row("entry", TABLE, ids=lambda entry: f"{entry.target}-{entry.feature}")
def test_table_entry_names_file_that_uses_it(entry):
    text = (ROOT / entry.file).read_text()
    if isinstance(entry.expects, StateHolder):
        assert "state_holders()" in text  # which finds the entry in the table
        return
    assert any(re.search(rf"\b{name}\b", text) for name in entry.names), entry.names
    if isinstance(entry.expects, Members):
        unused = [name for name in entry.expects.names if not any(name in used.read_text() for used in FILES)]
        assert not unused


def test_flags_select_features_of_table():
    least = core.features(config_of_words(BASE.split(), None))
    assert least == {"training", "core optimizer", "experts", "expert biases", "mock data"}
    deepspeed = core.features(config_of_words([*BASE.split(), "--deepspeed"], None))
    assert deepspeed == least - {"core optimizer"} | {"deepspeed", "fragments"}
    source = Path(core.__file__).read_text()
    assert {entry.feature for entry in TABLE} == set(re.findall(r'^        "([^"]+)":', source, re.M)) | ELSEWHERE


def function(first, second, *, third=None):
    return first.read(second, third=NotImplemented)


class Kind:
    def __init__(self, value):
        self.value = value


@each_row(
    ("expects", "found", "problem"),
    [
        (Parameters(("first", "second")), function, None),
        (Parameters(("second", "first")), function, "takes (first, second, third) and not (second, first)"),
        (Parameters(("first",)), function, "takes the unknown parameter second"),
        (Parameters(("first", "second"), only=True), function, "takes the unknown parameter third"),
        (Parameters(("second", "third"), by_keyword=True), function, "takes the unknown parameter first"),
        (Parameters(()), 1, "is not a function"),
        (Parameters(("anything",)), dict, None),  # C functions have no signature
        (Members(("value",)), Kind, None),
        (Members(("value", "other")), Kind, "has no attribute other"),
        (Refers(("read", "third", "NotImplemented")), function, None),
        (Refers(("write",)), function, "does not use write"),
    ],
)
def test_expectation_detects_difference(expects, found, problem):
    assert expects.problem(found) == problem


def test_error_names_entry_release_and_remedy(monkeypatch):
    import torch.distributed.distributed_c10d as c10d

    monkeypatch.delattr(c10d, "_object_to_tensor")
    monkeypatch.setattr("torch.__version__", "3.0.1+cu140")
    entry = "torch.distributed.distributed_c10d._object_to_tensor", "moc/runtime/groups.py"
    with raises("release-unknown", "torch 3.0.1", *entry, "pip install 'torch>=2.11,<2.16'"):
        private_interfaces.require("mocrun")
    assert not check({"training", "snapshots"})


def test_missing_library_name_is_one_error():
    with raises("release-unknown", "'nothing'", "'torch'", "pip install"):
        with refuse_import():
            from torch import nothing  # noqa: F401
    with pytest.raises(ImportError), refuse_import():
        importlib.import_module("megatron.pretraining.nothing")


def test_supported_releases_match_package_metadata():
    declared = re.findall(r'"([a-z-]+)([><=.\d,]+)"', (ROOT / "pyproject.toml").read_text())
    wanted = {name: f"{name}{release}" for name, release in declared if name in private_interfaces.SUPPORTED}
    wanted.pop("torch")  # has no upper bound there
    assert wanted.items() <= private_interfaces.SUPPORTED.items()


# uses, by the source


class Uses(ast.NodeVisitor):
    """Collects the private uses in a file: ``found`` has the line and the name of each.

    Attributes:
        classes: names of classes with the paths of their bases in the libraries, and the methods that they define.
    """

    def __init__(self, tree):
        self.paths, self.found, self.classes, self.assigned = {}, [], [], []
        self._at_top = True
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.paths[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom):
                self.paths |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):  # names that stand for modules, such as ``torchs: Any = filesystem``
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                path = self.path(node.value)
                if isinstance(target, ast.Name) and path and target.id not in self.paths:
                    self.paths[target.id] = path
        self.visit(tree)

    def path(self, node) -> str | None:
        """The dotted path of an expression in one of the libraries."""
        if isinstance(node, ast.Name):
            path = self.paths.get(node.id)
            return path if path and f"{path}.".startswith(tuple(f"{name}." for name in LIBRARIES)) else None
        if isinstance(node, ast.Attribute) and (base := self.path(node.value)):
            return f"{base}.{node.attr}"
        return None

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_ImportFrom(self, node):
        for alias in node.names:
            self._take(node.lineno, f"{node.module}.{alias.name}")

    def visit_Import(self, node):
        for alias in node.names:
            self._take(node.lineno, alias.name)

    def visit_Attribute(self, node):
        path = self.path(node)
        if path is not None:
            self._take(node.lineno, path)
            if isinstance(node.ctx, ast.Store):
                self.assigned.append((node.lineno, path))
        elif _is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls"):
            self.found.append((node.lineno, node.attr))
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        bases = [path for base in node.bases if (path := self.path(base))]
        methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
        self.classes.append((node.lineno, bases, methods))
        self.generic_visit(node)

    def _take(self, line, path):
        private = [part for part in path.split(".") if _is_private(part)]
        if private and path.startswith(LIBRARIES):
            self.found.append((line, private[-1]))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def uses() -> dict[Path, Uses]:
    return {path: Uses(ast.parse(path.read_text())) for path in FILES}


@functools.cache
def ours() -> set[str]:
    """Names with an underscore that the project defines."""
    defined = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined |= {node.attr} if ast.unparse(node.value) == "self" else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    return defined


def test_each_private_name_is_in_table():
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, used in uses().items()
        for line, name in used.found
        if name not in NAMES | STANDARD | ours()
    ]
    assert not missing


def test_library_assignments_are_in_the_table():
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, used in uses().items()
        for line, name in used.assigned
        if name not in DOCUMENTED and not NAMES.intersection(name.split(".")[1:])
    ]
    assert not missing


def test_each_overridden_method_is_in_table():
    from torch import nn

    missing = []
    for path, used in uses().items():
        for line, bases, methods in used.classes:
            for base in bases:
                kind = getattr(importlib.import_module(base.rpartition(".")[0]), base.rpartition(".")[2])
                for name in methods:
                    there = None if hasattr(nn.Module, name) or hasattr(object, name) else getattr(kind, name, None)
                    documented = getattr(there, "__isabstractmethod__", False) or kind in INTERFACES
                    if there is not None and not documented and name not in NAMES:
                        missing.append(f"{path.relative_to(ROOT)}:{line}: {base}.{name}")
    assert not missing


@functools.cache
def _interfaces():
    import torch

    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    return (torch.autograd.Function, torch.optim.AdamW, torch.distributed.Store, checkpoint.LoadPlanner,
            checkpoint.DefaultSavePlanner, torch.distributed.Work)  # fmt: skip


INTERFACES = _interfaces()
"""Classes whose documentation asks for overridden methods."""


def test_use_without_entry_is_found():
    source = """
import torch.distributed as dist
from typing import Any
from torch.distributed import distributed_c10d as c10d
from megatron.core.transformer.moe import token_dispatcher
from torch._utils import _flatten
class Group(dist.ProcessGroup):
    def size(self): pass
module: Any = token_dispatcher
module.replaced = c10d._unknown(zero._hidden)
"""
    found = Uses(ast.parse(source))
    assert {name for _, name in found.found} == {"_flatten", "_unknown", "_hidden"}
    assert found.assigned == [(10, "megatron.core.transformer.moe.token_dispatcher.replaced")]
    assert found.classes == [(7, ["torch.distributed.ProcessGroup"], ["size"])]
