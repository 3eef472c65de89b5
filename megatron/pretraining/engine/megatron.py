"""Makes megatron-core an engine for :mod:`moc.session`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.checkpoint import contents
from megatron.pretraining.checkpoint.state import check_types
from megatron.pretraining.config import Config, layout_sizes
from megatron.pretraining.data.identity import DataIdentity
from megatron.pretraining.data.streams import BatchStream
from megatron.pretraining.elastic.placement import Plans, plans_from_json, plans_to_json
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.engine.optimizer import EXACT
from megatron.pretraining.engine.owned import AdamGroup
from megatron.pretraining.engine.routing import RouterCounts
from megatron.pretraining.engine.state import MegatronState
from megatron.pretraining.engine.step import Stepper
from moc.session.engine import Gradients, ReplayOutcome
from moc.state.adam import Rules
from moc.state.operators import Detail, Operator
from moc.state.record import Position, StepRecord


@dataclass(frozen=True)
class Model:
    """Properties of a model that a session needs.

    Attributes:
        operators: all operators, in the order of the forward pass.
        stages: the pipeline stage of each layer.
        described: its description in snapshots: ``shape``, ``model`` and ``tokenizer``.
        check: ``(state in a snapshot, name of the snapshot)``; raises CheckpointError for the state of another model.
    """

    operators: Sequence[Operator]
    stages: tuple[int, ...]
    described: Mapping[str, Any]
    check: Callable[[Mapping, str], None]


class MegatronEngine:
    """This worker's :class:`moc.session.engine.Engine`; does not use the stepper's commit participants.

    With ``--elastic``, snapshots contain the plans of ``replicas``; ``loaded_plans`` are the plans of the loaded
    snapshot, or None.  ``saved_by`` is the launch that saved it.  ``data`` identifies the data that the run reads.
    ``beginning`` names the checkpoint of another run that this run begins with; ``loaded_beginning`` belongs to the
    loaded snapshot.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        stream: BatchStream | None,
        replicas: Replicas | None,
        model: Model,
        data: DataIdentity | None = None,
        beginning: str = "",
    ):
        self._config, self._stepper, self._stream, self._replicas = config, stepper, stream, replicas
        self._model, self._data, self._beginning = model, data, beginning
        self._repeated = contents.repeated(config)
        self.loaded_plans: Plans | None = None
        self.saved_by: str | None = None
        self.loaded_beginning: str | None = None
        self.world, self.tap = stepper.world, stepper.boundaries
        self.state = MegatronState(stepper.chunks, stepper.optimizer.core, stepper.modules)
        self.operators = self._model.operators
        self.layout = layout_sizes(config, stepper.world.size)

    @property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stage of each layer."""
        return self._model.stages

    @property
    def peers(self) -> dist.ProcessGroup:
        """Workers of this pipeline stage."""
        group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return group

    @property
    def slices(self) -> Sequence[int]:
        """Ranks that hold the tensor-parallel slices of this rank's parameters."""
        group: Any = parallel_state.get_tensor_model_parallel_group()
        return dist.get_process_group_ranks(group)

    @property
    def reduced(self) -> int | None:
        """Iteration whose reduced gradients this worker still holds, or None."""
        return self._stepper.optimizer.reduced

    def scalars(self, position: Position) -> dict:
        """Returns the part of the state that is not tensors."""
        parts = self._stepper.optimizer, self._stepper.scheduler, self._model.described, self._data
        state = contents.training_state(self._config, self.world, position, *parts)
        state["optimizer"] = self._config.regularization.optimizer  # snapshots always hold optimizer state
        state["job"], state["beginning"] = self.world.job.id, self._beginning
        state[contents.KEY] = self._repeated
        return state | ({} if self._replicas is None else {"elastic": plans_to_json(self._replicas.plans)})

    def load_scalars(self, saved: Mapping, where: str) -> None:
        """Restores loss scale, learning rates and kind of norm; keeps the snapshot's expert placement and launch."""
        self.loaded_plans = plans_from_json(saved["elastic"]) if saved.get("elastic") else None
        self.saved_by, self.loaded_beginning = saved.get("job"), saved.get("beginning")
        if "grad_norm" not in self._config.given and not self._config.needs_exact_norm:
            # a run keeps the norm that it began with
            self._stepper.optimizer.norm = saved.get("grad_norm", EXACT)
        contents.restore_grad_scaler(self._stepper.optimizer, saved["grad_scaler"])
        contents.restore_scheduler(self._stepper.scheduler, saved["scheduler"], where)

    def check(self, saved: Mapping, where: str, window: bool = False) -> None:
        """Rejects invalid state, another model, optimizer or data, and a window of another precision or other flags."""
        check_types(saved)
        if saved.get("elastic"):
            plans_from_json(saved["elastic"])
        self._model.check(saved, where)
        contents.check_optimizer(self._config, saved, where, "begin another run with --ckpt-dir")
        contents.check_data(self._config, self._data, saved, where)
        if window:
            contents.check_window(self._config, saved, where)
            contents.check_package(self._config, self._stepper.optimizer, saved, where)
            contents.check_replay(self._config, self._stepper.scheduler, self._data, saved, where)

    def compare_samples(self, saved: Mapping, say: Callable[[str], None]) -> None:
        """Warns if the saved run reads samples in another order, or uses another optimizer implementation."""
        contents.warn_of_other_run(self._config, self.world, self._stepper.optimizer, self._data, saved, say)

    def replay(
        self, record: StepRecord, position: Position, completing: Callable[[], AbstractContextManager]
    ) -> ReplayOutcome:
        """Replays an iteration."""
        rate = self._stepper.optimizer.learning_rate
        samples = (
            None if self._stream is None else self._stream.iteration(self._stepper.topology, position.consumed_samples)
        )
        sums = self._stepper.repeat(record, samples, completing)
        return ReplayOutcome({name: float(value) for name, value in sums.items()}, rate)

    def apply(
        self, record: StepRecord, gradients: Gradients | None = None, operators: Collection[str] | None = None
    ) -> None:
        """Updates the state from this worker's reduced gradients, or from ``gradients`` instead."""
        moving = set(self.state.operators() if operators is None else operators) - self.state.frozen
        if gradients is not None:
            self._stepper.modules.forget()  # of an iteration that was interrupted, and is not the one applied
            self._stepper.optimizer.zero_grad()
            for fragment in self.state.fragments(moving, Detail.GRAD):
                self.state.load(fragment, gradients(fragment))
        self._stepper.optimizer.take_gradients(None if operators is None else self.state.parameters(moving))
        self._stepper.complete(record)

    def rules(self) -> Rules:
        """Returns the next update's rules for experts; no Adam rules if user modules in experts keep values."""
        if any(".expert." in operator for operator in self._stepper.modules.user_state):
            return Rules.of(self._stepper.optimizer.clip_grad, ())
        return Rules.of(self._stepper.optimizer.clip_grad, ((kind, group.rule) for kind, group in self._adam_groups))

    @cached_property
    def _adam_groups(self) -> list[tuple[str, AdamGroup]]:
        return self.state.adam_groups(operator.name for operator in self.operators if operator.expert is not None)

    def router_tally(self, layers: Sequence[int], with_probabilities: bool) -> RouterCounts:
        """Returns a counter of the tokens that routers send to experts."""
        moe, chunks = self._config.moe, self._stepper.chunks
        padded = moe.moe_pad_expert_input_to_capacity
        topology, world = self._stepper.topology, self.world
        shards = world.size // (world.pipeline_size * world.data_size)  # of a sequence, each with its own router call
        return RouterCounts(
            chunks,
            list(layers),
            moe.num_experts or 0,
            padded,
            world.device,
            with_probabilities,
            calls=shards * topology.global_batch_size // topology.micro_batch_size,
        )
