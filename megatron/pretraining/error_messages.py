"""Reads the messages of all error codes from the source, for ``docs/reference/errors.md``."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from moc.errors import UserError

FIX = " Fix: "
"""Separates the cause from the remedy in a message."""


def messages(sources: list[Path]) -> dict[str, list[str]]:
    """Returns the messages of each code, with values replaced by their names in angle brackets.

    A call states the code as the keyword ``code``, or raises a class with a class attribute ``code``.
    A message without a remedy has the remedy of its class.
    A sentence that quotes another error and takes its code is not listed.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    of_class, remedies = _of_classes(trees, "code"), _of_classes(trees, "remedy")
    found: dict[str, set[str]] = defaultdict(set)
    for code in {*of_class.values()} - {UserError.code}:
        found[code]  # a code without a literal message is also listed
    for tree in trees:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            for code in _stated(call) if _has_code(call) else [of_class.get(name)]:
                texts = {_with_remedy(text, remedies.get(name)) for text in filter(None, map(_text, call.args))}
                if code is not None and texts:
                    found[code] |= texts
    return {code: sorted(texts) for code, texts in sorted(found.items())}


def cause_and_remedy(message: str) -> tuple[str, str]:
    """Splits a message; the remedy is empty if the message states none."""
    cause, _, remedy = message.partition(FIX)
    return cause, remedy


def _with_remedy(message: str, remedy: str | None) -> str:
    return message if FIX in message or remedy is None else f"{message}.{FIX}{remedy}"


def _of_classes(trees: list[ast.Module], attribute: str) -> dict[str, str]:
    """Returns a class attribute, such as the error code, by class name; subclasses inherit it."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def found_in(name: str) -> str | None:
        if (node := classes.get(name)) is None:
            return None
        for line in node.body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = getattr(line, "value", None)
            if isinstance(target, ast.Name) and target.id == attribute and isinstance(value, ast.Constant):
                return value.value if isinstance(value.value, str) else None
        return next(filter(None, (found_in(base.id) for base in node.bases if isinstance(base, ast.Name))), None)

    of_class = {name: found_in(name) for name in classes if name != "UserError"}
    return {name: found for name, found in of_class.items() if found is not None}


def _has_code(call: ast.Call) -> bool:
    return any(keyword.arg == "code" for keyword in call.keywords)


def _stated(call: ast.Call) -> list[str]:
    return [
        word.value
        for keyword in call.keywords
        if keyword.arg == "code"
        for word in ast.walk(keyword.value)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]


def _text(node: ast.expr) -> str | None:
    """Returns the text of a literal message, or None for another expression."""
    parts = list(_parts(node))
    return " ".join("".join(map(str, parts)).split()) if parts and None not in parts else None


def _parts(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if isinstance(value, ast.Constant):
                yield str(value.value)
            elif isinstance(value, ast.FormattedValue):
                yield f"<{_name(value.value)}>"
    else:
        yield None


def _name(node: ast.expr) -> str:
    """Returns a short name of a value: the last identifier of its expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").replace("_", " ")
        case ast.Call(args=[first, *_]):
            return _name(first)
        case ast.Call(func=function):
            return _name(function)
        case ast.Subscript(value=value):
            return _name(value)
        case _:
            return "..."
