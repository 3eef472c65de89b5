"""Finds the options that the source of a script names, without running it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_LARGEST = 4 << 20  # bytes of a source file
_MOST_FILES = 500
_KNOWN = ("megatron.core", "megatron.training", "megatron.pretraining", "moc", "torch")
"""Packages that add no options to a script's parser, apart from those in Megatron-LM's own."""
_OPTION = re.compile(r"--\S+|-[A-Za-z]")
_STANDARD = Path(os.__file__).parent


def options_in(script: Path, places: Sequence[Path]) -> frozenset[str] | None:
    """Finds strings that look like options in a script, and in modules that it imports from outside of packages.

    Args:
        script: path of the script.
        places: directories in which modules are looked for.

    Returns:
        The strings.  None if they cannot be determined: an option's name is computed, a provider of options is in an
        installed package, or unknown options are ignored.
    """
    own = [place for place in places if "site-packages" not in place.parts and place != _STANDARD]
    waiting, seen, found = [script], set(), set()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        if len(seen) == _MOST_FILES or file.stat().st_size > _LARGEST:
            return None
        seen.add(file)
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read(_LARGEST))
        except (SyntaxError, ValueError):
            return None
        foreign = set()
        for module, names in _imports(tree):
            if module.startswith(_KNOWN):
                continue
            files = [one for place in own for one in _files_of(place, module, names)]
            waiting += files
            if not files and any(_files_of(place, module, names) for place in places):
                foreign |= names  # a module that does not exist adds nothing
        if any(_is_computed(node, foreign) for node in ast.walk(tree)):
            return None
        found |= set(_options(tree))
    return frozenset(found)


def _imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yields imported modules, and the names by which the importing module knows them or their contents."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield one.name, {one.asname or one.name.partition(".")[0]}
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, {one.asname or one.name for one in node.names}


def _files_of(place: Path, module: str, names: set[str]) -> list[Path]:
    """Returns the files of a module and of its submodules that are imported by name."""
    path = place.joinpath(*module.split("."))
    candidates = [path.with_suffix(".py"), path / "__init__.py", *(path / f"{name}.py" for name in names)]
    return [file for file in candidates if file.is_file()]


def _options(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _OPTION.fullmatch(node.value):
            yield node.value


def _is_computed(node: ast.AST, foreign: set[str]) -> bool:
    """Returns whether a node adds or ignores options that the source does not name."""
    if not isinstance(node, ast.Call):
        return False
    if any(one.arg == "ignore_unknown_args" for one in node.keywords):
        return True
    if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        return not all(isinstance(one, ast.Constant) for one in node.args)
    providers = [one.value for one in node.keywords if one.arg == "extra_args_provider"]
    return any(isinstance(one, ast.Name) and one.id in foreign for value in providers for one in ast.walk(value))
