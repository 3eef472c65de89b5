"""Text of unknown origin, made safe for terminals and logs."""

from __future__ import annotations

import reprlib

_MAX_LENGTH = 80
_MAX_MESSAGE_LENGTH = 300
_REPR = reprlib.Repr(maxstring=_MAX_LENGTH, maxother=_MAX_LENGTH, maxlong=_MAX_LENGTH)
_ALLOWED_CONTROLS = "\n\t"


def escape_controls(text: object) -> str:
    """Escapes control and formatting characters, other than newline and tab, as in Python literals.

    A terminal therefore cannot interpret bytes of a file as commands.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(
        character if character.isprintable() or character in _ALLOWED_CONTROLS else _escape_character(character)
        for character in string
    )


def escape_line(text: object) -> str:
    """Like :func:`escape_controls`, with newlines escaped too, so that a name cannot add a line to the output."""
    return escape_controls(text).replace("\n", "\\n")


def short_repr(value: object) -> str:
    """Returns a value in a message: short, in ASCII, and without control characters."""
    return shorten(_REPR.repr(value).encode("ascii", "backslashreplace").decode())


def shorten(text: object) -> str:
    """Returns a text in a message, truncated if it is long."""
    string = str(text)
    return string if len(string) <= _MAX_LENGTH else f"{string[: _MAX_LENGTH - 3]}..."


def shorten_middle(text: str) -> str:
    """Returns the start and the end of a library's message, which may contain a long value or a long path."""
    return (
        text
        if len(text) <= _MAX_MESSAGE_LENGTH
        else f"{text[: _MAX_MESSAGE_LENGTH // 2]}...{text[-_MAX_MESSAGE_LENGTH // 2 :]}"
    )


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
