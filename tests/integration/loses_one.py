"""The program of two workers: the second one is killed once, and its replacement adds a number to that of the first."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from moc import join_job


def main() -> None:
    """Joins the job, loses a worker, and prints the sum."""
    job = join_job()
    job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
    job.report_ready()
    if job.rank == 1 and not job.is_restart:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        number = torch.ones(1)
        try:
            dist.all_reduce(number)
            break
        except RuntimeError as error:
            job.rejoin_after(error)
    assert job.id and job._groups._object_scope(None)[0] == job.id  # seals of objects name the job
    print(f"sum {number.item():g}", flush=True)
    job.leave()


if __name__ == "__main__":
    main()
