"""Megatron-LM's log of training, with our events and scalars."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_tensorboard_writer, get_wandb_writer, training

from megatron.pretraining.config import Config
from megatron.pretraining.entry.schedule import Reports
from megatron.pretraining.entry.stock import get_args, get_timers
from megatron.pretraining.logging.log import print_rank_0
from moc.events import EventLog
from moc.runtime.world import World
from moc.state.record import StepRecord
from moc.trouble import Harmless


class StockLog:
    """Reports step records by Megatron-LM's ``training_log``, a collective call, and to ``events.jsonl``.

    Attributes:
        events: for programs.
        reports: names the loss; set when the generation's schedule is built.
    """

    def __init__(self, config: Config, world: World, optimizer: MegatronOptimizer):
        self._config, self._world = config, world
        self.reports: Reports | None = None
        self.optimizer = optimizer
        self._totals: dict[str, Any] = {}
        self._reports_memory, self._is_first = True, True
        self._last = time.perf_counter()
        self._harmless = Harmless(self.message, "a report of training", "training continues")
        self._open()

    def _open(self) -> None:
        log_dir = self._config.logging.log_dir if self._world.rank == 0 else None
        self.events = EventLog(log_dir, self.message)
        self._reported: int | None = None
        self._evaluated: int | None = None

    def move(self, world: World) -> None:
        """Reports another generation; the files move with rank 0."""
        first, self._world = self._world.rank == 0, world
        if first != (world.rank == 0):
            self.close()
            self._open()

    def iteration(self, record: StepRecord, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        """Reports a completed iteration, with further ``gauges`` to plot."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        self._write(record, consumed_samples, elapsed, gauges)
        args = get_args()
        args.iteration = args.curr_iteration = record.iteration
        args.consumed_train_samples = consumed_samples
        # by position, and not by sums, which a resumed run does not have
        args.num_floating_point_operations_so_far = training.num_floating_point_operations(args, consumed_samples)
        self._reports_memory = training.training_log(
            self._losses(record),
            self._totals,
            get_canonical_lr_for_logging(self.optimizer.param_groups),  # of the next update, as in Megatron-LM's log
            record.iteration,
            record.loss_scale,
            self._reports_memory,
            int(record.skipped),
            record.grad_norm,
            record.params_norm,
            record.zeros,
            0,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            is_first_iteration=self._is_first,
        )
        self._is_first = False
        if gauges and record.iteration % args.tensorboard_log_interval == 0:
            with self._harmless():
                self._scalars(gauges, record.iteration)

    def _losses(self, record: StepRecord) -> dict[str, torch.Tensor]:
        """The losses by name, on the stage that computes them."""
        if self.reports is None or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        losses = {self.reports.loss_name: record.loss, **record.auxiliary}
        return {name: torch.tensor([value], device=torch.cuda.current_device()) for name, value in losses.items()}

    def _scalars(self, gauges: Mapping[str, float], iteration: int) -> None:
        if (writer := get_tensorboard_writer()) is not None:
            for name, value in gauges.items():
                writer.add_scalar(name, value, iteration)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(dict(gauges), iteration)

    def catch_up(self, record: StepRecord | None, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        """Writes the event of the iteration that the run resumes from, if its reporter was lost before that."""
        reported = self._reported
        if reported is None:
            reported = self.events.newest("iteration").get("iteration")
        self.skip_time()
        if record is None or reported != record.iteration - 1:
            return
        self._write(record, consumed_samples, 0.0, gauges)

    def _write(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        """Writes the event of an iteration."""
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

    def was_evaluated(self, iteration: int) -> bool:
        """Whether a loss of this iteration, or of a later one, was reported; only rank 0 knows."""
        evaluated = self._evaluated
        if evaluated is None:
            evaluated = self.events.newest("evaluation").get("iteration")
        return evaluated is not None and evaluated >= iteration

    def has(self, iteration: int) -> bool:
        """Whether the newest iteration in ``events.jsonl`` is this one; only rank 0 knows."""
        return self.events.newest("iteration").get("iteration") == iteration

    def skip_time(self) -> None:
        """Excludes the time since the last iteration from the next iteration's."""
        timer = get_timers()("interval-time", log_level=0)
        if timer._started:
            timer.stop()
        timer.start()
        self._last = time.perf_counter()

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Writes the event of an evaluation, which Megatron-LM's log has printed."""
        self._evaluated = iteration
        perplexity = math.exp(min(loss, 20.0))
        self.events.write("evaluation", iteration=iteration, split=split, loss=loss, perplexity=perplexity)

    def message(self, text: str) -> None:
        """Prints a message on rank 0, in one line."""
        print_rank_0(self._world, f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")

    def close(self) -> None:
        """Flushes and closes everything."""
        self.events.close()
        if (writer := get_tensorboard_writer()) is not None:
            writer.flush()
