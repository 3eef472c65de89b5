"""Implements stage boundaries: plain or timed communication, or MoEvement's upstream logging (section 3.4).

With upstream logging, each stage keeps the activations and gradients that it sends in the memory of its node.  A stage
replays an iteration from its neighbours' logs while all others wait.  Schedule, model and the reductions among its
peers are the same as in training, so its gradients are bit-identical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

from megatron.pretraining.config import Config
from megatron.pretraining.engine.boundary import LogPlayer, Recorder, TimedCommunicator, pipeline_of
from megatron.pretraining.process.topology import Topology
from moc.logs.log import Crossing, Direction, LogEntry, LogReader, LogWriter, log_directory
from moc.policy import SnapshotPlan
from moc.runtime.collectives import first_reported
from moc.session.engine import PipelineTap
from moc.store.errors import CheckpointError, MissingTensorError


class UpstreamTap(PipelineTap):
    """Boundaries of this worker's stage; the base class logs nothing.

    ``has_partial_pipelines`` states whether the stage has workers outside complete pipelines.
    """

    def __init__(self, core_config: TransformerConfig, has_partial_pipelines: bool = False):
        self._core_config, self._has_partial_pipelines = core_config, has_partial_pipelines

    @contextlib.contextmanager
    def crossed(self, iteration: int) -> Iterator[P2PCommunicator | None]:
        """Wraps forward and backward of an iteration (from 1); yields a communicator, None for the default."""
        with self.computing():
            yield None if self.bubbles is None else TimedCommunicator(self._core_config, self.waiting)

    def reduce(
        self, chunks: list[DistributedDataParallel], tokens: torch.Tensor | None, total_tokens: int | None
    ) -> None:
        """Reduces the gradients of an iteration.

        ``tokens`` divides this rank's gradients, or is None if they are already averaged; in a replay, ``total_tokens``
        is the number of tokens of all ranks.
        """
        finalize_model_grads([*chunks], tokens)
        send_tied_gradients(chunks, self._has_partial_pipelines)


@dataclass
class LogMemory:
    """Memory of this worker's upstream logs, which the next generation reuses.

    Attributes:
        writer: writer that owns the memory; None before the first generation.
        directory: directory of its logs.
    """

    writer: LogWriter | None = None
    directory: Path | None = None


class UpstreamLog(UpstreamTap):
    """Logs the tensors that this worker sends to other stages; methods as in :class:`UpstreamTap`."""

    def __init__(
        self,
        config: Config,
        core_config: TransformerConfig,
        topology: Topology,
        report: Callable[[str], None],
        memory: LogMemory,
    ):
        super().__init__(core_config)
        self._config, self._world, self._report, self._memory = config, topology.world, report, memory
        self._pipeline = pipeline_of(core_config, len(topology.micro_batches))
        self._limit = config.snapshot.upstream_log_limit * 1e9
        self._dropped_iterations = 0.0
        self._replaying: frozenset[int] = frozenset()

    def open(self, memory: Path) -> None:
        """Takes over the log of an earlier process of this rank, or continues its own from an earlier generation."""
        stage, directory, log_memory = self._world.pipeline_rank, log_directory(memory, self._world.rank), self._memory
        if log_memory.writer is not None:
            if log_memory.directory == directory and directory.is_dir():
                self._dropped_iterations = log_memory.writer.dropped_iterations  # already reported
                return
            log_memory.writer.close()
            log_memory.writer = None
        crossings = [crossing for direction in Direction for crossing in self._pipeline.sent_by(stage, direction)]
        shape, dtype = boundary_shape(self._config), compute_dtype(self._config)
        log_memory.directory = directory
        log_memory.writer = LogWriter(
            directory,
            [LogEntry(crossing.key, shape, dtype) for crossing in crossings],
            self._limit,
            self._world.device,
            name="upstream log",
            limit_remedy="raise --upstream-log-limit",
            alternative="drop --upstream-logging",
        )

    def bytes_for(self, iterations: int) -> int:
        return self._log.bytes_for(iterations)

    def reserve(self, iterations: int) -> None:
        self._log.reserve(iterations)

    @property
    def feeds(self) -> dict[int, frozenset[int]]:
        return {stage: self._pipeline.senders(stage) for stage in range(self._pipeline.stages)}

    @contextlib.contextmanager
    def crossed(self, iteration: int) -> Iterator[Recorder]:
        """Wraps an iteration as in :class:`UpstreamTap`; a replayed iteration is logged again."""
        self._log.begin(iteration)
        tap = self._core_config, self._pipeline, lambda crossing, tensor: self._log.write(crossing.key, tensor)
        with self.computing():
            if self._replaying:
                yield LogPlayer(*tap, self._received().__getitem__, self._replaying)
            else:
                yield Recorder(*tap, self.waiting)
        self._log.end()

    def reduce(
        self, chunks: list[DistributedDataParallel], tokens: torch.Tensor | None, total_tokens: int | None
    ) -> None:
        if not self._replaying:
            super().reduce(chunks, tokens, total_tokens)
            return
        finalize_model_grads([*chunks], None)  # communicates with other stages only for tied embeddings and tokens
        if tokens is not None and total_tokens:  # only the last stage counts tokens; the step record has the total
            for chunk in chunks:
                scale: Any = 1.0 / torch.full_like(tokens, total_tokens)  # annotated as float; receives a tensor
                chunk.scale_gradients(scale)

    @contextlib.contextmanager
    def replaying(self, stages: Collection[int]) -> Iterator[None]:
        self._replaying = frozenset(stages)
        try:
            yield
        finally:
            self._replaying = frozenset()

    def kept(self) -> list[int]:
        return self._reader().iterations()

    def damaged(self, served: Mapping[int, Collection[int]]) -> list[int]:
        return [iteration for iteration, stages in served.items() if self._is_damaged(iteration, stages)]

    def _is_damaged(self, iteration: int, stages: Collection[int]) -> bool:
        try:
            for _ in self._sent_to(iteration, stages):
                pass
        except MissingTensorError:
            return True
        return False

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends one message per stage and direction."""
        sends = []
        for stage, tensors in self._sent_to(iteration, stages):
            packed = torch.stack(tensors).to(self._world.device)
            sends.append((dist.isend(packed, _rank_in(stage), _pipeline_group()), packed))
        for request, _ in sends:
            request.wait()

    def _sent_to(self, iteration: int, stages: Collection[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        reader, pipeline = self._reader(), self._pipeline
        for stage in sorted(stages):
            for direction in Direction:
                crossings = pipeline.received_by(stage, direction)
                if crossings and pipeline.sender(stage, direction) == self._world.pipeline_rank:
                    yield stage, [reader.read(iteration, crossing.key) for crossing in crossings]

    def _received(self) -> dict[Crossing, torch.Tensor]:
        """Receives the tensors that other stages :meth:`serve` to this worker, on its device."""
        received, receives, stage = {}, [], self._world.pipeline_rank
        for direction in Direction:
            crossings, sender = self._pipeline.received_by(stage, direction), self._pipeline.sender(stage, direction)
            if crossings and sender not in self._replaying:
                shape = (len(crossings), *boundary_shape(self._config))
                packed = torch.empty(shape, dtype=compute_dtype(self._config), device=self._world.device)
                receives.append(dist.irecv(packed, _rank_in(sender), _pipeline_group()))
                received |= zip(crossings, packed, strict=True)
        for request in receives:
            request.wait()
        return received

    def contribution(self) -> dict[str, float]:
        return {
            "upstream_failed": float(self._log.failure() is not None),
            "upstream_bytes": float(self._log.bytes),
            "upstream_iterations": float(len(self._log.iterations)),
            "upstream_given_up": float(self._log.dropped_iterations),
        }

    def on_totals(self, totals: Mapping[str, float]) -> None:
        """Handles the totals of the commit all-reduce, see :class:`UpstreamTap`."""
        if totals["upstream_failed"]:
            raise CheckpointError(first_reported(self._log.failure()))
        if totals["upstream_given_up"] and not self._dropped_iterations:
            self._report(
                "upstream logs are full, so the oldest iterations are dropped, and a recovery that needs them will be "
                "a replay by all stages: raise --upstream-log-limit, or shorten --sparse-window"
            )
        self._dropped_iterations = totals["upstream_given_up"]
        self.gauges = {
            "upstream_log_bytes": totals["upstream_bytes"],
            "upstream_log_iterations": totals["upstream_iterations"] / self._world.size,
        }

    def on_stored(self, plan: SnapshotPlan) -> None:
        """Drops superseded logs: after a window's last snapshot, all from before its first iteration."""
        if plan.ends_window:
            assert plan.since is not None  # the window's first iteration
            self._log.collect(before=plan.since + 1)

    def close(self) -> None:
        """Pauses the log, see :class:`UpstreamTap`; the next generation reuses its memory."""
        if self._memory.writer is not None:
            self._memory.writer.pause()

    def delete(self) -> None:
        self._log.delete()

    @property
    def _log(self) -> LogWriter:
        assert self._memory.writer is not None  # open() was called
        return self._memory.writer

    def _reader(self) -> LogReader:
        assert self._memory.directory is not None  # open() was called
        return LogReader(self._memory.directory)


def boundaries(
    config: Config,
    core_config: TransformerConfig,
    topology: Topology,
    report: Callable[[str], None],
    memory: LogMemory,
) -> UpstreamTap:
    """Returns the boundaries that the flags select: :class:`UpstreamLog` or :class:`UpstreamTap`."""
    if config.snapshot.upstream_logging:
        return UpstreamLog(config, core_config, topology, report, memory)
    data_size = parallel_state.get_data_parallel_world_size()
    return UpstreamTap(core_config, has_partial_pipelines=data_size > topology.world.data_size)


def send_tied_gradients(chunks: list[DistributedDataParallel], has_partial_pipelines: bool) -> None:
    """Sends the gradient of a weight shared by the first and last stage to workers outside complete pipelines.

    Workers of complete pipelines already have its sum over both stages.
    """
    if not has_partial_pipelines:
        return
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if getattr(parameter, "shared_embedding", False):
            tied: Any = parameter
            dist.broadcast(tied.main_grad, dist.get_global_rank(group, 0), group)


def _pipeline_group() -> dist.ProcessGroup:
    group: Any = parallel_state.get_pipeline_model_parallel_group()  # its type may also be a list
    return group


def _rank_in(stage: int) -> int:
    """Returns the global rank of a stage's worker in this worker's pipeline group."""
    return dist.get_global_rank(_pipeline_group(), stage)


def boundary_shape(config: Config) -> tuple[int, int, int]:
    """Returns the shape of a tensor between stages: sequence (of this tensor-parallel rank), micro batch, hidden."""
    parallel = config.parallel
    parts = parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return config.data.seq_length // parts, config.training.micro_batch_size, config.network.hidden_size


def compute_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of the compute weights and of the tensors between pipeline stages."""
    precision = config.mixed_precision
    return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32
