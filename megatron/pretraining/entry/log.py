"""Writes Megatron-LM's log of training, with our events and scalars, and runs the profiler.

Starts and stops Megatron-LM's profilers (``--profile``) at the iterations that its options name. An iteration that a
recovery repeats appears in the profile each time that it is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from megatron.core import parallel_state, timers
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import configure_nvtx_profiling
from megatron.training import get_tensorboard_writer, get_wandb_writer, training

from megatron.pretraining.config import Config
from megatron.pretraining.engine.routing import ExpertLoad
from megatron.pretraining.entry.flags import listeners_of_run
from megatron.pretraining.entry.schedule import Reports
from megatron.pretraining.entry.stock import get_args, get_timers, replaced
from megatron.pretraining.logging.records import EventRecorder
from megatron.pretraining.logging.writers import PREFIX, BackgroundWriter, Board, MlflowWriter, WandbWriter
from megatron.pretraining.process.topology import Topology
from moc.runtime.job import World
from moc.state.record import StepRecord

_PLOTTED = {
    "snapshot": ("bytes", "copy_s", "hash_s"),
    "replicate": ("bytes", "replicate_s"),
    "persist": ("bytes", "write_s", "publish_s"),
    "stall": ("seconds",),
    "generation": ("generation", "noticed_s", "met_s"),
    "resume": ("seconds",),
    "lost": ("plt",),
}
"""By type of event, the fields that writers plot."""

_OF_RECORD = ("loss", "learning_rate", "grad_norm", "loss_scale", "tokens")
"""Fields of an iteration that MLflow gets from us, since Megatron-LM has no writer for it."""


_PEAK_TFLOPS = {
    "B300": 2250, "B200": 2250, "GB200": 2500, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H100": 989, "H20": 148, "H800": 989, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10": 125,
    "RTX 4090": 165, "V100": 125,
}  # fmt: skip
"""Dense bf16 peak (fp16 for V100) by a part of the device's name, in TFLOP/s, from NVIDIA's data sheets."""


def peak_flops(given_tflops: float | None, device: torch.device) -> float | None:
    """Returns the peak of a device in FLOP/s: as given, or by its name; None if it is unknown, and on a CPU."""
    if device.type != "cuda":
        return None
    if given_tflops is not None:
        return given_tflops * 1e12
    return peak_of_name(torch.cuda.get_device_properties(device).name)


def peak_of_name(name: str) -> float | None:
    """Returns the peak of a device in FLOP/s by its name, such as ``NVIDIA H200``; None if it is unknown."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    models = [model for model in _PEAK_TFLOPS if set(model.split()) <= set(words)]
    return _PEAK_TFLOPS[max(models, key=len)] * 1e12 if models else None


class _Mean(float):
    """Mean number of micro batches per data-parallel rank, to divide sums; products with it are integers."""

    def __rmul__(self, other: float) -> int:
        return round(other * float(self))


class StockLog(EventRecorder):
    """Reports step records by Megatron-LM's ``training_log``, a collective call, and to ``events.jsonl``.

    Attributes:
        reports: names the loss; set when a generation begins.
    """

    def __init__(self, config: Config, world: World, optimizer: MegatronOptimizer):
        self.reports: Reports | None = None
        self._topology: Topology | None = None
        self._optimizer = optimizer
        self._totals: dict[str, Any] = {}
        self._reports_memory, self._is_first = True, False
        self._mlflow: MlflowWriter | None = None
        super().__init__(config, world)
        args = get_args()
        self._peak_flops = peak_flops(config.logging.peak_tflops, world.device)
        if config.logging.mlflow_experiment and args.rank == args.world_size - 1:  # as Megatron-LM's writers
            self._mlflow = MlflowWriter(config.logging.mlflow_experiment, world.job.id, listeners_of_run())
        if isinstance(wandb := get_wandb_writer(), WandbWriter):
            wandb.begin_run(world.job.id)

    def begin(self, reports: Reports, topology: Topology) -> None:
        """Begins a generation: means cover its iterations only, since a replaced worker has no earlier values.

        ``training_log`` is collective in iterations that it prints, and prints the first iteration of a launch.
        Therefore all workers agree on the first iteration: the launch has one, and a recovery has none.
        """
        if self.reports is not None:
            self.reports.close()
        self.reports, self._topology, self._totals = reports, topology, {}
        self._is_first = self._world.job.term[1] == 0

    def _show(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, float]) -> None:
        args = get_args()
        args.iteration = args.curr_iteration = record.iteration
        args.consumed_train_samples = consumed_samples
        # by position, and not by sums, which a resumed run does not have
        args.num_floating_point_operations_so_far = training.num_floating_point_operations(args, consumed_samples)
        writers = dict(SummaryWriter=Board, wandb=get_wandb_writer())  # whose types the timers compare
        with replaced(training, get_num_microbatches=self._mean_micro_batches), replaced(timers, **writers):
            self._print(record)
        if self._is_first:
            with self._harmless():
                training.write_args_to_tensorboard()
        self._is_first = False
        if (load := self._load) is not None:
            self.message(sentence_of(load))
            gauges = {**gauges, **scalars_of(load)}
        if record.iteration % args.tensorboard_log_interval == 0:
            with self._harmless():
                self._plot(gauges, record.iteration)
                if self._mlflow is not None:
                    values = {name: getattr(record, name) for name in _OF_RECORD} | {"elapsed_s": elapsed}
                    self._mlflow.add_scalars(_prefixed(values), record.iteration)

    def _measure(self, record: StepRecord, elapsed: float) -> dict[str, float]:
        peak, args = self._peak_flops, get_args()
        if peak is None or elapsed <= 0:
            return {}
        flops = training.num_floating_point_operations(args, record.samples)
        return {"mfu": flops / (elapsed * peak * self._world.size)}

    @property
    def _load(self) -> ExpertLoad | None:
        return None if self.reports is None else self.reports.load

    def _write(self, record: StepRecord, consumed_samples: int, elapsed: float, gauges: Mapping[str, Any]) -> None:
        load = {} if self._load is None else fields_of(self._load)
        super()._write(record, consumed_samples, elapsed, {**gauges, **load})

    def _mean_micro_batches(self) -> _Mean:
        assert self._topology is not None  # the generation has begun
        return _Mean(self._topology.mean_micro_batches)

    def _print(self, record: StepRecord) -> None:
        self._reports_memory = training.training_log(
            self._losses(record),
            self._totals,
            get_canonical_lr_for_logging(self._optimizer.param_groups),  # the next update's, as in Megatron-LM's log
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

    def _losses(self, record: StepRecord) -> dict[str, torch.Tensor]:
        """Returns the losses by name, on the stage that computes them."""
        if self.reports is None or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        reported = {name: record.auxiliary[name] for name in self.reports.names or ()}  # router losses have a tracker
        losses = {self.reports.loss_name: record.loss, **reported}
        device = torch.cuda.current_device()  # a blocking copy would wait for the update
        return {name: torch.tensor([value]).to(device, non_blocking=True) for name, value in losses.items()}

    @property
    def _writers(self) -> list[BackgroundWriter]:
        writers = get_tensorboard_writer(), get_wandb_writer(), self._mlflow
        return [writer for writer in writers if isinstance(writer, BackgroundWriter)]

    def _plot(self, values: Mapping[str, float], step: int) -> None:
        for writer in self._writers if values else ():
            writer.add_scalars(_prefixed(values), step)

    def _plot_event(self, event: str, fields: Mapping[str, Any]) -> None:
        if not self._writers:
            return
        step = fields.get("iteration") or self._reported or 0
        with self._harmless():
            self._plot({f"{event}/{name}": fields[name] for name in _PLOTTED.get(event, ()) if name in fields}, step)
            for writer in self._writers if event == "generation" else ():
                text = f"generation {fields['generation']}, {fields['cause']}: {fields['reason']}"
                writer.add_text(f"{PREFIX}recovery", text, step)

    def _repeat(self, record: StepRecord, consumed_samples: int, gauges: Mapping[str, float]) -> None:
        self._write(record, consumed_samples, 0.0, gauges)  # Megatron-LM's log is a collective call

    def skip_time(self) -> None:
        """Excludes the time since the last iteration from the next iteration's."""
        timer = get_timers()("interval-time", log_level=0)
        if timer._started:
            timer.stop()
        timer.start()
        super().skip_time()

    def close(self) -> None:
        """Flushes and closes everything."""
        super().close()
        for writer in self._writers:
            writer.close()


def _prefixed(values: Mapping[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def sentence_of(load: ExpertLoad) -> str:
    """Returns the line of the console."""
    violations = ", ".join(f"{layer}: {value:.2f}" for layer, value in load.violations.items())
    dropped = ", ".join(f"{layer}: {value:.2%}" for layer, value in load.dropped.items() if value)
    return f"maximum violation of experts by layer: {violations}" + (f"; dropped tokens: {dropped}" if dropped else "")


def scalars_of(load: ExpertLoad) -> dict[str, float]:
    """Returns the scalars of TensorBoard."""
    violations = {f"max_violation/layer_{layer}": value for layer, value in load.violations.items()}
    return violations | {f"dropped_share/layer_{layer}": value for layer, value in load.dropped.items()}


def fields_of(load: ExpertLoad) -> dict[str, Any]:
    """Returns the fields of the event ``iteration``."""
    violations, dropped = load.violations, load.dropped
    return {
        "max_violation": max(violations.values()),
        "dropped_share": fmean(dropped.values()),
        "max_violation_by_layer": {str(layer): value for layer, value in violations.items()},
        "dropped_share_by_layer": {str(layer): value for layer, value in dropped.items()},
    }


class Profiling:
    """The profiler of a worker: torch's with ``--use-pytorch-profiler``, otherwise CUDA's, for Nsight Systems."""

    def __init__(self, rank: int):
        args = get_args()
        self._rank, self._torch, self._ranges = rank, None, None
        self._active = args.profile and (not args.profile_ranks or rank in args.profile_ranks)

    def begin(self, iteration: int) -> None:
        """Starts or steps the profiler if it is due before the iteration that follows this one."""
        args = get_args()
        if not self._active:
            return
        if iteration == args.profile_step_start and args.nvtx_ranges:
            configure_nvtx_profiling(True)
        if args.use_pytorch_profiler:
            if self._torch is None:
                self._torch = self._start()
            self._torch.step()
        elif iteration == args.profile_step_start:
            torch.cuda.check_error(_runtime().cudaProfilerStart())
            self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=args.record_shapes)
            self._ranges.__enter__()

    def end(self, iteration: int) -> None:
        """Stops the profiler if it is due after an iteration."""
        args = get_args()
        if not self._active or iteration != args.profile_step_end:
            return
        self._active = False
        if args.nvtx_ranges:
            configure_nvtx_profiling(False)
        if self._torch is not None:
            self._torch.stop()
            if (observer := self._torch.execution_trace_observer) is not None:
                observer.unregister_callback()
        elif self._ranges is not None:
            torch.cuda.check_error(_runtime().cudaProfilerStop())
            self._ranges.__exit__(None, None, None)

    def _start(self) -> Any:
        args, observer = get_args(), None
        directory = Path(args.tensorboard_dir or ".").parent
        name = f"rank-{self._rank}.json.gz"
        if args.pytorch_profiler_collect_chakra:
            (directory / "chakra").mkdir(parents=True, exist_ok=True)
            observer = torch.profiler.ExecutionTraceObserver()
            observer.register_callback(str(directory / "chakra" / name))

        def write(profiler: Any) -> None:
            (directory / "torch_profile").mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(directory / "torch_profile" / name))

        first, last = args.profile_step_start, args.profile_step_end
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=max(first - 1, 0), warmup=int(first > 0), active=last - first, repeat=1
            ),
            on_trace_ready=write,
            record_shapes=args.pytorch_profiler_collect_shapes,
            with_stack=args.pytorch_profiler_collect_callstack,
            execution_trace_observer=observer,
        )
        profiler.start()
        return profiler


def _runtime() -> Any:
    return torch.cuda.cudart()
