"""Writes the generated pages and the options of Megatron-LM: ``python -m megatron.pretraining.reference``.

The messages of all error codes are read from the source.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.entry.options import RELEASED, ParserOptions
from megatron.pretraining.entry.own_flags import PREFIX, own_sections
from moc import launch
from moc.cli_output import CORRECT_FLAGS, REMEDIES, print_lines, replacing
from moc.errors import UserError
from moc.events import EVENTS, EVERY
from moc.fault_points import POINTS

FIX = " Fix: "
"""Separates the cause from the remedy in a message."""


def messages(sources: list[Path]) -> dict[str, list[str]]:
    """Returns the messages of each code, with values replaced by their names in angle brackets.

    A call states the code as the keyword ``code``, or raises a class with a class attribute ``code``.
    A message without a remedy has the remedy of its class.
    A sentence that quotes another error and takes its code is not listed.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    code_of_class, remedies = _class_attributes(trees, "code"), _class_attributes(trees, "remedy")
    texts_by_code: dict[str, set[str]] = defaultdict(set)
    for code in {*code_of_class.values()} - {UserError.code}:
        texts_by_code[code]  # a code without a literal message is also listed
    for tree in trees:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            has_code = any(keyword.arg == "code" for keyword in call.keywords)
            for code in _codes_of(call) if has_code else [code_of_class.get(name)]:
                texts = {_with_remedy(text, remedies.get(name)) for text in filter(None, map(_message_text, call.args))}
                if code is not None and texts:
                    texts_by_code[code] |= texts
    return {code: sorted(texts) for code, texts in sorted(texts_by_code.items())}


def cause_and_remedy(message: str) -> tuple[str, str]:
    """Splits a message; the remedy is empty if the message states none."""
    cause, _, remedy = message.partition(FIX)
    return cause, remedy


def _with_remedy(message: str, remedy: str | None) -> str:
    return message if FIX in message or remedy is None else f"{message}.{FIX}{remedy}"


def _class_attributes(trees: list[ast.Module], attribute: str) -> dict[str, str]:
    """Returns a class attribute, such as the error code, by class name; subclasses inherit it."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def inherited_value(name: str) -> str | None:
        if (node := classes.get(name)) is None:
            return None
        for line in node.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = getattr(line, "value", None)
            if isinstance(target, ast.Name) and target.id == attribute and isinstance(value, ast.Constant):
                return value.value if isinstance(value.value, str) else None
        return next(filter(None, (inherited_value(base.id) for base in node.bases if isinstance(base, ast.Name))), None)

    value_of_class = {name: inherited_value(name) for name in classes if name != "UserError"}
    return {name: value for name, value in value_of_class.items() if value is not None}


def _codes_of(call: ast.Call) -> list[str]:
    return [
        word.value
        for keyword in call.keywords
        if keyword.arg == "code"
        for word in ast.walk(keyword.value)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]


def _message_text(node: ast.expr) -> str | None:
    """Returns the text of a literal message, or None for another expression."""
    parts = list(_message_parts(node))
    return " ".join("".join(map(str, parts)).split()) if parts and None not in parts else None


def _message_parts(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.Constant):
                yield str(value.value)
            elif isinstance(value, ast.FormattedValue):
                yield f"<{_value_name(value.value)}>"
    else:
        yield None


def _value_name(node: ast.expr) -> str:
    """Returns a short name of a value: the last identifier of its expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").replace("_", " ")
        case ast.Call(args=[first, *_]):
            return _value_name(first)
        case ast.Call(func=function):
            return _value_name(function)
        case ast.Subscript(value=value):
            return _value_name(value)
        case _:
            return "..."


ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m megatron.pretraining.reference"
_NOTE = f"<!-- Generated from the code by `{COMMAND}`; a test compares them. -->"


def pages() -> dict[str, str]:
    """Returns the text of each page by its path in the repository."""
    return {
        "docs/reference/flags.md": flags_page(),
        "docs/reference/events.md": events_page(),
        "docs/reference/errors.md": errors_page(),
    }


def flags_page() -> str:
    """Returns the page of flags of training and of the launcher, of the commands, and of the points of faults."""
    parts = [
        f"# Flags\n\n{_NOTE}\n",
        "`pretrain_gpt_moe.py` (`moc-pretrain`) and scripts of Megatron-LM have these flags in addition to\n"
        "Megatron-LM's own (`--help-all` lists both). The flags of [`mocrun`](#mocrun) and of the [other\n"
        "commands](#commands) follow. Underscores may replace dashes in a `--config` file. A switch has a second\n"
        "spelling that turns it off. A dash means: no default, or one that follows from other flags.\n",
    ]
    for title, description, actions in own_sections():
        parts += [f"## {title}\n", *([f"{description}\n"] if description else []), _flag_table(actions)]
    launcher_actions = [action for action in launch.build_parser()._actions if action.option_strings]
    parts += [
        "## mocrun\n",
        "`mocrun [flags] SCRIPT [arguments]`, or `python -m moc.launch`.\n",
        _flag_table(action for action in launcher_actions if action.dest not in ("help", "version")),
        "## Commands\n",
        "Each is a command of the installed package, and a file that runs without it. `--help` has its flags.\n",
        _table(("command", "file", ""), _commands()),
        "## Fault points\n",
        "Points of `--inject`, in the order of an iteration and of a recovery.\n",
        _table(("point", "position"), [(f"`{name}`", position) for name, position in POINTS.items()]),
    ]
    return "\n".join(parts)


def events_page() -> str:
    """Returns the page of event types and their fields."""
    parts = [
        f"# Events\n\n{_NOTE}\n",
        "`--log-dir` receives `events.jsonl`: one JSON object a line, written by rank 0 (`inject`: the worker hit).\n"
        "Numbers that JSON cannot hold (nan, inf) are null. The schema is `moc/events.py`. Every event has\n"
        + " and ".join(f"`{name}` ({text})" for name, text in EVERY.items())
        + ".\n",
    ]
    for name, event in EVENTS.items():
        rows = [(f"`{name}`", text) for name, text in event.fields.items()]
        rows += [(f"`{name}` (optional)", text) for name, text in event.optional.items()]
        rows += [("...", event.open)] if event.open else []
        parts += [f"## {name}\n", f"{event.when}\n", _table(("field", ""), rows)]
    return "\n".join(parts)


def released_options() -> str:
    """Returns the options of the installed Megatron-LM, as :mod:`.entry.options` keeps them."""
    importlib.import_module("moc.megatron")  # adapts megatron-core before others import it
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return ParserOptions.of(Path(arguments.__file__ or ""), parser).to_json()


def sources() -> list[Path]:
    """Returns the files of the repository whose errors reach users."""
    return [path for package in ("moc", "megatron", "tools") for path in sorted((ROOT / package).rglob("*.py"))]


def documented() -> dict[str, list[str]]:
    """Returns the messages of all errors by code: from the source, the operating system and the parsers."""
    texts_by_code = defaultdict(list, messages(sources()))
    for code, remedy in REMEDIES.items():
        texts_by_code[code].append(f"<file>: <message of the operating system>. Fix: {remedy}")
    texts_by_code["flag-invalid"].append(f"<message of the parser>. Fix: {CORRECT_FLAGS}")
    return dict(sorted(texts_by_code.items()))


def errors_page() -> str:
    """Returns the page of error codes with their messages, causes and remedies."""
    rows = [(f"`{code}`", *cause_and_remedy(text)) for code, texts in documented().items() for text in texts]
    return "\n".join(
        [
            f"# Errors\n\n{_NOTE}\n",
            "A program prints one sentence for an error, and its code in brackets. The code does not change between\n"
            "releases. Values of a message are in angle brackets here. The [exit code](exit-codes.md) is not 0.\n"
            "An exception of your own training script, such as of its model or its loss, keeps Python's traceback.\n"
            "One of an installed policy or of a sharding rule is a sentence, which names the line.\n",
            _table(("code", "cause", "remedy"), [[cell.replace("<", "&lt;") for cell in row] for row in rows]),
        ]
    )


def _flag_table(actions: Iterable[argparse.Action]) -> str:
    return _table(("flag", "default", ""), [_flag_row(action) for action in actions])


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    flag = all_flags().get(action.dest.removeprefix(PREFIX))
    dashed = [spelling for spelling in action.option_strings if "_" not in spelling]
    metavar = str(action.metavar or "") or ("" if action.nargs == 0 else action.dest.upper())
    if flag is not None and flag.nargs:
        metavar += " ..."
    names = ", ".join(f"`{f'{spelling} {metavar}'.strip()}`" for spelling in dashed)
    text = re.sub(r"\s*\(default: [^()]*(\([^()]*\))?[^()]*\)$", "", " ".join((action.help or "").split())).replace(
        "%%", "%"
    )
    default = action.default if flag is None else flag.default
    if isinstance(default, bool):
        default = ("on" if default else "off") if action.nargs == 0 and flag is not None else None
    return names, "-" if default in (None, argparse.SUPPRESS) else f"`{default}`", text


def _commands() -> list[tuple[str, str, str]]:
    """Returns name, file, and first line of the docstring of each console script."""
    scripts = re.findall(r'^([\w-]+) = "([\w.]+):main"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    tools = {path.read_text(encoding="utf-8"): path for path in (ROOT / "tools").glob("*.py")}
    files = {"moc.launch": "python -m moc.launch", "megatron.pretraining.pretrain_gpt_moe": "pretrain_gpt_moe.py"}
    for _, module in scripts:
        tool_names = (path.name for text, path in tools.items() if f"from {module} import main" in text)
        files.setdefault(module, f"tools/{next(tool_names, '')}")
    return [
        (f"`{name}`", f"`{files[module]}`", (importlib.import_module(module).__doc__ or "").split("\n")[0])
        for name, module in sorted(scripts)
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    """Writes all files; returns the exit code."""
    for name, text in (pages() | {str(RELEASED.relative_to(ROOT)): released_options()}).items():
        with replacing(ROOT / name) as path:
            Path(path).write_text(text, encoding="utf-8")
        print_lines(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
