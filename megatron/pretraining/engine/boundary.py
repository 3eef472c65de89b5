"""Replaces megatron-core's pipeline communicator to time, log or replay the traffic between stages.

The schedules send all traffic between stages through the method ``_communicate`` of one object.  They fix the order of
its calls (:mod:`moc.logs.log`), so a counter identifies each tensor.  This holds for the 1F1B and the
interleaved schedule, with batched and unbatched messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from moc.logs.log import Crossing, Direction, Pipeline

Sink = Callable[[Crossing, torch.Tensor], None]
"""Receives a tensor that a stage sends, on its device; the tensor may be freed after the call."""

Source = Callable[[Crossing], torch.Tensor]
"""Returns a tensor that a stage receives, on any device; the caller must not modify it."""

Waiting = Callable[[], AbstractContextManager]
"""Returns the context of a wait for another stage."""


def pipeline_of(core_config: TransformerConfig, num_micro_batches: int) -> Pipeline:
    """Returns the schedule's order of computation; requires initialized process groups."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = core_config.virtual_pipeline_model_parallel_size or 1
    table = get_schedule_table(num_micro_batches, chunks, core_config.microbatch_group_size_per_vp_stage)
    return Pipeline(stages, tuple(table))


def schedule_groups() -> ProcessGroupCollection:
    """Returns the process groups that a schedule requires with a custom communicator; same as its defaults."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"])


class NoNeighbours(P2PCommunicator):
    """Communicator of a worker outside any complete pipeline: drops sends, receives zeros."""

    def __init__(self, core_config: TransformerConfig):
        pipeline_group: Any = parallel_state.get_pipeline_model_parallel_group()  # its type may also be a list
        super().__init__(pipeline_group, core_config)
        self._core_config = core_config

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        activation = self._zeros(tensor_shape) if recv_prev else None
        gradient = self._zeros(tensor_shape) if recv_next else None
        return activation, gradient, None

    def _zeros(self, shape) -> torch.Tensor:
        return torch.zeros(
            tuple(shape), dtype=self._core_config.pipeline_dtype, device=torch.cuda.current_device(), requires_grad=True
        )


class TimedCommunicator(P2PCommunicator):
    """Communicator whose ``waiting`` provides a context for each wait for another stage."""

    def __init__(self, core_config: TransformerConfig, waiting: Waiting = contextlib.nullcontext):
        pipeline_group: Any = parallel_state.get_pipeline_model_parallel_group()  # its type may also be a list
        super().__init__(pipeline_group, core_config)
        self._waiting, self._group, self._core_config = waiting, pipeline_group, core_config

    def _communicate(self, *, wait_on_reqs=True, **message):
        communicate: Any = super()._communicate  # annotated to return two values, returns three
        if wait_on_reqs:
            with self._waiting():
                return communicate(**message)
        activation, gradient, requests = communicate(wait_on_reqs=False, **message)
        return activation, gradient, {name: _Request(request, self._waiting) for name, request in requests.items()}


class Recorder(TimedCommunicator):
    """Communicator that first passes every tensor that this stage sends to a sink, for one iteration."""

    def __init__(
        self,
        core_config: TransformerConfig,
        pipeline: Pipeline,
        sink: Sink,
        waiting: Waiting = contextlib.nullcontext,
    ):
        super().__init__(core_config, waiting)
        self._sending = _Sending(pipeline, self._group.rank(), sink)

    def _communicate(self, *, tensor_send_next, tensor_send_prev, **receiving):
        self._sending(tensor_send_next, tensor_send_prev)
        return super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **receiving)


class LogPlayer(Recorder):
    """Recorder for the replay of some stages; a source provides the tensors of all other stages.

    It does not communicate with other stages, which may be absent (MoEvement, section 3.4).  The replaying ``stages``
    (default: only this stage) communicate with each other as in training.
    """

    def __init__(
        self,
        core_config: TransformerConfig,
        pipeline: Pipeline,
        sink: Sink,
        source: Source,
        stages: Collection[int] | None = None,
    ):
        super().__init__(core_config, pipeline, sink)
        stage = self._group.rank()
        senders = {direction: pipeline.sender(stage, direction) for direction in Direction}
        # a stage receives activations from the previous stage, and gradients from the next
        self._with_previous, self._with_next = (sender in (stages or ()) for sender in senders.values())
        self._source = source
        self._next = {direction: iter(pipeline.received_by(stage, direction)) for direction in Direction}

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        directions = {
            "send_next": tensor_send_next is not None,
            "send_prev": tensor_send_prev is not None,
            "recv_prev": recv_prev,
            "recv_next": recv_next,
        }
        self._sending(tensor_send_next, tensor_send_prev)
        communicate: Any = P2PCommunicator._communicate  # annotated to return two values, returns three
        activation, gradient, requests = communicate(
            self,
            tensor_send_next=tensor_send_next if self._with_next else None,
            tensor_send_prev=tensor_send_prev if self._with_previous else None,
            recv_prev=recv_prev and self._with_previous,
            recv_next=recv_next and self._with_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=wait_on_reqs,
        )
        if recv_prev and not self._with_previous:
            activation = self._receive(Direction.FORWARD, tensor_shape)
        if recv_next and not self._with_next:
            gradient = self._receive(Direction.BACKWARD, tensor_shape)
        if wait_on_reqs:
            return activation, gradient, None
        # the schedule expects one request per message
        completed = {name: _Done() for name, is_used in directions.items() if is_used}
        return activation, gradient, completed | dict(requests or {})

    def _receive(self, direction: Direction, shape) -> torch.Tensor:
        logged = self._source(next(self._next[direction]))
        received = torch.empty(
            tuple(shape), dtype=self._core_config.pipeline_dtype, device=torch.cuda.current_device(), requires_grad=True
        )
        if logged.shape != received.shape or logged.dtype != received.dtype:
            raise ValueError(
                f"a log of {tuple(logged.shape)} {logged.dtype} is not what this stage receives, "
                f"{tuple(received.shape)} {received.dtype}: it is of another layout"
            )
        with torch.no_grad():
            return received.copy_(logged)


class _Sending:
    """Identifies each tensor that a stage sends, and passes it to the sink."""

    def __init__(self, pipeline: Pipeline, stage: int, sink: Sink):
        self._forward: Iterator[Crossing] = iter(pipeline.sent_by(stage, Direction.FORWARD))
        self._backward: Iterator[Crossing] = iter(pipeline.sent_by(stage, Direction.BACKWARD))
        self._sink = sink

    def __call__(self, to_next: torch.Tensor | None, to_previous: torch.Tensor | None) -> None:
        if to_next is not None:
            self._sink(next(self._forward), to_next.detach())
        if to_previous is not None:
            self._sink(next(self._backward), to_previous.detach())


class _Request:
    """Request whose wait has a context."""

    def __init__(self, request: Any, waiting: Waiting):
        self._request, self._waiting = request, waiting

    def wait(self) -> None:
        """Returns when the message has been sent or received."""
        with self._waiting():
            self._request.wait()


class _Done:
    """Completed request."""

    def wait(self) -> None:
        """Returns immediately."""
