"""A worker's job: its rank, its connections to other workers, recovery from lost workers, and its position."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import (  # public, but not in __all__
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.distributed_c10d import PrefixStore

from moc.runtime import collectives, environment
from moc.runtime.collectives import broadcast_from_rank0

_LAUNCH_KEY = "moc/job"
"""Key of the launch's id, in a store that outlives workers."""


@dataclass(frozen=True)
class Interruption:
    """An interruption of training by a lost worker, as observed by one worker.

    Attributes:
        generation: generation that began with it.
        cause: a value of :class:`~moc.runtime.orders.Cause`, or the code of the error that ended a worker.
        reason: a sentence about the loss.
        lost: fields of the event about a lost worker or node, such as ``rank``, ``node`` and ``signal``.
        detection_s: seconds from the abort message until this worker had unwound.
        reconnection_s: seconds from then until all workers were reconnected.
    """

    generation: int
    cause: str
    reason: str
    lost: Mapping[str, Any]
    detection_s: float
    reconnection_s: float


class Job:
    """A job that ends when a worker is lost, as under torchrun: the launcher restarts all workers.

    Attributes:
        rank: rank of this worker.
        size: number of workers.
        max_nodes: largest number of nodes that the job may have.
        id: unique id of the launch, equal on all its workers; set by :meth:`connect`.
        term: controller epoch and generation; only grows within a launch, and differs between its worlds.
        recreate_groups: callback that creates the program's process groups again, in the original order, when the
            number of workers has changed; None if this process then cannot continue.
        nodes_per_model: nodes per copy of the program's model; must be set before :meth:`connect`.  When that returns,
            the workers outside partial-model nodes form complete copies.
        collectives_only: as in :class:`moc.runtime.groups.Groups`; must be set before :meth:`connect`.
        unbatched: as in :class:`moc.runtime.groups.Groups`; must be set before :meth:`connect`.
        partial_model_parts: model part of each partial-model node; these are the last nodes in rank order
            (:mod:`moc.runtime.seating`).
    """

    recreate_groups: Callable[[], None] | None = None
    nodes_per_model: int = 1
    collectives_only: Collection[str] = ()
    unbatched: Collection[str] = ()
    partial_model_parts: tuple[int, ...] = ()

    def __init__(self):
        self.rank, self.size, _ = environment.launcher_ranks()
        self.max_nodes = environment.node_limits()[1]
        self.id, self.term = "", (0, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def connect(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """Initializes ``torch.distributed`` with a backend, ``gloo`` or ``nccl``, and the timeout of a collective."""
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        device_id, store, new_id = device if backend == "nccl" else None, None, secrets.token_hex(8)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            # torchrun's store outlives workers, and still holds addresses of earlier attempts
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            server = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            self.id = server.compare_set(_LAUNCH_KEY, "", new_id).decode()
            store = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
        elif "WORLD_SIZE" not in os.environ:
            store = HashStore()  # without a launcher: no port that another program may use
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device_id
        )
        if backend != "gloo":
            collectives.set_host_group(dist.new_group(backend="gloo", timeout=timeout))
        if not self.id:  # no store outlives these workers, so they are the only ones of the launch
            self.id = broadcast_from_rank0(new_id)

    @property
    def may_change_members(self) -> bool:
        """Whether workers continue in the same processes when nodes are lost or join."""
        return self.recreate_groups is not None

    @property
    def joins_running_job(self) -> bool:
        """Whether this worker joins others that already train: as a replacement, or on a new node."""
        return False

    @property
    def is_restart(self) -> bool:
        """Whether earlier workers of this launch may have trained."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def report_ready(self) -> Interruption | None:
        """Reports that this worker is ready to train, and waits until all workers are.

        Returns:
            The interruption, if this worker replaces a lost one, or all workers were started again; otherwise None.
        """
        return None

    def rejoin_after(self, error: Exception) -> Interruption:
        """Waits until the job is complete again, if a lost worker caused the error; otherwise raises the error."""
        raise error

    @property
    def has_change_notice(self) -> bool:
        """Whether this worker has received a notice that joining workers are ready, or that nodes depart."""
        return False

    @property
    def departing(self) -> tuple[int, ...]:
        """Rank blocks of the departing nodes in that notice."""
        return ()

    def change_members(self, has_handed_over: bool = False) -> Interruption:
        """Leaves this generation between two iterations, and waits until all old and joining workers are connected.

        All workers call it after the same iteration, on which they agree in a commit all-reduce.  It does not return if
        this worker's node departs and its state has been moved to the others.
        """
        raise RuntimeError("only a job that continues in the same processes changes its members")

    def start_over(self) -> NoReturn:
        """Ends this process to be replaced; raises RuntimeError if the launcher replaces no workers."""
        raise RuntimeError("only a worker of a job that replaces workers can start over")

    def allow_memory_release(self, memory: Path) -> None:
        """Allows nodes to free the run's memory when the job ends, since storage has all of it.

        The path is equal on all nodes: :func:`moc.store.host_memory.memory_path_of_run`.
        """

    def leave(self) -> None:
        """Leaves the job after its work is done."""
        collectives.set_host_group(None)
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class World:
    """This worker's position in ``job``.  Ranks and sizes are as in torch.distributed and megatron-core.

    ``data_size`` counts the copies of the model that compute samples.  Other workers of a pipeline stage *help*: they
    have higher data-parallel ranks, and no samples.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    job: Job

    @classmethod
    def replicas(cls, job: Job, device: torch.device, backend: str = "gloo") -> World:
        """Returns the position of a worker that has a complete replica of the model."""
        return cls(
            rank=job.rank,
            size=job.size,
            device=device,
            backend=backend,
            tensor_rank=0,
            tensor_size=1,
            pipeline_rank=0,
            pipeline_size=1,
            data_rank=job.rank,
            data_size=job.size,
            job=job,
        )

    @property
    def is_partial_model(self) -> bool:
        """Whether this worker belongs to no complete copy of the model."""
        return self.data_rank >= self.data_size
