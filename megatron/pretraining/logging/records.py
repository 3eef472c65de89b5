"""Records the events and the computed FLOPs of a run identically for the logs of this program and of Megatron-LM."""

from __future__ import annotations

import math
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from megatron.pretraining.config import Config
from moc.background import Harmless
from moc.cli_output import print_lines
from moc.events import EventLog, event_directory
from moc.runtime.flags import MonitorFlags
from moc.runtime.job import World
from moc.runtime.monitor_process import serve_events
from moc.state.record import StepRecord


def print_rank_0(world: World, *lines: str) -> None:
    """Prints lines on rank 0 and flushes."""
    if world.rank == 0:
        print_lines(*lines, flush=True)


class EventRecorder(ABC):
    """Writes ``events.jsonl`` on rank 0; all workers call every method except :meth:`was_evaluated` and :meth:`has`."""

    def __init__(self, config: Config, world: World):
        self._config, self._world = config, world
        self._last = time.perf_counter()
        self._monitor: subprocess.Popen | None = None
        self._harmless = Harmless(self.message, "a report of training", "training continues")
        self._open()

    def _open(self) -> None:
        directory = event_directory(self._config.logging.log_dir) if self._world.rank == 0 else None
        self.events = EventLog(directory, self.message, self._plot_event)
        logging = self._config.logging
        if directory is not None and (logging.metrics_port, logging.dashboard_port) != (None, None):
            self._monitor = serve_events(directory, MonitorFlags(logging.metrics_port, logging.dashboard_port))
        self._reported: int | None = None  # by this worker, since it opened the files
        self._evaluated: int | None = None  # same

    def move(self, world: World) -> None:
        """Reports another generation; the files move with rank 0."""
        first, self._world = self._world.rank == 0, world
        if first != (world.rank == 0):
            self._close_events()
            self._open()

    def iteration(self, record: StepRecord, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        """Reports a completed iteration, with further ``gauges`` to plot."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        gauges = {**gauges, **self._measure(record, elapsed)}
        self._write(record, consumed_samples, elapsed, gauges)
        self._show(record, consumed_samples, elapsed, gauges)

    @abstractmethod
    def _plot_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Plots an event; each worker calls this."""

    def _measure(self, record: StepRecord, elapsed: float) -> dict[str, float]:
        """Returns gauges of an iteration that took ``elapsed`` seconds."""
        return {}

    @abstractmethod
    def _show(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        """Prints and plots an iteration that took ``elapsed`` seconds."""

    def _write(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        self._reported = record.iteration
        self.events.write(
            "iteration",
            iteration=record.iteration,
            consumed_samples=consumed_samples,
            loss=record.loss,
            learning_rate=record.learning_rate,
            grad_norm=record.grad_norm,
            loss_scale=record.loss_scale,
            skipped=record.skipped,
            tokens=record.tokens,
            elapsed_s=round(elapsed, 6),
            **record.auxiliary,
            **gauges,
        )

    def catch_up(self, record: StepRecord | None, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        """Reports the iteration that the run resumes from, if its reporter was lost before reporting it."""
        reported = self._reported
        if reported is None:  # other workers may have reported until now: a joining worker is built while they train
            reported = self.events.newest("iteration").get("iteration")
        self.skip_time()
        if record is not None and reported == record.iteration - 1:
            self._repeat(record, consumed_samples, gauges)

    def _repeat(self, record: StepRecord, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        """Reports an iteration that another worker has completed."""
        self.iteration(record, consumed_samples, gauges)

    def was_evaluated(self, iteration: int) -> bool:
        """Returns whether a loss of this or a later iteration was reported; valid only on rank 0."""
        evaluated = self._evaluated
        if evaluated is None:
            evaluated = self.events.newest("evaluation").get("iteration")
        return evaluated is not None and evaluated >= iteration

    def has(self, iteration: int) -> bool:
        """Returns whether the newest iteration in ``events.jsonl`` is this one; valid only on rank 0."""
        return self.events.newest("iteration").get("iteration") == iteration

    def skip_time(self) -> None:
        """Excludes the time since the last iteration (evaluation, saving) from the next iteration's."""
        self._last = time.perf_counter()

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Reports an evaluation."""
        self._evaluated = iteration
        self.events.write("evaluation", iteration=iteration, split=split, loss=loss, perplexity=perplexity_of(loss))

    def message(self, text: str) -> None:
        """Prints a message on rank 0, in one line."""
        print_rank_0(self._world, f" [{clock()}] {text}")

    def close(self) -> None:
        """Flushes and closes the event log."""
        self._close_events()

    def _close_events(self) -> None:
        self.events.close()
        if self._monitor is not None:
            self._monitor.kill()
            self._monitor.wait()
            self._monitor = None


def perplexity_of(loss: float) -> float:
    """Returns the perplexity of a loss in nats; losses above 20 count as 20."""
    return math.exp(min(loss, 20.0))


def clock() -> str:
    """Returns the local time, as Megatron-LM prints it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def flops_per_sample(config: Config, vocab_size: int) -> float:
    """Counts the floating-point operations of forward and backward of one sample, without recomputation.

    A multiply-add is two operations and backward is twice forward, so each weight costs six operations per token.
    Causal attention costs half of the full score matrix.
    """
    network, seq = config.network, config.data.seq_length
    queries = network.kv_channels * network.num_attention_heads
    groups = network.num_query_groups if network.group_query_attention else network.num_attention_heads
    attention = network.hidden_size * (2 * queries + 2 * network.kv_channels * groups)
    scores = queries * seq  # query x key and probability x value, each half masked
    gate = 3 if network.swiglu else 2
    dense_layers = network.num_layers - moe_layers(config)
    weights = (
        network.num_layers * (attention + scores)
        + dense_layers * gate * network.hidden_size * network.ffn_hidden_size
        + moe_layers(config) * _expert_weights(config, gate)
        + network.hidden_size * vocab_size
    )
    return 6.0 * seq * weights


def expert_share(config: Config, vocab_size: int) -> float:
    """Returns the share of :func:`flops_per_sample` in routed experts, 0 to 1."""
    moe, gate = config.moe, 3 if config.network.swiglu else 2
    width = (moe.moe_ffn_hidden_size or config.network.ffn_hidden_size) * moe.moe_router_topk
    routed = moe_layers(config) * gate * config.network.hidden_size * width
    return 6.0 * config.data.seq_length * routed / flops_per_sample(config, vocab_size)


def _expert_weights(config: Config, gate: int) -> int:
    moe, hidden = config.moe, config.network.hidden_size
    if moe.num_experts is None:
        return 0
    expert = moe.moe_ffn_hidden_size or config.network.ffn_hidden_size
    shared = moe.moe_shared_expert_intermediate_size or 0
    gates = moe.num_experts + moe.moe_shared_expert_gate
    return hidden * (gate * (moe.moe_router_topk * expert + shared) + gates)


def moe_layers(config: Config) -> int:
    """Returns the number of layers with experts."""
    return sum(config.moe.expert_layers(config.network.num_layers))
