"""Programs open and decode files of checkpoints, logs and models through moc.files alone."""

import ast
from pathlib import Path

from tests.cases import each_row

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [
    path
    for directory in ("moc", "tools", "megatron/pretraining/convert", "megatron/pretraining/checkpoint")
    for path in (ROOT / directory).rglob("*.py")
    if not path.is_relative_to(ROOT / "moc/files")
]
READ = {"read_text", "read_bytes"}
OF_MODULES = {
    "json": {"load", "loads"},
    "yaml": {"load", "safe_load", "load_all", "safe_load_all", "unsafe_load", "full_load"},
    "numpy": {"load", "fromfile", "memmap", "loadtxt", "genfromtxt"},
    "np": {"load", "fromfile", "memmap", "loadtxt", "genfromtxt"},
    "torch": {"load"},
    "pickle": {"load", "loads", "Unpickler"},
    "tomllib": {"load", "loads"},
}
OPENED_SAFELY = (
    "SafeDirectory(",
    "_tree.open(",
    "_directory.open(",
    "os.open(",
    "descriptor",
    "self.open(",
    "opened",
    "reads",
)
ALLOWED = {
    "moc/runtime/child_processes.py": "/proc, and the pipe of a child",
    "moc/runtime/program.py": "the script that the user starts, and the pipe of a child",
    "moc/simulate/failures.py": "a trace in CSV, which the user names",
    "moc/store/ownership.py": "a file to lock, opened without following links",
    "moc/store/host_memory.py": "/proc",
    "megatron/pretraining/checkpoint/unpickling.py": "unpickles .metadata, with an allow-list of types",
    "megatron/pretraining/convert/hugging_face/conversions.py": "arrays that its own child has written",
    "megatron/pretraining/convert/hugging_face/megatron_logits.py": "an array that its own parent has written",
    "megatron/pretraining/convert/hugging_face/transformers_logits.py": "an array that its own parent has written",
}


def reading(text: str) -> list[int]:
    """The lines that read or decode a file in another way than moc.files does."""
    lines, tree = [], ast.parse(text)
    own = {one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in OF_MODULES.get(node.value.id, ()):
                lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in READ:
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            lines += [node.lineno for alias in node.names if alias.name in OF_MODULES[node.module]]
        elif isinstance(node, ast.Constant) and node.value in READ:  # getattr, operator.methodcaller
            lines.append(node.lineno)
        elif isinstance(node, ast.Call) and _opens_for_reading(node, own):
            lines.append(node.lineno)
    return lines


def _opens_for_reading(call: ast.Call, own: set[str]) -> bool:
    """Whether a call opens a path, other than a new file; a descriptor comes from moc.files or is a socket."""
    function = call.func
    if isinstance(function, ast.Name) and function.id == "open" and "open" not in own:
        opened, mode = call.args[0], call.args[1:2]
    elif isinstance(function, ast.Attribute) and function.attr == "open" and _is_path(function.value):
        opened, mode = function.value, call.args[:1]
    else:
        return False
    mode = mode or [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    text = mode[0].value if mode and isinstance(mode[0], ast.Constant) else "r"
    source = ast.unparse(opened)
    return not (set(str(text)) & set("wxa")) and not any(safe in source for safe in OPENED_SAFELY)


def _is_path(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[-1].removeprefix("_") in {"path", "file_path"} or "Path(" in ast.unparse(node)


@each_row(
    "text",
    [
        "path.read_text()", "(a / b).read_bytes()", "open(path).read()", "with open(path, 'rb') as file:\n    pass",
        "import json\njson.load(file)", "import json\nread = json.loads", "from json import loads",
        "import yaml\nyaml.safe_load(file)", "import numpy\nnumpy.load(path)", "import torch\ntorch.load(path)",
        "getattr(path, 'read_text')()", "path.open('rb')", "from pickle import load", "open(path, mode='r')",
    ],
)  # fmt: skip
def test_rule_detects_file_readers(text):
    assert reading(text)


@each_row(
    "text", ["open(SafeDirectory(a).open(b), 'rb')", "decode.parse(text)", "open(path, 'w')", "wire.open(address)"]
)
def test_rule_allows_reads_through_files_package(text):
    assert not reading(text)


def test_reads_occur_only_in_allowed_modules():
    found = {str(path.relative_to(ROOT)) for path in SOURCES if reading(path.read_text())}
    assert found == set(ALLOWED)
