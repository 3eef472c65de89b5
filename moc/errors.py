"""Errors that a user can correct: each has a stable code, which ``docs/reference/errors.md`` explains.

The sentence has the form *what failed: cause. Fix: action.* Programs print the code in brackets after it.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable

_WITH_CODE = re.compile(r"(?s)(.+) \[([a-z0-9]+(?:-[a-z0-9]+)+)\]")

FIX = ". Fix: "
"""Separates what failed and its cause from the remedy."""

OF_SYSTEM = {
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EROFS: "permission-denied",
    errno.EACCES: "permission-denied",
    errno.EPERM: "permission-denied",
    errno.ENOENT: "file-missing",
    errno.EADDRINUSE: "port-in-use",
    errno.ENOMEM: "memory-full",
}
"""Codes of errors of the operating system."""

OTHER_OF_SYSTEM = "system-call-failed"
"""Code of its other errors."""


class UserError(Exception):
    """An error that a flag, a file, another process or the environment causes; subclasses name its kind.

    Args:
        sentence: the failure, the cause and the remedy.  If another process sends it with its code, as
            :func:`with_code` writes it, the error has this code.
        code: stable identifier of the error; None for the one of the class.
    """

    code: str = "internal-error"
    remedy: str = ""
    """Of errors of the class whose sentence states none."""

    def __init__(self, sentence: str = "", *, code: str | None = None):
        if sent := _WITH_CODE.fullmatch(sentence):
            sentence, code = sent.groups()
        if sentence and self.remedy and FIX not in sentence:
            sentence += FIX + self.remedy
        super().__init__(sentence)
        if code is not None:
            self.code = code


def code_of(error: BaseException) -> str:
    """The code of an error; ``internal-error`` unless it is a ``UserError`` or an error of the operating system."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code
    if isinstance(error, OSError):
        return OF_SYSTEM.get(error.errno or 0, OTHER_OF_SYSTEM)
    return UserError.code


def with_code(error: BaseException) -> str:
    """The sentence of an error and its code in brackets, as programs print them and send them to each other."""
    return f"{error} [{code_of(error)}]"


def warning(sentence: str, *, code: str) -> str:
    """The line that reports an error that does not end the program."""
    return f"WARNING: {sentence} [{code}]"


def cause_of(error: object) -> str:
    """The sentence of an error, or of one that another process sends, without remedy and code, to be quoted as a cause.

    An error of the operating system is described without its number.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    sent = _WITH_CODE.fullmatch(str(error))
    return (sent[1] if sent else str(error)).partition(FIX)[0]


def raised(error: BaseException, function: Callable) -> str:
    """An exception of a function that a user has written: type, text, and the last line that ran in its file."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f", raised at {file}:{lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def codes_in(text: str) -> list[str]:
    """The codes that a program has printed, in order."""
    return re.findall(r" \[([a-z0-9]+(?:-[a-z0-9]+)+)\]$", text, re.MULTILINE)
