"""Text of unknown origin, made safe for terminals and logs."""

from __future__ import annotations

import reprlib

_LONGEST = 80
_LONGEST_MESSAGE = 300
_SHORT = reprlib.Repr(maxstring=_LONGEST, maxother=_LONGEST, maxlong=_LONGEST)
_KEPT = "\n\t"


def printable(text: object) -> str:
    """A text whose control and formatting characters, other than newline and tab, are escaped as in Python literals.

    So no byte of a file reaches a terminal as a command.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(one if one.isprintable() or one in _KEPT else _escaped(one) for one in string)


def one_line(text: object) -> str:
    """As :func:`printable`, with newlines escaped too: a name that contains one cannot add a line to the output."""
    return printable(text).replace("\n", "\\n")


def shown(value: object) -> str:
    """A value in a message: short, in ASCII, and without control characters."""
    return short(_SHORT.repr(value).encode("ascii", "backslashreplace").decode())


def short(text: object) -> str:
    """A text in a message, without its end if it is long."""
    string = str(text)
    return string if len(string) <= _LONGEST else f"{string[: _LONGEST - 3]}..."


def without_middle(text: str) -> str:
    """A message of a library, which may contain a long value or a long path: its begin and its end."""
    return (
        text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE // 2]}...{text[-_LONGEST_MESSAGE // 2 :]}"
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
