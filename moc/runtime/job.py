"""What a worker's program knows of the job: who it is, how to reach the others, and what to do when one is lost."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__
from torch.distributed.distributed_c10d import PrefixStore

_JOB = "moc/job"
"""Key of the launch's id, in a store that outlives workers."""


@dataclass(frozen=True)
class Interruption:
    """What a worker has lived through.

    Attributes:
        generation: that began with it.
        reason: what was lost, and how.
        noticed_s: seconds from the news to when this worker had left what it was in.
        met_s: seconds from then until all were there again, and connected.
    """

    generation: int
    reason: str
    noticed_s: float
    met_s: float


class Job:
    """One that ends when a worker is lost, as under torchrun: its launcher starts all of them again.

    Attributes:
        rank: of this worker.
        size: number of workers.
        id: of the launch, once it is connected; the same for all its workers, and another for every launch.
        term: controller epoch and generation; it only grows within a launch, and no two worlds of it have the same.
    """

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.id, self.term = "", (0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def connect(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """Makes ``torch.distributed`` work.

        Args:
            backend: ``gloo`` or ``nccl``.
            timeout: for each collective.
            device: of this worker.
        """
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        device_id, store, mine = device if backend == "nccl" else None, None, secrets.token_hex(8)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            # torchrun's store outlives workers, and has the addresses of those that it started before
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            server = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            self.id = server.compare_set(_JOB, "", mine).decode()
            store = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device_id
        )
        if not self.id:  # nobody outlives these workers, so this is all of the launch
            told = [mine]
            dist.broadcast_object_list(told, src=0)
            self.id = told[0]

    def built(self) -> Interruption | None:
        """This worker has what it needs to train, and waits until all have; returns at once when they have.

        Returns:
            What was lost, if this worker has taken its place just now.
        """
        return None

    def go_on_after(self, error: Exception) -> Interruption:
        """Returns when the job is whole again, if the error comes of a lost worker.

        Raises:
            Exception: the error, if it does not.
        """
        raise error

    def start_over(self) -> NoReturn:
        """Ends this process; another one takes its place."""
        raise RuntimeError("only a worker of a job that replaces workers can start over")

    def gives_back(self, memory: Path) -> None:
        """All is in storage: at the job's end nodes may remove what the run has in their memory, as far as it is known.

        Args:
            memory: of the run, as all nodes call it (:func:`moc.store.tiers.memory_of_run`).
        """

    def leave(self) -> None:
        """The work is done."""
        dist.destroy_process_group()
