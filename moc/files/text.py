"""Text of unknown origin, made safe for terminals and logs."""

from __future__ import annotations

import functools
import os
import sys

_KEPT = "\n\t"


def printable(text: object) -> str:
    """A text whose control and formatting characters, other than newline and tab, are escaped as in Python literals.

    So no byte of a file reaches a terminal as a command.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(one if one.isprintable() or one in _KEPT else _escaped(one) for one in string)


@functools.cache
def print_once(text: str) -> None:
    """Prints a sentence to stderr, once, and for the first worker of a node only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(printable(text), file=sys.stderr, flush=True)


def shown(value: object) -> str:
    """A value in a message: short, in ASCII, and without control characters."""
    text = ascii(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
