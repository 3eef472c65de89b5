"""Starts and stops Megatron-LM's profilers (``--profile``) at the iterations that its options name.

An iteration that a recovery repeats appears in the profile each time that it is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import configure_nvtx_profiling

from megatron.pretraining.entry.stock import get_args


class Profiling:
    """The profiler of a worker: torch's with ``--use-pytorch-profiler``, otherwise CUDA's, for Nsight Systems.

    Args:
        rank: rank of this worker at its start.
    """

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
        beside = Path(args.tensorboard_dir or ".").parent
        name = f"rank-{self._rank}.json.gz"
        if args.pytorch_profiler_collect_chakra:
            (beside / "chakra").mkdir(parents=True, exist_ok=True)
            observer = torch.profiler.ExecutionTraceObserver()
            observer.register_callback(str(beside / "chakra" / name))

        def write(profiler: Any) -> None:
            (beside / "torch_profile").mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(beside / "torch_profile" / name))

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
