"""Directories that a run writes to, checked before it trains: a run that cannot save would lose its work at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.pretraining.config import Config
from megatron.pretraining.config.flag import Problems
from moc.snapshot.background import within

if TYPE_CHECKING:
    from moc.runtime.job import Job

_ANSWERS_S = 3.0  # of a directory; one that takes longer is not waited for
_BLOCK = 1 << 16  # bytes written, for which there must be space


def check_outputs(config: Config, job: Job) -> None:
    """Creates the directories that the flags name, on the first worker of a launch that begins.

    Later, and in directories that do not answer in time, failures to write are reported and do not end training.

    Raises:
        ConfigError: nothing can be written in some of them.
    """
    if not (job.rank or job.others_wait or job.has_begun_before):
        check_directories(config)


def check_directories(config: Config) -> None:
    """Creates the directories that the flags name; raises ConfigError if nothing can be written in some of them."""
    problems = Problems()
    for flag, directory in _outputs(config):
        problem = within(_ANSWERS_S, _problem, Path(directory))
        problems.refuse(
            problem,
            f"{flag} {directory} cannot be written: {problem}. Fix: correct the path, its permissions or its free "
            "space, or choose another directory",
            code="output-not-writable",
        )
    problems.raise_found()


def _outputs(config: Config) -> Iterator[tuple[str, str]]:
    """Flags that name a directory of this machine, and the directories."""
    named = {
        "--save": config.checkpoint.save,
        "--log-dir": config.logging.log_dir,
        "--tensorboard-dir": config.logging.tensorboard_dir,
        "--data-cache-path": config.data.data_cache_path,
    }
    yield from ((flag, directory) for flag, directory in named.items() if directory)


def _problem(directory: Path) -> str | None:
    """Why no file can be created in a directory; None if one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            return None
    except OSError as error:
        return error.strerror or str(error)
