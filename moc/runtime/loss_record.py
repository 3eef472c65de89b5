"""Records losses until an event describes them, since the workers may lose others before they have connected again."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moc.runtime.orders import GenerationReason, WorkerRecord

if TYPE_CHECKING:  # the controller does not import torch
    from moc.runtime.job import Interruption, Job

_FIELDS = ("rank", "node", "signal")


@dataclass(frozen=True)
class LossRecord:
    """Losses that the event log may lack: rank 0 writes an event only for a generation in which it has connected.

    A loss may remain here although it was written, if rank 0 is lost.  The next rank 0 then leaves it out.

    Attributes:
        losses: these losses, oldest first: ``generation``, ``cause`` and ``reason``, and ``rank``, ``node`` and
            ``signal`` if known.
        writer: name of the worker that has connected as rank 0 in the current generation; empty if none has.
    """

    losses: Sequence[Mapping[str, Any]] = ()
    writer: str = ""

    def after_connection(self, worker: WorkerRecord) -> LossRecord:
        """Returns the record after a worker has connected in the current generation."""
        return self if worker.rank else LossRecord(self.losses, worker.name)

    def before_generation(self, live: Container[str]) -> LossRecord:
        """Returns the losses that the next event has to describe; ``live`` has the names of the live workers."""
        return LossRecord() if self.writer in live else LossRecord(self.losses)

    def after_loss(self, generation: int, loss: GenerationReason) -> LossRecord:
        """Returns the record after a loss that has begun a generation, or has ended the job."""
        fields = {name: loss.lost[name] for name in _FIELDS if name in loss.lost}
        entry = {"generation": generation, "cause": str(loss.cause), "reason": loss.reason, **fields}
        return LossRecord((*self.losses, entry), self.writer)

    def to_message(self) -> dict[str, Any]:
        """Returns the field of messages and events that describes these losses; no field without any."""
        return {"earlier": list(self.losses)} if self.losses else {}


def generation_event(loss: Interruption, newest: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Returns the fields of the event ``generation`` about a loss, and about those before it that the log lacks.

    Args:
        loss: the interruption, as rank 0 observed it.
        newest: the newest event ``generation`` in the log; empty without one.
        job: the job, in the new generation.
    """
    lost = dict(loss.lost)
    earlier = unwritten(lost.pop("earlier", ()), newest, job.id)
    fields = {"generation": loss.generation, "cause": loss.cause, "reason": loss.reason, **lost}
    fields |= {"noticed_s": loss.detection_s, "met_s": loss.reconnection_s, "job": job.id, "term": job.term}
    return fields | ({"earlier": earlier} if earlier else {})


def unwritten(losses: Sequence[Mapping[str, Any]], newest: Mapping[str, Any], job: str) -> list[Mapping[str, Any]]:
    """Returns the losses of a job that its event log lacks; ``newest`` is the newest event ``generation`` in it."""
    newest_generation = newest.get("generation", -1) if newest.get("job") == job else -1
    return [loss for loss in losses if loss["generation"] > newest_generation]
