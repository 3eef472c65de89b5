"""Reports a run: Megatron's console line, TensorBoard, and ``events.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from megatron.core.timers import Timers

from megatron.pretraining.config import Config
from megatron.pretraining.logging.board import Board
from megatron.pretraining.logging.flops import flops_per_sample, peak_tflops
from megatron.pretraining.logging.records import Records, clock, perplexity_of, print_rank_0
from moc.runtime.world import World
from moc.state.record import StepRecord

# megatron-core gathers timers by position, so all workers must name the same ones
_TIMERS = [
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "all-grads-sync",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "params-all-gather",
]


class Log(Records):
    """Reports step records; only rank 0 writes, and all workers must report megatron-core's timers together."""

    def __init__(self, config: Config, world: World, vocab_size: int, train_iters: int, timers: Timers):
        self._timers, self._train_iters = timers, train_iters
        self._flops = flops_per_sample(config, vocab_size)
        self._peak = peak_tflops()
        self._window = _Window()
        self._skipped_in_run = 0
        super().__init__(config, world)

    def _open(self) -> None:
        super()._open()
        plots = self._world.rank == 0 and self._config.logging.tensorboard_dir is not None
        self._tensorboard = self._board() if plots else None

    def _show(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        self._window.add(record, elapsed)
        self._skipped_in_run += record.skipped
        if record.iteration % self._config.logging.tensorboard_log_interval == 0:
            with self._harmless():
                self._scalars(record, consumed_samples, elapsed, gauges)
        if record.iteration % self._config.logging.log_interval == 0:
            with self._harmless():
                print_rank_0(self._world, self._line(record, consumed_samples))
            self._log_timers(record.iteration)
            self._window = _Window()

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Reports an evaluation."""
        super().evaluation(iteration, split, loss)
        perplexity = perplexity_of(loss)
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(f"lm loss {split}", loss, iteration)
            if self._config.logging.log_validation_ppl_to_tensorboard:
                self._tensorboard.add_scalar(f"lm loss {split} ppl", perplexity, iteration)
        print_rank_0(
            self._world,
            f" {split} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |",
        )

    def close(self) -> None:
        """Flushes and closes everything."""
        super().close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _board(self) -> Board:
        def lost(values: int, seconds: float) -> None:
            self.events.write("log_failed", what="tensorboard", lasted_s=round(seconds, 3), lost=values)
            self.message(f"TensorBoard's files can be written again, after {seconds:.0f} s; {values} values are lost")

        logging = self._config.logging
        assert logging.tensorboard_dir is not None  # checked by the caller
        return Board(logging.tensorboard_dir, logging.tensorboard_queue_size, self.message, lost)

    def _line(self, record: StepRecord, consumed_samples: int) -> str:
        window, width = self._window, len(str(self._train_iters))
        fields = [
            f" [{clock()}] iteration {record.iteration:{max(width, 8)}d}/{self._train_iters:{max(width, 8)}d}",
            f"consumed samples: {consumed_samples:12d}",
            f"elapsed time per iteration (ms): {1000.0 * window.seconds_per_iteration:.1f}",
        ]
        if self._config.logging.log_throughput:
            fields.append(self._throughput(record, window.seconds_per_iteration))
        fields += [
            f"learning rate: {record.learning_rate:.6E}",
            f"global batch size: {record.samples:5d}",
            f"lm loss: {window.mean_loss:.6E}",
            *(f"{k}: {v:.6E}" for k, v in record.auxiliary.items() if not k.startswith("moe/")),
            f"loss scale: {record.loss_scale:.1f}",
            f"grad norm: {record.grad_norm:.3f}",
        ]
        if record.zeros is not None:
            fields.append(f"num zeros: {record.zeros}")
        if record.params_norm is not None:
            fields.append(f"params norm: {record.params_norm:.3f}")
        fields.append(f"number of skipped iterations: {window.skipped:3d}")
        fields.append(f"number of nan iterations: {window.not_finite:3d}")
        return " | ".join(fields) + " |"

    def _throughput(self, record: StepRecord, seconds: float) -> str:
        tflops = self._tflops(record, seconds)
        text = f"tokens per second: {record.tokens / seconds:.0f} | throughput per GPU (TFLOP/s/GPU): {tflops:.4g}"
        return text + (f" | MFU: {100.0 * tflops / self._peak:.1f} %" if self._peak else "")

    def _tflops(self, record: StepRecord, seconds: float) -> float:
        return self._flops * record.samples / seconds / self._world.size / 1e12

    def _scalars(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        if self._tensorboard is None:
            return
        scalars = {
            "lm loss": record.loss,
            "learning-rate": record.learning_rate,
            "grad-norm": record.grad_norm,
            "loss-scale": record.loss_scale,
            "batch-size": record.samples,
            "iteration-time": elapsed,
            "throughput": self._tflops(record, elapsed),
            "tokens-per-second": record.tokens / elapsed,
            "skipped-iterations": self._skipped_in_run,
            **record.auxiliary,
            **gauges,
        }
        if record.zeros is not None:
            scalars["num-zeros"] = record.zeros
        if record.params_norm is not None:
            scalars["params-norm"] = record.params_norm
        if self._config.logging.log_memory_to_tensorboard and torch.cuda.is_available():
            scalars["mem-max-allocated-bytes"] = torch.cuda.max_memory_allocated()
        self._tensorboard.add_scalars(scalars, record.iteration)
        self._tensorboard.add_scalar("lm loss vs samples", record.loss, consumed_samples)

    def _log_timers(self, iteration: int) -> None:
        """Logs the timers; a collective call, since megatron-core gathers the times of all workers."""
        if self._config.logging.timing_log_level == 0:
            return
        iterations = self._window.iterations
        if self._config.logging.log_timers_to_tensorboard:
            self._timers.write(_TIMERS, self._tensorboard, iteration, normalizer=iterations, reset=False)
        times = self._timers.get_all_timers_string(_TIMERS, normalizer=iterations)
        if times is not None:
            print_rank_0(self._world, *times.split("\n"))


class _Window:
    """Sums over the iterations since the last printed line."""

    def __init__(self):
        self.iterations = self.skipped = self.not_finite = self.counted = 0
        self.seconds = self.loss = 0.0

    def add(self, record: StepRecord, elapsed: float) -> None:
        self.iterations += 1
        self.seconds += elapsed
        self.skipped += record.skipped
        if math.isfinite(record.loss):
            self.counted += 1
            self.loss += record.loss
        else:
            self.not_finite += 1

    @property
    def seconds_per_iteration(self) -> float:
        return self.seconds / max(self.iterations, 1)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.counted if self.counted else math.nan
