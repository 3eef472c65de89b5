"""Assertions about errors by their codes, so that tests do not depend on the wording of messages."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moc.errors import code_of, codes_in


@contextmanager
def raises(code: str, *named: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error with this code, whose sentence contains each of ``named``, such as flags and files."""
    with pytest.raises(Exception) as caught:
        yield caught
    assert code_of(caught.value) == code, repr(caught.value)
    for name in named:
        assert name in str(caught.value)


def only_code(output: str) -> str:
    """The code in a program's output, which has exactly one."""
    codes = codes_in(output)
    assert len(codes) == 1, output
    return codes[0]
