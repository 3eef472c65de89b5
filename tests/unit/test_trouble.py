"""What fails again and again: tried ever more seldom, and told ever more seldom."""

import pytest

from moc.background import Harmless, Trouble


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_retry_pauses_double_and_end_after_success():
    clock = Clock()
    trouble = Trouble(clock)
    assert not trouble and not trouble.rests
    told = []
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        told.append(trouble.failed())
        clock.now += pause - 0.1
        assert trouble.rests
        clock.now += 0.2
        assert not trouble.rests
    assert told == [True, False, False, False, False, False, True, False]  # after 60 seconds once more
    assert round(trouble.over()) == 184 and not trouble and trouble.count == 8
    assert trouble.failed()  # another one is told at once


def test_intermittent_failures_are_reported_once_a_minute():
    clock = Clock()
    trouble, told = Trouble(clock), []
    for clock.now in range(0, 200, 4):
        if trouble.failed():
            told.append(clock.now)
        assert trouble.warned == (clock.now in told)
        trouble.over()
    assert told == [0, 60, 120, 180]
    assert trouble.count == 50


def test_later_failure_is_reported_at_once():
    clock = Clock()
    trouble = Trouble(clock)
    assert trouble.failed()
    trouble.over()
    clock.now = 61
    assert trouble.failed()


def test_programming_errors_are_printed_once_and_harmless():
    said = []
    harmless = Harmless(said.append, "REPORT", "EFFECT")
    for error in (KeyError(12), ZeroDivisionError("x / 0"), TypeError("None")):
        with harmless():
            raise error
    assert len(said) == 1 and all(part in said[0] for part in ("REPORT", "KeyError: 12", "EFFECT"))
    for error in (RuntimeError("a worker is lost"), OSError(28, "no space"), KeyboardInterrupt()):
        with pytest.raises(type(error)), harmless():
            raise error
