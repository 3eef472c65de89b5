"""Directories that a run writes to, checked before it trains: a run that cannot save would lose its work at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.pretraining.config import Config, ConfigError
from moc.runtime.job import Job
from moc.session.tiers import LOOKING_S
from moc.snapshot.background import within


def check_outputs(config: Config, job: Job) -> None:
    """Creates the directories that the flags name, on the first worker of a launch that begins.

    Later, and in directories that do not answer in time, failures to write are reported and do not end training.

    Raises:
        ConfigError: nothing can be created in one of them.
    """
    if job.rank or job.others_wait or job.has_begun_before:
        return
    for flag, directory in _outputs(config):
        if problem := within(LOOKING_S, _problem, Path(directory)):
            raise ConfigError(
                f"{flag} {directory} cannot be written ({problem}): correct the path or its permissions, or choose "
                "another directory."
            )


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
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)
