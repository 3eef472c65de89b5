"""A table of cases in one test: cheaper than a test for each row, with the same checks.

    @each_row(("text", "size"), [("", 0), ("ab", 2)])
    def test_size_matches_text(text, size): ...

Use it for functions that compute something.  A test that starts a process stays a test of its own, with
``pytest.mark.parametrize``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence

import pytest


def each_row(names: str | Sequence[str], rows: Iterable, *, ids: Callable | Iterable[str] | None = None) -> Callable:
    """Runs a test for each row, also after a row that fails; the failure contains the errors of all rows that fail.

    Each row has its own ``tmp_path`` and ``monkeypatch``, an empty ``capsys``, ``capfd`` and ``caplog``. Rows share
    all other fixtures.

    Args:
        names: the arguments that a row has, as in ``pytest.mark.parametrize``.
        rows: tuples of values, or the values of a single argument.
        ids: text of each value in a failure, or a function that returns it; as in ``pytest.mark.parametrize``.

    Raises:
        ValueError: there are no rows: the test would check nothing.
    """
    arguments = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else [*names]
    single = isinstance(names, str) and "," not in names
    table = [(row,) if single else tuple(row) for row in rows]
    if not table:
        raise ValueError("a table needs a row")
    listed = None if ids is None or callable(ids) else list(ids)
    if listed is not None and len(listed) != len(table):
        raise ValueError(f"{len(table)} rows have {len(listed)} names")

    def label(number: int) -> str:
        if listed is not None:
            return str(listed[number])
        texts = [ids(value) if callable(ids) else None for value in table[number]]
        given = [repr(value) if text is None else text for text, value in zip(texts, table[number], strict=True)]
        return ", ".join(f"{name}={text}" for name, text in zip(arguments, given, strict=True))

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run_rows(**fixtures):
            failures, skips = [], []
            for number, row in enumerate(table):
                values = dict(zip(arguments, row, strict=True))
                try:
                    with pytest.MonkeyPatch.context() as monkeypatch:
                        test(**values, **_fresh(fixtures, number, monkeypatch))
                except pytest.skip.Exception as skip:
                    skips.append(str(skip))
                except (Exception, SystemExit, pytest.fail.Exception) as failure:
                    if str(failure).startswith("Timeout"):  # of pytest-timeout: no further row would have a limit
                        raise
                    failure.add_note(f"row {number}: {label(number)}")
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows fail", failures)
            if len(skips) == len(table):
                pytest.skip(skips[0])

        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run_rows.__signature__ = signature.replace(parameters=kept)
        return run_rows

    return decorate


def _fresh(fixtures: dict, number: int, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The fixtures of a row, as pytest makes them for a test of its own."""
    made = dict(fixtures)
    if "tmp_path" in made:
        made["tmp_path"] = made["tmp_path"] / str(number)
        made["tmp_path"].mkdir()
    if "monkeypatch" in made:
        made["monkeypatch"] = monkeypatch
    for name in ("capsys", "capfd"):
        if name in made:
            made[name].readouterr()
    if "caplog" in made:
        made["caplog"].clear()
    return made
