"""A table of cases in one test finds what a test for each row finds."""

import os

import pytest

from tests.cases import each_row


def test_every_failing_row_is_named_and_later_rows_run():
    seen = []

    @each_row(("number", "text"), [(1, "a"), (2, "b"), (3, "c"), (4, "d")], ids=["one", "two", "three", "four"])
    def check(number, text):
        seen.append(text)
        if number == 2:
            pytest.fail("it is even")
        with pytest.raises(ValueError):
            if number != 3:
                raise ValueError

    with pytest.raises(BaseExceptionGroup) as failed:
        check()
    assert seen == ["a", "b", "c", "d"]
    assert [error.__notes__ for error in failed.value.exceptions] == [["row 1: two"], ["row 2: three"]]


@each_row("number", [0, 1])
@each_row("name", ["A", "B"])
def test_rows_have_separate_directory_and_environment(number, name, tmp_path, monkeypatch, capsys):
    assert not [*tmp_path.iterdir()] and "MOC_TESTS_ROW" not in os.environ and not capsys.readouterr().out
    (tmp_path / name).touch()
    monkeypatch.setenv("MOC_TESTS_ROW", name)
    print(number)


def test_skipped_row_hides_no_other_row():
    @each_row("number", [1, 2])
    def check(number, least):
        if number < least:
            pytest.skip("too small")
        assert number == 1

    with pytest.raises(pytest.skip.Exception):
        check(least=3)
    with pytest.raises(ExceptionGroup):
        check(least=2)


def test_table_without_rows_is_refused():
    with pytest.raises(ValueError):
        each_row("number", [])


def test_no_row_runs_after_time_limit():
    seen = []

    @each_row("number", [1, 2])
    def check(number):
        seen.append(number)
        pytest.fail("Timeout (>600.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception):
        check()
    assert seen == [1]
