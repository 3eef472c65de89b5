"""What Megatron-LM's checks of arguments leave to its loop: limits of numbers, and what a run cannot start without."""

from __future__ import annotations

from typing import Any

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry.configuration import values_of_megatron

_DATA = (
    "mock_data", "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
    "per_split_data_args_path",
)  # fmt: skip
"""Arguments that name data, of which this project's program needs one."""


def check_limits(arguments: Any) -> None:
    """Raises ``ConfigError`` with all of Megatron-LM's numbers that are outside the limits of the flags.

    Megatron-LM divides by some of them, in its checks or later in a worker.
    """
    problems = Problems()
    for flag, value in values_of_megatron(arguments):
        if value is not None:  # what is missing, Megatron-LM reports
            problems.check(flag.check, value)
    problems.raise_found()


def check_run(arguments: Any) -> None:
    """Raises ``ConfigError`` if this project's program has no data, or no number of iterations."""
    problems = Problems()
    problems.refuse(
        not any(getattr(arguments, name) for name in _DATA),
        "no data are given. Fix: add --data-path, --train-data-path or --mock-data",
        code="flag-missing",
    )
    problems.check(check_length, arguments)
    problems.raise_found()


def check_length(arguments: Any) -> None:
    """Raises ``ConfigError`` if the length of the run is not given; Megatron-LM counts samples with it in any case."""
    problems = Problems()
    problems.refuse(
        arguments.train_iters is None and arguments.train_samples is None,
        "--train-iters is missing. Fix: give it, or --train-samples",
        code="flag-missing",
    )
    problems.raise_found()
