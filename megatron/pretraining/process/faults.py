"""Arms the faults of ``--inject`` in this worker."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.pretraining.config import Config, check_faults, train_iterations
from moc.cli_output import print_lines
from moc.events import EventLog
from moc.fault_points import on_reach
from moc.runtime.fault_injection import Injector
from moc.runtime.job import Job


def inject_faults(config: Config, job: Job) -> None:
    """Arms the faults that the flags name; raises ConfigError if they name workers that do not exist."""
    if not config.faults.is_enabled:
        return
    faults = config.faults.planned(job.size, train_iterations(config, job.size))
    check_faults(faults, job.size)
    assert config.logging.log_dir is not None  # required by the fault flags
    directory, node = Path(config.logging.log_dir), int(os.environ.get("GROUP_RANK", "0"))

    def record(event: dict) -> None:
        events = EventLog(directory)  # opened here, since rank 0 owns the run's event log
        events.write("inject", **event)  # a completed write survives the process
        events.close()
        print_lines("injected: {action} of worker {rank} in iteration {iteration}, {point}".format(**event), flush=True)

    on_reach(Injector(faults, job.rank, node, directory / "injected", record).reached)
