"""Text of unknown origin, made safe for terminals and logs."""

from __future__ import annotations

import reprlib

_LONGEST = 80
_LONGEST_MESSAGE = 300
_SHORT = reprlib.Repr(maxstring=_LONGEST, maxother=_LONGEST, maxlong=_LONGEST)
_KEPT = "\n\t"


def printable(text: object) -> str:
    """Escapes control and formatting characters, other than newline and tab, as in Python literals.

    A terminal therefore cannot interpret bytes of a file as commands.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(one if one.isprintable() or one in _KEPT else _escaped(one) for one in string)


def one_line(text: object) -> str:
    """Like :func:`printable`, with newlines escaped too, so that a name cannot add a line to the output."""
    return printable(text).replace("\n", "\\n")


def shown(value: object) -> str:
    """Returns a value in a message: short, in ASCII, and without control characters."""
    return short(_SHORT.repr(value).encode("ascii", "backslashreplace").decode())


def short(text: object) -> str:
    """Returns a text in a message, truncated if it is long."""
    string = str(text)
    return string if len(string) <= _LONGEST else f"{string[: _LONGEST - 3]}..."


def without_middle(text: str) -> str:
    """Returns the start and the end of a library's message, which may contain a long value or a long path."""
    return (
        text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE // 2]}...{text[-_LONGEST_MESSAGE // 2 :]}"
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
