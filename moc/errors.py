"""Defines errors that a user can correct; ``docs/reference/errors.md`` explains their stable codes.

The sentence has the form *what failed: cause. Fix: action.* Programs print the code in brackets after it.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable

_WITH_CODE = re.compile(r"(?s)(.+) \[([a-z0-9]+(?:-[a-z0-9]+)+)\]")

FIX = ". Fix: "
"""Separator between the failure with its cause and the remedy."""

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
"""Codes of system errors by number."""

OTHER_OF_SYSTEM = "system-call-failed"
"""Code of other system errors."""


class UserError(Exception):
    """Error that a flag, a file, another process or the environment causes; subclasses name its kind.

    Args:
        sentence: failure, cause and remedy.  If it ends with a code, as :func:`with_code` writes it, the error has this
            code.
        code: stable identifier of the error; None for the code of the class.
    """

    code: str = "internal-error"
    remedy: str = ""
    """Remedy for errors of the class whose sentence has none."""

    def __init__(self, sentence: str = "", *, code: str | None = None):
        if sent := _WITH_CODE.fullmatch(sentence):
            sentence, code = sent.groups()
        if sentence and self.remedy and FIX not in sentence:
            sentence += FIX + self.remedy
        super().__init__(sentence)
        if code is not None:
            self.code = code


def code_of(error: BaseException) -> str:
    """Returns the code of an error; ``internal-error`` unless it has one or is an OSError."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code
    if isinstance(error, OSError):
        return OF_SYSTEM.get(error.errno or 0, OTHER_OF_SYSTEM)
    return UserError.code


def with_code(error: BaseException) -> str:
    """Returns the sentence of an error and its code in brackets, as programs print and send it."""
    return f"{error} [{code_of(error)}]"


def warning(sentence: str, *, code: str) -> str:
    """Returns the line that reports an error that does not end the program."""
    return f"WARNING: {sentence} [{code}]"


def cause_of(error: object) -> str:
    """Returns the sentence of an error, without remedy and code, to be quoted as a cause.

    The error may be a sentence from another process.  An OSError is described without its number.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    sent = _WITH_CODE.fullmatch(str(error))
    return (sent[1] if sent else str(error)).partition(FIX)[0]


def raised(error: BaseException, function: Callable) -> str:
    """Describes an exception of a user's function: type, text, and the last line that ran in its file."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f", raised at {file}:{lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def codes_in(text: str) -> list[str]:
    """Returns the codes in a program's output, in order."""
    return re.findall(r" \[([a-z0-9]+(?:-[a-z0-9]+)+)\]$", text, re.MULTILINE)
