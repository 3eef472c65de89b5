"""Runs the pipeline schedule of one iteration: megatron-core's, with this project's micro batches and communicator.

Also sets the learning rates of frozen operators, and resets the schedule after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.pretraining.data.streams import Batch
from megatron.pretraining.engine.boundary import schedule_groups
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.process.initialize import seed_streams
from megatron.pretraining.process.topology import Topology
from moc.fault_points import reach

ForwardStep = Callable[..., tuple[torch.Tensor, Callable]]


class MicroBatchHooks:
    """Hooks around the micro batches of an iteration; this class seeds random streams at its start."""

    def __init__(self, seed: int, topology: Topology):
        self._seed, self._topology = seed, topology

    def begin(self, iteration: int | None) -> None:
        """Begins the iteration after ``iteration`` completed ones, or with None an evaluation, which uses no seed."""
        if iteration is not None:
            seed_streams(self._seed, iteration, self._topology.world)

    def run_micro_batch(self, compute: Callable[[], tuple[torch.Tensor, Callable]]) -> tuple[torch.Tensor, Callable]:
        """Computes the forward pass of the next micro batch; returns its output and the output's loss function."""
        return compute()


class Schedule:
    """Runs forward and backward of all micro batches of an iteration.

    ``forward_step`` is ``(micro batches, model chunk) -> (output, loss function of the output)``, as megatron-core's
    schedules call it; it draws a batch only on chunks that need one.  ``communicator_override`` replaces any
    communicator, on workers without neighbours in a pipeline.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        chunks: list[DistributedDataParallel],
        hooks: MicroBatchHooks,
        num_micro_batches: int,
        micro_batch_size: int,
        seq_length: int,
        communicator_override: P2PCommunicator | None = None,
    ):
        self._forward_step, self._chunks, self._hooks = forward_step, chunks, hooks
        self._communicator_override = communicator_override
        self._sizes: dict[str, Any] = dict(
            num_microbatches=num_micro_batches, micro_batch_size=micro_batch_size, seq_length=seq_length
        )
        self._tokens = None
        # step.py reduces gradients itself; the schedule only reports the token count
        chunks[0].config.finalize_model_grads_func = self._note_tokens

    def forward_backward(
        self, iteration: int, batches: Iterator[Batch] | None, communicator: P2PCommunicator | None = None
    ) -> tuple[list[dict], torch.Tensor | None]:
        """Computes all gradients of the iteration after ``iteration`` completed ones, unreduced.

        ``batches`` is None on stages that read no data.

        Returns:
            The loss function's report of each micro batch (empty except on the last stage), and the token count that
            divides this rank's gradients, or None if they are already averaged.
        """
        self._hooks.begin(iteration)
        reports = self._run(batches, forward_only=False, communicator=communicator)
        return reports, self._tokens

    def forward(self, batches: Iterator[Batch] | None) -> list[dict]:
        """Computes the losses only (evaluation)."""
        self._hooks.begin(None)
        return self._run(batches, forward_only=True)

    def _run(self, batches, forward_only: bool, communicator: P2PCommunicator | None = None) -> list[dict]:
        # one iterator instead of a list: at most one chunk of a worker is the model's first or last
        several, communicator = len(self._chunks) > 1, self._communicator_override or communicator
        tap: dict[str, Any] = (
            {} if communicator is None else dict(p2p_communicator=communicator, pg_collection=schedule_groups())
        )
        return get_forward_backward_func()(
            forward_step_func=self._one_micro_batch,
            data_iterator=[batches] * len(self._chunks) if several and not isinstance(batches, list) else batches,
            model=[*self._chunks] if several else self._chunks[0],
            forward_only=forward_only,
            **tap,
            **self.sizes(),
        )

    def sizes(self) -> dict[str, Any]:
        """Returns the schedule's arguments about the micro batches of an iteration, by name."""
        return self._sizes

    def _one_micro_batch(self, batches, chunk, **options) -> tuple[torch.Tensor, Callable]:
        """Computes a micro batch, or returns its plan if the schedule overlaps layers of two of them (``options``)."""
        reach("forward_backward")
        return self._hooks.run_micro_batch(lambda: self._forward_step(batches, chunk, **options))

    def _note_tokens(self, chunks, tokens=None, **ignored) -> None:
        self._tokens = tokens


_LIMITS = ("max_lr", "min_lr")
_NOT_IN_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


class RateSchedule(OptimizerParamScheduler):
    """megatron-core's schedule, which saves all its settings and applies all that it loads.

    megatron-core also keeps the limits of the learning rate in the parameter groups, where loading does not change
    them.  The other limits of groups with a decoupled learning rate are kept.  megatron-core neither saves nor compares
    the start of the warm-up and the last phase of WSD.  It sets the groups' weight decay before it loads the schedule
    of the weight decay.
    """

    def state_dict(self) -> dict:
        """Returns the settings and the number of samples."""
        return super().state_dict() | {name: getattr(self, name) for name in _NOT_IN_STATE}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the settings or, with ``--override-opt-param-scheduler``, only the number of samples.

        Raises:
            AssertionError: the settings differ, and no flag states which ones apply.
        """
        for name in _NOT_IN_STATE:
            configured, saved = getattr(self, name), state_dict.get(name, getattr(self, name))
            if self.use_checkpoint_opt_param_scheduler:
                setattr(self, name, saved)
            elif not self.override_opt_param_scheduler:
                assert configured == saved, f"{name} is {configured} and not {saved}"
        before = {limit: getattr(self, limit) for limit in _LIMITS}
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            same = [limit for limit in _LIMITS if group.get(limit) == before[limit]]
            group.update({limit: getattr(self, limit) for limit in same})
        self.step(0)


def drop_unfinished_iteration(chunks: list[DistributedDataParallel], modules: ModuleState) -> None:
    """Resets everything except parameters and optimizer state to its value between two iterations.

    Gradients need no reset, since every iteration starts by zeroing them; random streams and data are functions of
    the position.
    """
    modules.suspend()
    for chunk in chunks:
        if isinstance(chunk, ZeroChunk):
            chunk.reducer.drop_unfinished_iteration()
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            _forget_reductions(buckets)


def _forget_reductions(buckets) -> None:
    buckets.grad_reduce_handle = buckets.param_gather_handle = None
    buckets.param_gather_dispatched = False
    buckets.per_param_grad_ready_counts = {}
    buckets.is_last_microbatch = True
