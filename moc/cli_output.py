"""Prints lines, tables, logs and progress bars, and replaces files atomically.

Foreign text, such as names and contents of files, is escaped.  Only this module writes to standard output and standard
error.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import logging
import math
import os
import secrets
import select
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from moc.errors import FIX, OTHER_OF_SYSTEM, UserError, code_of, codes_in, with_code
from moc.files.decode import escape_controls, escape_line
from moc.files.safe_directory import RefusedFileError, SafeDirectory, remove_owned

if TYPE_CHECKING:
    from rich.console import Console


class ToolError(UserError):
    """Error that ends a program with one sentence for the user and no traceback."""


_SIMILAR = 0.8
"""Minimum similarity, from 0 to 1, of a word to a suggested flag."""
_SHORTEST = 3
"""Letters of the shortest beginning of a flag that suggests it."""


def closest(word: str, spellings: Collection[str]) -> str | None:
    """Returns the spelling that a word probably means: the one that it begins, or the most similar one; or None."""
    ordered = sorted(
        spellings, key=lambda spelling: "_" not in spelling
    )  # the last of two with the same letters counts
    bare = {spelling.lstrip("-").replace("_", "-"): spelling for spelling in ordered}
    plain = word.lstrip("-").replace("_", "-")
    begun = [spelling for spelling in bare if len(plain) >= _SHORTEST and spelling.startswith(plain)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(plain, bare, n=1, cutoff=_SIMILAR)
    return bare[found[0]] if found else None


def unknown_flag(name: str, spellings: Collection[str]) -> ToolError:
    """Returns the error about a flag that does not exist, which names the one that is probably meant."""
    close = closest(name, spellings)
    remedy = f"write {close}, or drop it" if close else "drop it; --help lists the flags"
    return ToolError(f"{name} is not a flag. Fix: {remedy}", code="flag-unknown")


def unknown_word(word: str) -> ToolError:
    """Returns the error about a word that is neither a flag nor a flag's value."""
    return ToolError(f"{word!r} is the value of no flag. Fix: drop it", code="value-without-flag")


_REQUIRED = "arguments are required"
"""Words of argparse about missing arguments."""


class Parser(argparse.ArgumentParser):
    """Command line parser without abbreviations, which prints each mistake as one line."""

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any):
        super().__init__(*args, allow_abbrev=allow_abbrev, **kwargs)
        self._words: Sequence[str] = ()

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses as argparse, and refuses unknown words, each by a line that names the flag that is probably meant."""
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(*self._about_unknown(unknown))
        return values

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses as argparse, and remembers the words for messages."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str, *, code: str = "flag-invalid") -> NoReturn:
        """Prints the usage and the message, adds a remedy and a code if they are missing, and exits with code 2.

        Misspelled flags are printed before missing arguments, one of which may be misspelled.
        """
        misspelled = self._misspelled() if _REQUIRED in message else []
        if not codes_in(message):
            message = f"{message if FIX in message else f'{message}{FIX}{CORRECT_FLAGS}'} [{code}]"
        self._refuse(*self._about_unknown(misspelled), message)

    def _misspelled(self) -> list[str]:
        """Returns the words that are similar to flags, and are none."""
        names, known = [word.partition("=")[0] for word in self._words if word.startswith("--")], self._spellings()
        return [name for name in names if name not in known and closest(name, known)]

    def _spellings(self) -> Collection[str]:
        """Returns the flags of this parser and of its subcommands."""
        nested = (
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        )
        return {*self._option_string_actions}.union(*(parser._option_string_actions for parser in nested))

    def _about_unknown(self, words: Sequence[str]) -> list[str]:
        """Returns a sentence about each word that no flag takes; values of unknown flags are left out."""
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if flags:
            return [with_code(unknown_flag(name, self._spellings())) for name in dict.fromkeys(flags)]
        return [with_code(unknown_word(word)) for word in words]

    def _refuse(self, *messages: str) -> NoReturn:
        """Prints the usage and a line for each message, and exits with code 2."""
        self.print_usage(sys.stderr)
        print_lines(*(f"{self.prog}: error: {message}" for message in messages), error=True)
        self.exit(2)


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Returns an argument type that parses a number between limits; infinity and nan are refused."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return value

    return parse


REMEDIES = {
    "disk-full": "make room, or name a file in another file system",
    "file-missing": "correct the path",
    "memory-full": "free memory",
    "permission-denied": "correct the permissions, or name another file",
    "port-in-use": "choose another port, or end the process that has it",
    OTHER_OF_SYSTEM: "correct the path, or repair its file system",
}
"""Remedies by code of a system error."""

CORRECT_FLAGS = "correct the command line; --help lists the flags"
"""Remedy for a command line that the parser refuses."""


def print_lines(*lines: object, error: bool = False, flush: bool = False) -> None:
    """Prints lines; control and formatting characters in them, newlines included, are escaped.

    Lines of a job and of standard error are dropped if they cannot be written (a full disk), and end no worker.

    Args:
        lines: each is one line of output.
        error: print to standard error.
        flush: flush the stream, so that the lines of a job appear immediately.
    """
    stream = sys.stderr if error else sys.stdout
    with suppress(OSError) if error or flush else nullcontext():
        stream.write("".join(f"{escape_line(line)}\n" for line in lines))
        if flush:
            stream.flush()


@functools.cache
def print_once(text: str) -> None:
    """Prints a line to standard error, once per process and only in the first worker of a node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_lines(text, error=True, flush=True)


def print_json(value: Any) -> None:
    """Prints a value as indented JSON in printable ASCII."""
    print_lines(*json.dumps(value, indent=2).replace("\x7f", "\\u007f").split("\n"))


def refused(program: str, error: Exception, path: object = "") -> int:
    """Prints to stderr why a program ends; returns its exit status.  ``path`` is for an OSError that names no file.

    If the reader of standard output has ended, such as ``head``, nothing is printed.
    """
    if isinstance(error, BrokenPipeError) and _has_no_reader(_plain(sys.stdout)):
        return 1
    code = code_of(error)
    sentence = str(error)
    if isinstance(error, OSError):
        remedy = getattr(error, "remedy", REMEDIES.get(code, REMEDIES[OTHER_OF_SYSTEM]))
        cause = ": ".join(map(str, filter(None, (error.filename or path, error.strerror or error))))
        sentence = f"{cause}{FIX}{remedy}"
    print_lines(f"{program}: {sentence} [{code}]", error=True)
    return 1


def _has_no_reader(stream: TextIO) -> bool:
    """Returns whether the reader of a pipe has ended; later output to it is then discarded."""
    poll = select.poll()
    poll.register(stream, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())
    return True


def escapes_output[**P](main: Callable[P, int]) -> Callable[P, int]:
    """Makes a program's ``main`` also escape output of other code, such as argparse and libraries.

    Newlines are kept there.  An unhandled OSError ends the program with one sentence and code 1.  After another
    exception the streams stay replaced, so that its traceback is escaped.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (cast(TextIO, _Escaping(_plain(stream))) for stream in streams)
        try:
            result = main(*args, **kwargs)
        except OSError as error:
            result = refused(Path(sys.argv[0]).stem, error)
        sys.stdout, sys.stderr = streams
        return result

    return run


class _Escaping:
    """Text stream that escapes control and formatting characters, other than newline and tab."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _plain(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, _Escaping) else stream


def console(error: bool = False, width: int | None = None) -> Console:
    """Returns a console for tables and progress bars, with colours on a terminal; strings in them are escaped.

    Args:
        error: write to standard error.
        width: number of columns if the output is not a terminal.
    """
    from rich.console import Console
    from rich.text import Text

    class Escaping(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(escape_line(text), **how)

    stream = _plain(sys.stderr if error else sys.stdout)
    made = Escaping(file=stream, highlight=False, markup=False, emoji=False)
    if width is not None and not made.is_terminal:
        made.width = width
    return made


def log_to_stderr(level: int = logging.WARNING, program: str = "mocrun") -> None:
    """Sends log records to standard error, one line each, which starts with the name of the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"{program}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level, force=True)  # libraries such as absl may have set handlers


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return escape_controls(super().formatException(ei))


def print_traceback(error: BaseException) -> None:
    """Prints an exception and its traceback to standard error, as :func:`print_lines` does."""
    import traceback

    with suppress(OSError):
        sys.stderr.write(escape_controls("".join(traceback.format_exception(error))))


def check_output(path: str | os.PathLike[str]) -> None:
    """Raises OSError if no file can be created in the directory of ``path``; for use before long work."""
    remove_owned(Path(_created_beside(path)))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the path of a new file that replaces ``path`` on success; creates its directory.

    Its random name prevents planted links.

    Raises:
        RefusedFileError: ``path`` is a device, a FIFO, a directory, or a link to one: root could replace ``/dev/null``.
        OSError: the file cannot be written.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise RefusedFileError("it is not a regular file, so it is not replaced. Fix: name another file", path)
    partial = _created_beside(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        remove_owned(Path(partial))


def _created_beside(path: str | os.PathLike[str]) -> str:
    """Creates an empty file with a random name in the directory of ``path``, and that directory; returns its path."""
    partial = f"{os.fspath(path)}.{secrets.token_hex(8)}.partial"
    with SafeDirectory(Path(partial).absolute().parent).directory(creates=True):
        pass
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # a user knows no partial file
    return partial


def human(size: float) -> str:
    """Returns a readable number of bytes, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


def counted(number: int, what: str) -> str:
    """Returns a number and its noun, such as ``1 worker`` and ``2 workers``."""
    plural = what.removesuffix("y") + "ies" if what.endswith("y") else what + "s"
    return f"{number:,} {what if number == 1 else plural}"


@contextmanager
def progress(total: int, what: str = "") -> Iterator[Callable[[int], None]]:
    """Shows a progress bar of ``total`` bytes on a terminal; yields a function that advances it."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console(error=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
