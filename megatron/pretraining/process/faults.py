"""Has done to this worker what ``--inject`` wants."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.pretraining.config import Config, ConfigError, train_iterations
from moc.events import EventLog
from moc.faults import on_reach
from moc.runtime.inject import Injector
from moc.runtime.job import Job


def inject_faults(config: Config, job: Job) -> None:
    """Arms the faults that the flags name, if they name any.

    Raises:
        ConfigError: they name workers that there are not.
    """
    if not config.faults.wanted:
        return
    faults = config.faults.planned(job.size, train_iterations(config, job.size))
    for fault in faults:
        if max(fault.ranks, default=0) >= job.size:
            raise ConfigError(f"--inject {fault}: workers are counted from 0 to {job.size - 1}: name one of them.")
    assert config.logging.log_dir is not None  # flags of faults need it
    directory, node = Path(config.logging.log_dir), int(os.environ.get("GROUP_RANK", "0"))

    def tell(what: dict) -> None:
        events = EventLog(directory)  # of its own: that of the run is the first worker's
        events.write("inject", **what)  # a write that has returned outlives the process
        events.close()
        print("injected: {action} of worker {rank} in iteration {iteration}, {point}".format(**what), flush=True)

    on_reach(Injector(faults, job.rank, node, directory / "injected", tell).reached)
