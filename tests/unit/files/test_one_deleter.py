"""Programs delete files through moc.files.safe_directory alone."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [
    *(ROOT / "moc").rglob("*.py"),
    *(ROOT / "tools").rglob("*.py"),
    *(ROOT / "megatron/pretraining").rglob("*.py"),
    *ROOT.glob("*.py"),
]
DELETE = {"unlink", "remove", "removedirs", "rmdir", "rmtree"}
OF_MODULES = {"os", "shutil"}  # whose functions with these names delete files; `remove` is a method of many types
ALLOWED = {
    "moc/runtime/async_connections.py": "a server's own socket, from the event loop, which must not wait for fsync",
    "moc/runtime/connections.py": "the socket of a dead process, which has just refused a connection",
}


def deleting(text: str) -> list[int]:
    """The lines that refer to a function that deletes files."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in DELETE:
            of_module = isinstance(node.value, ast.Name) and node.value.id in OF_MODULES
            if of_module or node.attr != "remove":
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            lines += [node.lineno for alias in node.names if alias.name in DELETE]
        elif isinstance(node, ast.Import):  # under another name, the rule above would miss it
            lines += [node.lineno for alias in node.names if alias.name in OF_MODULES and alias.asname]
        elif isinstance(node, ast.Constant) and node.value in DELETE - {"remove"}:  # getattr, operator.methodcaller
            lines.append(node.lineno)
    return lines


def test_rule_detects_deleting_calls():
    for text in (
        "import os\nos.unlink('a')", "import os\nos.remove('a')", "import os\ncall = os.rmdir",
        "import shutil\nshutil.rmtree('a')", "path.unlink(missing_ok=True)", "path.parent.rmdir()",
        "from shutil import rmtree", "import os as system", "getattr(path, 'unlink')()",
    ):  # fmt: skip
        assert deleting(text), text
    assert not deleting("names.remove('a')\nplace.remove('b')\ntree.remove_owned(path)")


def test_deletions_occur_only_in_allowed_modules():
    found = {str(path.relative_to(ROOT)) for path in SOURCES if deleting(path.read_text())}
    assert {name for name in found if not name.startswith("moc/files/")} == set(ALLOWED)
