"""The options of Megatron-LM's parser and of a script, kept in a file.

So a launcher can parse them without importing either.  The package has the options of the release that it supports
(``options.json``).  Those of any other Megatron-LM are written to the user's cache by the first start that imports it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import enum
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from megatron.pretraining.entry.own_flags import Switch
from moc.files import decode
from moc.files.safe_directory import MAX_CONFIG_BYTES, RefusedFileError, SafeDirectory

RELEASED = Path(__file__).with_name("options.json")
"""ParserOptions of the release of megatron-core that `pyproject.toml` requires."""
_SOURCE = "megatron/training/arguments.py"
_KINDS: dict[str, Any] = {"int": int, "float": float}
_MAX_CACHE_BYTES = 8 * MAX_CONFIG_BYTES


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a parser.

    Attributes:
        spellings: option strings.
        name: name of its value.
        nargs: as in argparse; 0 for a switch.
        kind: type of the value: ``int``, ``float``, or any other text.
        choices: allowed values; None if all are allowed.
        members: text of each member of an enumeration, by name, if the value is one.
        off: spellings that turn a switch off.
        default: value without the option; None if it has no value in JSON.
    """

    spellings: tuple[str, ...]
    name: str
    nargs: int | str | None = None
    kind: str = ""
    choices: tuple[int | float | str, ...] | None = None
    members: dict[str, str] | None = None
    off: tuple[str, ...] = ()
    default: Any = None

    @classmethod
    def of(cls, action: argparse.Action) -> Option:
        """Returns the description of an action of a parser."""
        is_plain, choices = action.type in (None, str, *_KINDS.values()), list(action.choices or ())
        members = {member.name: str(member) for member in choices if isinstance(member, enum.Enum)} or None
        off: tuple[str, ...] = ()
        if isinstance(action, argparse.BooleanOptionalAction):
            off = tuple(spelling for spelling in action.option_strings if spelling.startswith("--no-"))
        elif action.nargs == 0 and not action.const:
            off = tuple(action.option_strings)
        return cls(
            tuple(action.option_strings),
            action.dest,
            action.nargs,
            getattr(action.type, "__name__", "") if is_plain else "",
            tuple(choices if is_plain else members.values() if members else ()) or None,
            members,
            off,
            action.default if isinstance(action.default, (bool, int, float, str, list)) else None,
        )

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the option to a parser."""
        arguments: dict[str, Any] = dict(dest=self.name, default=self.default)
        if self.nargs == 0:
            parser.add_argument(*self.spellings, action=Switch, off=self.off, **arguments)
        else:
            kind = self.members.__getitem__ if self.members else _KINDS.get(self.kind)
            arguments |= dict(nargs=self.nargs, type=kind, choices=self.choices)
            parser.add_argument(*self.spellings, **arguments)


def parser_of(options: Iterable[Option], of_script: Collection[str]) -> argparse.ArgumentParser:
    """Returns a parser of Megatron-LM's options and of a script's, which may have any values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        if not {*of_script}.isdisjoint(option.spellings):
            option = dataclasses.replace(option, kind="", choices=None, members=None)
        option.add_to(parser)
    for spelling in sorted({*of_script} - parser._option_string_actions.keys()):
        parser.add_argument(spelling, nargs="*")
    return parser


def _file(source: Path) -> Path:
    """Returns the file for the parser in a source file; another version of the source has another file."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    status = source.stat()
    identity = f"{source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return base / "moc" / f"parser-{xxhash.xxh3_64_hexdigest(identity.encode())}.json"


@dataclasses.dataclass(frozen=True)
class ParserOptions:
    """The options that a source file adds to a parser.

    Attributes:
        source: xxh3 hash of the file's content.
        options: the options.
    """

    source: str
    options: tuple[Option, ...]

    @classmethod
    def of(cls, source: Path, parser: argparse.ArgumentParser) -> ParserOptions:
        """Returns the options of a parser that is built by a source file."""
        return cls(
            xxhash.xxh3_64_hexdigest(source.read_bytes()), tuple(Option.of(action) for action in parser._actions)
        )

    def to_json(self) -> str:
        """Returns the options as JSON, one on a line, without values that are the defaults of :class:`Option`."""
        unset = {field.name: field.default for field in dataclasses.fields(Option)}
        lines = (
            json.dumps({name: value for name, value in dataclasses.asdict(option).items() if value != unset[name]})
            for option in self.options
        )
        return f'{{"source": "{self.source}", "options": [\n{",\n".join(lines)}\n]}}\n'


def remember(source: str | Path, parser: argparse.ArgumentParser) -> None:
    """Keeps the options of a parser, unless they are kept already or cannot be."""
    with contextlib.suppress(OSError, RuntimeError):  # no home directory
        file = _file(Path(source))
        if not file.exists() and not _released(Path(source)):
            SafeDirectory(file.parent).write(file.name, [ParserOptions.of(Path(source), parser).to_json().encode()])


def _released(source: Path) -> tuple[Option, ...]:
    """Returns the options in the package if they match a source file, otherwise nothing."""
    known = decode.decode(RELEASED.read_bytes(), ParserOptions)
    return known.options if known.source == xxhash.xxh3_64_hexdigest(source.read_bytes()) else ()


def remembered(search_path: Sequence[Path]) -> tuple[Option, ...]:
    """Returns the options of Megatron-LM at the first of these paths that has it; empty if unknown."""
    source = next((directory / _SOURCE for directory in search_path if (directory / _SOURCE).is_file()), None)
    if source is not None:
        with contextlib.suppress(OSError, RuntimeError, ValueError, RefusedFileError):
            if known := _released(source):
                return known
            file = _file(source)
            return decode.decode(SafeDirectory(file.parent).read(file.name, _MAX_CACHE_BYTES), ParserOptions).options
    return ()


_MAX_SOURCE_BYTES = 4 << 20  # bytes of a source file
_MAX_FILES = 500
_KNOWN_PACKAGES = ("megatron.core", "megatron.training", "megatron.pretraining", "moc", "torch")
"""Packages that add no options to a script's parser, apart from those in Megatron-LM's own."""
_OPTION = re.compile(r"--\S+|-[A-Za-z]")
_STANDARD = Path(os.__file__).parent


def options_in(script: Path, search_path: Sequence[Path]) -> frozenset[str] | None:
    """Finds strings that look like options in a script, and in modules that it imports from outside of packages.

    Returns:
        The strings.  None if they cannot be determined: an option's name is computed, a provider of options is in an
        installed package, or unknown options are ignored.
    """
    source_directories = [
        directory for directory in search_path if "site-packages" not in directory.parts and directory != _STANDARD
    ]
    pending, seen, spellings = [script], set(), set()
    while pending:
        file = pending.pop()
        if file in seen or not file.is_file():
            continue
        if len(seen) == _MAX_FILES or file.stat().st_size > _MAX_SOURCE_BYTES:
            return None
        seen.add(file)
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read(_MAX_SOURCE_BYTES))
        except (SyntaxError, ValueError):
            return None
        foreign = set()
        for module, names in _imports(tree):
            if module.startswith(_KNOWN_PACKAGES):
                continue
            files = [path for directory in source_directories for path in _files_of(directory, module, names)]
            pending += files
            if not files and any(_files_of(directory, module, names) for directory in search_path):
                foreign |= names  # a module that does not exist adds nothing
        if any(_is_computed(node, foreign) for node in ast.walk(tree)):
            return None
        spellings |= set(_options(tree))
    return frozenset(spellings)


def _imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yields imported modules, and their names, or their contents' names, in the importing module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, {alias.asname or alias.name.partition(".")[0]}
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, {alias.asname or alias.name for alias in node.names}


def _files_of(directory: Path, module: str, names: set[str]) -> list[Path]:
    """Returns the files of a module and of its submodules that are imported by name."""
    path = directory.joinpath(*module.split("."))
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
    if any(keyword.arg == "ignore_unknown_args" for keyword in node.keywords):
        return True
    if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        return not all(isinstance(argument, ast.Constant) for argument in node.args)
    providers = [keyword.value for keyword in node.keywords if keyword.arg == "extra_args_provider"]
    return any(isinstance(name, ast.Name) and name.id in foreign for value in providers for name in ast.walk(value))
