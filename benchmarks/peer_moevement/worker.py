"""Runs one worker of the peer, which trains and takes part in recovery as in the peer's examples.

It runs in the peer's Python, under its supervisor (``supervise.py``), with the peer's checkout on the path and without
this repository's packages. Events go to ``events.jsonl``, one JSON object per line, in our format. At the end each
worker writes its masters and moments.
"""

# DeepSpeed need not be installed where types are checked, and is loosely typed.
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportCallIssue=false
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from pipeline_model import Samples, pipeline

SLOTS = ("exp_avg", "exp_avg_sq")
POLL_S = 0.002


class Events:
    """Appender to the workers' common event file; each line is one write."""

    def __init__(self, directory: Path, rank: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._file, self._rank = open(directory / "events.jsonl", "ab", buffering=0), rank

    def write(self, kind: str, **fields) -> None:
        """Writes one event of this worker."""
        told = {"type": kind, "time": time.time(), "rank": self._rank, **fields}
        self._file.write(json.dumps(told).encode() + b"\n")


def engine_config(own: argparse.Namespace, shape: dict, data_parallel: int) -> dict:
    """Returns the configuration for ``deepspeed.initialize``."""
    told = {
        "train_micro_batch_size_per_gpu": shape["micro_batch"],
        "gradient_accumulation_steps": shape["micro_batches"],
        "train_batch_size": shape["micro_batch"] * shape["micro_batches"] * data_parallel,
        "steps_per_print": 1 << 30,
        "gradient_clipping": shape["clip"],
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"activation_checkpoint_interval": 0},
    }
    told |= json.loads(own.precision)
    if own.window:
        told["moevement"] = {"enabled": True, "w_sparse_override": own.window, "replication_factor": 1}
    return told


def run_on_cpu() -> None:
    """Patches the imported DeepSpeed in this process, before an engine is built.

    * Its shared-memory operator, which only inference uses, is not compiled.
    * fp16 is allowed: it is slow on most CPUs, but correct.
    * The output of ``all_gather_into_tensor`` may be a view of a parameter, which gloo refuses.
    """
    import deepspeed  # noqa: F401  (its modules must be there)
    from deepspeed.accelerator import get_accelerator

    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    get_accelerator().is_fp16_supported = lambda: True
    gather = torch.distributed.all_gather_into_tensor

    def gather_detached(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args, **kwargs):
        return gather(output_tensor.detach(), input_tensor.detach(), *args, **kwargs)

    torch.distributed.all_gather_into_tensor = gather_detached


class Worker:
    """One worker; ``own`` is the command line."""

    def __init__(self, own: argparse.Namespace):
        import deepspeed
        from deepspeed.launcher.survivor_supervisor import WorkerProbe
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        self._own, self._shape, self._probe = own, json.loads(own.shape), WorkerProbe()
        self._spare, self._rank = self._probe.is_spare(), self._probe.rank
        self._events = Events(own.log_dir, self._rank)
        self._events.write("worker", pid=os.getpid(), spare=self._spare)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        torch.manual_seed(1)
        model = pipeline(self._shape, self._shape["stages"])
        everything = {"params": list(model.parameters()), "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(everything)
        optimizer = torch.optim.AdamW(groups, lr=self._shape["lr"], weight_decay=self._shape["weight_decay"])
        data_parallel = self._probe.world_size // self._shape["stages"]
        self._engine = deepspeed.initialize(
            config=engine_config(own, self._shape, data_parallel),
            model=model,
            optimizer=optimizer,
            dist_init_required=False,
            skip_initial_broadcast=self._spare,
        )[0]
        self._coordinator = self._engine.moevement_coordinator
        data_rank = self._engine.grid.get_data_parallel_rank()
        self._samples = Samples(self._shape, data_rank, self._position)
        self._events.write("built", parameters=sum(p.numel() for p in model.parameters()))

    def train(self) -> None:
        """Trains to the end."""
        if self._spare:
            self._take_over()
        while self._engine.global_steps < self._own.iterations:
            if (fault := self._fault()) is not None:
                self._live_on(*fault)
            begun = time.perf_counter()
            mean_loss = float(self._engine.train_batch(data_iter=self._samples))
            elapsed = time.perf_counter() - begun
            if self._rank == 0:
                step = self._engine.global_steps
                self._events.write("iteration", iteration=step, elapsed_s=elapsed, loss=mean_loss)
        self._tell_bytes()
        self._save_end()
        self._probe.signal_done()

    def _position(self) -> int:
        """Returns the number of iterations before the current one."""
        if self._coordinator is not None and self._coordinator.is_recovering():
            return max(0, self._coordinator._replay_iteration_cursor - 1)
        return self._engine.global_steps

    def _fault(self) -> tuple | None:
        """Returns the supervisor's notice of a lost worker; at the iteration of the planned fault, waits for it."""
        if self._own.stop_at is None or self._spare or self._engine.global_steps != self._own.stop_at:
            return self._probe.check_for_fault()
        while self._coordinator._replication_futures:  # as the peer's example does before its fault
            self._coordinator._replication_futures.popleft().result(timeout=60)
        torch.distributed.barrier()
        self._events.write("ready")
        while (fault := self._probe.check_for_fault()) is None:
            time.sleep(POLL_S)
        return fault

    def _live_on(self, address: str, port: int, size: int) -> None:
        from deepspeed.moevement.recovery_helpers import run_as_survivor

        self._events.write("noticed")
        run_as_survivor(
            self._engine,
            self._coordinator,
            victim_rank=self._own.victim,
            peer_pull_source_rank=self._own.victim ^ 1,
            new_master_addr=address,
            new_master_port=port,
            new_rank=self._rank,
            new_world_size=size,
        )
        self._events.write("rejoined")
        self._replay()

    def _take_over(self) -> None:
        from deepspeed.moevement.recovery_helpers import run_as_spare

        self._probe.check_for_fault()  # reads the fault for which this worker was started
        if not run_as_spare(self._engine, self._coordinator, peer_pull_source_rank=self._own.victim ^ 1):
            raise RuntimeError("the peer of the lost worker has nothing for it")
        self._events.write("pulled")
        self._replay()

    def _replay(self) -> None:
        from deepspeed.moevement.recovery_helpers import run_until_recovered

        torch.distributed.barrier()
        self._events.write("replay begins")
        again = run_until_recovered(self._engine, self._coordinator, self._samples, 64)
        if self._own.repair:
            self._engine.reset_activation_shape()  # all workers send their tensor descriptions again
        self._events.write("resume", replayed=again, iteration=self._engine.global_steps)

    def _tell_bytes(self) -> None:
        """Writes the bytes of this worker's snapshots of the last complete windows, and of its logs."""
        if self._coordinator is None:
            return
        engine, by_iteration = self._coordinator.snapshot_engine, {}
        for (iteration, _), snapshot in [*engine._persisted_snapshots.items(), *engine._in_flight_snapshots.items()]:
            by_iteration[iteration] = by_iteration.get(iteration, 0) + snapshot.total_bytes()
        for iteration, amount in sorted(by_iteration.items()):
            self._events.write("share", iteration=iteration, bytes=amount)
        logger = self._coordinator.upstream_logger
        iterations = {key[0] for key in logger._logs}
        self._events.write("logs", bytes=logger.total_memory_bytes(), iterations=len(iterations))

    def _save_end(self) -> None:
        """Writes the masters and moments of this worker: flat, its part of each parameter group.

        They are read from the optimizer itself: DeepSpeed's views by parameter are gone after a recovery.
        """
        optimizer, names = self._engine.optimizer, {id(p): n for n, p in self._engine.module.named_parameters()}
        state = {"stage": self._engine.stage_id, "data_rank": self._engine.grid.get_data_parallel_rank()}
        for number, parameters in enumerate(optimizer.round_robin_bit16_groups):
            masters = optimizer.single_partition_of_fp32_groups[number]
            parts = {"master": masters} | {slot: optimizer.optimizer.state[masters][slot] for slot in SLOTS}
            state |= {f"{number}/{slot}": part.detach().float().numpy() for slot, part in parts.items()}
            state[f"{number}/names"] = [names[id(p)] for p in parameters]
            state[f"{number}/sizes"] = [p.numel() for p in parameters]
        numpy.savez(self._own.end / f"rank_{self._rank}.npz", **state)


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="JSON: the sizes of model and batches")
    parser.add_argument("--precision", required=True, help="JSON: settings of the engine")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--window", type=int, default=0, help="0: no snapshots")
    parser.add_argument("--victim", type=int, default=0, help="the worker that will be lost")
    parser.add_argument(
        "--stop-at", type=int, help="the iteration after which all workers wait for its loss; by default none"
    )
    parser.add_argument("--repair", action="store_true", help="apply the repair that a recovery needs; see cases.py")
    parser.add_argument("--end", type=Path, required=True, help="directory for the state at the end")
    parser.add_argument("--log-dir", type=Path, required=True)
    own = parser.parse_args()
    torch.set_num_threads(1)
    run_on_cpu()
    Worker(own).train()


if __name__ == "__main__":
    main()
