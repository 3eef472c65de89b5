"""The engine of a user's loop: computes nothing itself, and updates model, optimizer, schedule and users' objects."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moc.policy import Capability
from moc.runtime.collectives import gather, group_for, sum_over_workers
from moc.runtime.device import copy_to_host
from moc.runtime.job import World
from moc.session.engine import Gradients, NoTap, ReplayOutcome
from moc.session.resume.reading import UPDATES_BEFORE
from moc.session.session import policy_of
from moc.session.settings import Settings, SettingsError
from moc.state.operators import NAMED, Detail, Region, UnsupportedStateError, operator_of
from moc.state.record import Position, StepRecord
from moc.state.replicated import SavedTensor, TorchState, local_values
from moc.store.errors import CheckpointError
from moc.torch.data import Batches, Stateful, decode_plain, derived_seed, encode_plain, set_seed
from moc.torch.naming import NamedTensor, Structure, clean_name
from moc.torch.routing import RouterCounter


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Parts of a user's training loop.

    Attributes:
        model: module without data-parallel wrapper.
        optimizer: an optimizer of ``torch.optim``, as :func:`moc.state.replicated.primed_moments` supports it.
        scheduler: learning-rate schedule, stepped after each update; or None.
        scaler: gradient scaler; or None.
        objects: by name, other objects whose state is saved.
        accumulate: batches of an iteration.
        grouped: they are returned together.
        clip_grad_norm: largest norm of the gradients; None for no limit.
        seed: seed of random numbers and of the order of samples; None to seed nothing.
        top_k: experts of a token; None if the model has the number.
        forward: function of model and batch that returns the loss, to replay iterations; or None.
        replays: the policy replays iterations.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    accumulate: int = 1
    grouped: bool = False
    clip_grad_norm: float | None = None
    seed: int | None = 0
    top_k: int | None = None
    forward: Callable[[nn.Module, Any], Tensor] | None = None
    replays: bool = False


class LoopEngine:
    """An implementation of :class:`moc.session.engine.Engine`.

    Args:
        world: position of this worker.
        loop: parts of the loop.
        structure: operators of the model.
        batches: batches of this worker.

    Attributes:
        averages: the engine averages the gradients of parameters that are no DTensors, because no wrapper does.
        is_partitioned: some tensors of the model are DTensors.

    Raises:
        UnsupportedStateError: the state cannot be saved.
    """

    tap, reduced, peers = NoTap(), None, None

    def __init__(self, world: World, loop: Loop, structure: Structure, batches: Batches):
        self.world, self.loop, self.batches, self._structure = world, loop, batches, structure
        self._live = dict(_live_tensors(loop.objects))
        live = [NamedTensor("output", name, tensor) for name, tensor in self._live.items()]
        buffers = {
            id(named.tensor): (named.tensor, named.tensor.clone())
            for named in structure.tensors
            if not isinstance(named.tensor, nn.Parameter | DTensor)
        }
        self._buffers = list(buffers.values())  # with their values after the last update, which are saved
        stable = [
            dataclasses.replace(named, tensor=buffers.get(id(named.tensor), (None, named.tensor))[1])
            for named in structure.tensors
        ]
        saved = _partition_whole_operators(list(_saved([*stable, *live], world)))
        self.state = TorchState(saved, loop.optimizer)
        self.operators, self.stages = self.state.described(), (0,) * structure.layers
        self.layout, self.slices = {"workers": world.size}, (world.rank,)
        self._unsharded = list(
            {id(entry.tensor): entry.tensor for entry in saved if not isinstance(entry.tensor, DTensor)}.values()
        )
        self._names = frozenset(operator.name for operator in self.operators)  # also of empty chunks
        parameters = self.state.parameters(self._names)
        self._parameters = {id(tensor): tensor for tensor in parameters.values()}
        self._model_digest = xxhash.xxh3_64_hexdigest(
            repr([(entry.name, entry.global_shape, str(entry.tensor.dtype)) for entry in saved]).encode()
        )
        self.averages = True
        self.is_partitioned = any(isinstance(named.tensor, DTensor) for named in structure.tensors)
        counts = self.state.counts()  # of an optimizer whose state was loaded before
        self._updates = max(counts.values(), default=0)
        self._lag = {name: self._updates - counts.get(name, self._updates) for name in parameters}
        self._data_states: list[Any] | None = None
        self._next_data_states: list[Any] | None = None
        self._committed = ""
        self.capture()  # which the first resume records

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that the optimizer updates."""
        return list(self._parameters.values())

    # ----- non-tensor state

    @property
    def digest(self) -> float:
        """20 bits of the hash of the last committed non-tensor state, which all workers share."""
        return float(xxhash.xxh3_64_intdigest(self._committed.encode()) >> 44)

    def capture(self) -> None:
        """Records the non-tensor state and the buffers of a committed iteration, as the body has left them."""
        loop, self._data_states = self.loop, self._next_data_states
        self._keep_buffers()
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in loop.optimizer.param_groups
        ]
        values = {
            "groups": groups,
            "scheduler": None if loop.scheduler is None else loop.scheduler.state_dict(),
            "scaler": None if loop.scaler is None else loop.scaler.state_dict(),
            "objects": {
                name: _without_live(stateful.state_dict(), name, self._live) for name, stateful in loop.objects.items()
            },
            "data": self._data_states,
            "updates": self._updates,
            "lag": {name: lag for name, lag in self._lag.items() if lag},
        }
        self._committed = encode_plain("the loop", values)

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        for buffer, saved in self._buffers:
            saved.copy_(buffer)

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Sets the buffers to their saved values: a forward pass changes them while a snapshot is copied."""
        for buffer, saved in self._buffers:
            buffer.copy_(saved)

    def begin(self, position: Position) -> None:
        """Moves the data to a position, and makes all workers start from rank 0's weights if nothing was loaded."""
        if not position.iteration:
            for tensor in self._unsharded if self.world.size > 1 else ():
                dist.broadcast(_bytes_of(tensor), src=0, group=group_for(tensor))
        self._restore_buffers()
        states = self._data_states
        local_data_state = None if not position.iteration or states is None else decode_plain(states[self.world.rank])
        self.batches.begin(position.consumed_samples // self.world.size, local_data_state)
        self.loop.optimizer.zero_grad()
        if self.loop.scaler is not None:
            _forget_unscaling(self.loop.scaler)  # of an iteration that a lost worker has interrupted
        self._next_data_states = states
        self.capture()

    def scalars(self, position: Position) -> dict:
        facts = {"optimizer": self._optimizer_kind, "model": self._model_digest, "loop": self._committed}
        updates_before = self._updates - (position.iteration - position.skipped_iterations)
        return vars(position) | facts | {UPDATES_BEFORE: updates_before}

    def load_scalars(self, saved: Mapping, where: str) -> None:
        loop, values = self.loop, decode_plain(saved["loop"])
        self._check_parts(values, where)
        for group, saved_group in zip(loop.optimizer.param_groups, values["groups"], strict=True):
            for key, value in saved_group.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        if loop.scheduler is not None:
            loop.scheduler.load_state_dict(values["scheduler"])
        if loop.scaler is not None and values["scaler"]:
            loop.scaler.load_state_dict(values["scaler"])
        for name, stateful in loop.objects.items():
            stateful.load_state_dict(_with_live(values["objects"][name], self._live))
        if values["data"] is not None and len(values["data"]) != self.world.size:
            raise CheckpointError(
                f"{where} has the positions of the data of {len(values['data'])} workers, and there are "
                f"{self.world.size}. Fix: start as many workers as before, or give data with a position",
                code="checkpoint-of-another-model",
            )
        self._data_states, self._updates = values["data"], values["updates"]
        self._lag = dict.fromkeys(self._lag, 0) | values["lag"]
        self.state.set_counts({name: self._updates - lag for name, lag in values["lag"].items()})

    def _check_parts(self, values: Mapping, where: str) -> None:
        groups, objects = self.loop.optimizer.param_groups, self.loop.objects.keys() - values["objects"].keys()
        number = len(values["groups"])
        differences = {
            f"{number} parameter groups, and this run has {len(groups)}": number != len(groups),
            "no schedule": self.loop.scheduler is not None and values["scheduler"] is None,
            f"no state {min(objects, default='')}": bool(objects),
        }
        if lacking := next((text for text, differs in differences.items() if differs), None):
            raise CheckpointError(
                f"{where} has {lacking}. Fix: give protect() what the saved run had, or name another directory",
                code="checkpoint-of-another-model",
            )

    @property
    def _optimizer_kind(self) -> str:
        """Name of the optimizer in snapshots; ``adam`` and ``sgd`` have the same moments for every parameter."""
        optimizer = self.loop.optimizer
        kind = type(optimizer).__name__.lower().replace("adamw", "adam")
        has_momentum = all(group.get("momentum", True) for group in optimizer.param_groups)
        return kind if kind != "sgd" or has_momentum else "sgd without momentum"

    def check(self, saved: Mapping, where: str, window: bool = False) -> None:
        if saved.get("model") != self._model_digest:
            raise CheckpointError(
                f"{where} is of a model with other parameters. Fix: name another directory, or build the model that "
                "was saved",
                code="checkpoint-of-another-model",
            )
        kinds = [kind.split()[0] for kind in (str(saved.get("optimizer") or "none"), self._optimizer_kind)]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{where} has the state of the optimizer {kinds[0]}, and this run has {kinds[1]}. Fix: name another "
                "directory, or use the optimizer that was saved",
                code="checkpoint-of-another-model",
            )

    def compare_samples(self, saved: Mapping, say: Callable[[str], None]) -> None:
        """No-op: the order of samples follows from the seed and the position."""

    # ----- iterations

    def reduce(self) -> bool:
        """Averages, unscales and clips the gradients; returns whether all of them are finite.  Collective."""
        loop, finite = self.loop, True
        if sum(len(group["params"]) for group in loop.optimizer.param_groups) != len(self._parameters):
            raise SettingsError(
                "the optimizer has other parameters than protect() has received: their gradients would not be averaged "
                "and their state not saved. Fix: give it all parameters before protect(), with requires_grad=False "
                "until they are trained",
                code="loop-call-unsupported",
            )
        if self.batches.is_stateful:
            self._next_data_states = gather(encode_plain("data", self.batches.state()))
        if self.averages:
            average_gradients([p for p in self.parameters if not isinstance(p, DTensor)], self.world.size)
        if loop.scaler is not None:
            wrong = torch.zeros((), device=self.world.device)  # read once, since each read waits for the device
            for gradient in self._gradients():
                wrong += local_values(gradient).isfinite().logical_not().any()
            finite = not sum_over_workers({"wrong": wrong}, self.world)["wrong"]
            if not finite:  # the scaler of each worker must find one
                _forget_unscaling(loop.scaler)
                for gradient in self._gradients():
                    local_values(gradient).fill_(float("inf"))
            with contextlib.suppress(RuntimeError):  # the user has unscaled them
                loop.scaler.unscale_(loop.optimizer)
        if loop.clip_grad_norm is not None and finite:
            clip_gradients(self.parameters, loop.clip_grad_norm)
        if self.world.size > 1:
            for buffer, _ in self._buffers:  # as DistributedDataParallel does before the next forward
                dist.broadcast(_bytes_of(buffer), src=0, group=group_for(buffer))
        return finite

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def apply(
        self, record: StepRecord, gradients: Gradients | None = None, operators: Collection[str] | None = None
    ) -> None:
        loop, state = self.loop, self.state
        updated = set(operators or self._names) - state.frozen
        if gradients is not None:
            loop.optimizer.zero_grad()
            for fragment in state.fragments(updated, Detail.GRAD):
                state.load(fragment, gradients(fragment))
        for parameter in state.parameters(self._names - updated).values():
            parameter.grad = None
        if loop.scaler is None:
            loop.optimizer.step()
        else:
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        if not record.skipped:
            self._updates += 1
            for name, parameter in state.parameters(updated).items():
                self._lag[name] += parameter.grad is None
            if loop.scheduler is not None:
                loop.scheduler.step()
        loop.optimizer.zero_grad()

    def replay(
        self, record: StepRecord, position: Position, completing: Callable[[], AbstractContextManager]
    ) -> ReplayOutcome:
        loop, total = self.loop, 0.0
        assert loop.forward is not None  # protect() refuses such a policy without it
        self.batches.begin(position.consumed_samples // self.world.size)
        self._restore_buffers()
        for number in range(loop.accumulate):
            batch = self.batches.take()
            self.seed(position.iteration, number)
            loss = loop.forward(loop.model, batch)
            (loss if loop.scaler is None else loop.scaler.scale(loss)).backward()
            total += float(loss.detach()) / loop.accumulate
        self.reduce()
        rate = self.learning_rate
        with completing():
            self.apply(record)
            self._keep_buffers()
        return ReplayOutcome({"loss_sum": total, "loss_tokens": 1.0}, rate)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, of the first parameter group."""
        return float(self.loop.optimizer.param_groups[0]["lr"])

    def seed(self, iteration: int, number: int) -> None:
        """Seeds random numbers of a batch of an iteration."""
        if self.loop.seed is not None:
            set_seed(derived_seed(self.loop.seed, iteration, number, self.world.data_rank))

    def router_tally(self, layers: Sequence[int], with_probabilities: bool) -> RouterCounter:
        return RouterCounter(self.loop.model, self._structure.routers, layers, self.loop.top_k)

    def rules(self) -> Any:
        """Refuses: gradients of a user's loop are not applied in the background."""
        raise SettingsError("a loop cannot fold gradients. Fix: choose another policy", code="loop-policy-unsupported")


def check_policy(settings: Settings, engine: LoopEngine, is_wrapped: bool) -> bool:
    """Refuses policies that need more than the loop gives; returns whether the policy replays iterations.

    Raises:
        SettingsError: the loop lacks something, or the policy does not fit the model.
    """
    if settings.policy is None:
        return False
    if settings.policy == "auto":
        raise SettingsError(
            "policy auto restarts workers with other flags, which a loop does not have. Fix: choose a policy, such as "
            "full, and snapshot_interval='auto'",
            code="loop-policy-unsupported",
        )
    policy, loop = policy_of(settings, engine.operators), engine.loop
    requires, needs = policy.requires, None
    replays = "to replay iterations"
    if not requires.isdisjoint({Capability.GRADIENTS, Capability.BACKGROUND_UPDATES}):
        needs = "gradients at fixed addresses, which a loop does not keep", "choose another policy, such as full"
    elif Capability.BUBBLES in requires:
        needs = "the bubbles of a pipeline, which a loop does not have", "set hide to compute"
    elif Capability.REPLAY not in requires:
        return False
    elif loop.grouped:
        needs = f"{replays}, and the framework computes the loss of a loop", "choose full"
    elif loop.forward is None:
        needs = replays, "give forward, a function of model and batch that returns the loss"
    elif is_wrapped or engine.is_partitioned:
        needs = f"{replays}, which a wrapped or partitioned model cannot", "drop wrap, or choose full"
    elif loop.objects or engine.batches.is_stateful:
        needs = f"{replays}, which would not change the objects in state or a loader with state_dict", "choose full"
    if needs is not None:
        need, remedy = needs
        raise SettingsError(f"policy {policy.name} needs {need}. Fix: {remedy}", code="loop-policy-unsupported")
    return True


def _forget_unscaling(scaler: Any) -> None:
    """Lets a scaler unscale gradients again, as after an update; its scale stays."""
    with contextlib.suppress(AssertionError):  # it has not scaled anything yet
        scaler.update(scaler.get_scale())


def clip_gradients(parameters: Sequence[Tensor], limit: float) -> None:
    """Clips gradients to a common norm, also if only some are DTensors, which torch's function cannot combine."""
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    if len(kinds) < 2:
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [nn.utils.get_total_norm(gradients) for gradients in kinds.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    factor = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    for gradient in itertools.chain(*kinds.values()):
        local_values(gradient).mul_(factor)


def average_gradients(parameters: Sequence[Tensor], size: int) -> None:
    """Averages gradients over all workers in one all-reduce per dtype; a collective call.

    A parameter that has a gradient on some workers only counts as zero on the others, as in one batch.
    """
    if size == 1:
        return
    kinds: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same_kind in kinds.values():
        present = torch.tensor([p.grad is not None for p in same_kind], dtype=same_kind[0].dtype)
        present = present.to(same_kind[0].device, non_blocking=True)
        flat = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in same_kind]
        mean = torch.cat([*flat, present])
        dist.all_reduce(mean, group=group_for(mean))
        *parts, gradient_counts = mean.split([p.numel() for p in same_kind] + [len(same_kind)])
        for parameter, part, has_gradient in zip(same_kind, parts, copy_to_host(gradient_counts).tolist(), strict=True):
            if has_gradient:
                value = part.view_as(parameter) / size
                if parameter.grad is None:
                    parameter.grad = value
                else:
                    parameter.grad.copy_(value)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor; gloo does not accept all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _saved(tensors: Sequence[NamedTensor], world: World) -> Iterator[SavedTensor]:
    for named in tensors:
        name, tensor = f"{named.operator}{NAMED}{clean_name(named.name)}", named.tensor
        shape, offset, copy = _placement(tensor, world)
        global_shape, local_shape = tuple(tensor.shape), tuple(shape)
        start = 0
        if named.index is not None:  # one expert of a stacked parameter
            is_local = offset[0] <= named.index < offset[0] + local_shape[0]
            global_shape, first, offset, local_shape = (
                global_shape[1:],
                offset[0],
                offset[1:],
                local_shape[1:] if is_local else (0,) * len(local_shape[1:]),
            )
            start = (named.index - first) * math.prod(local_shape)
        sharded = isinstance(tensor, DTensor) and any(kind.is_shard() for kind in tensor.placements)
        yield SavedTensor(name, tensor, global_shape, Region(offset, local_shape), start, copy, sharded)


def _partition_whole_operators(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Treats all tensors of an operator as partitioned if one is, because its parts are assigned together."""
    partitioned = {operator_of(tensor.name) for tensor in saved if tensor.sharded}
    return [dataclasses.replace(tensor, sharded=operator_of(tensor.name) in partitioned) for tensor in saved]


def _placement(tensor: Tensor, world: World) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns shape and offset of this worker's chunk in the unpartitioned tensor, and the index of its copy."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim(), world.rank
    if tensor.device_mesh.size() != world.size:
        raise UnsupportedStateError(
            f"a parameter of shape {tuple(tensor.shape)} is on a mesh of {tensor.device_mesh.size()} of {world.size} "
            "workers. Fix: place all parameters on all dimensions of the mesh, such as by fully_shard",
            code="mesh-unsupported",
        )
    (chunk,) = tensor.__create_chunk_list__()
    mesh, coordinate, copy = tensor.device_mesh, tensor.device_mesh.get_coordinate(), 0
    for position, size, kind in zip(coordinate or (), mesh.shape, tensor.placements, strict=True):
        if kind.is_replicate():
            copy = copy * size + position
    return tuple(tensor.to_local().shape), tuple(chunk.offsets), copy


def _live_tensors(objects: Mapping[str, Stateful]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that the state_dict of an object returns twice, with their paths."""
    for name, stateful in objects.items():
        repeated = dict(_paths(stateful.state_dict(), name))
        for path, tensor in _paths(stateful.state_dict(), name):
            other = repeated.get(path)
            if (
                tensor.numel()
                and tensor.is_contiguous()
                and other is not None
                and local_values(other).data_ptr() == local_values(tensor).data_ptr()
            ):
                yield path, tensor.detach()


def _paths(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _paths(item, f"{path}/{number}")


_LIVE = "moc.live"


@torch.no_grad()
def _without_live(value: Any, path: str, live: Mapping[str, Tensor]) -> Any:
    if path in live and isinstance(value, Tensor) and value.shape == live[path].shape:
        if local_values(value).data_ptr() != local_values(live[path]).data_ptr():  # the object has replaced it
            live[path].copy_(value)
        return {_LIVE: path}
    if isinstance(value, Mapping):
        return {key: _without_live(item, f"{path}/{key}", live) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_without_live(item, f"{path}/{number}", live) for number, item in enumerate(value)])
    return value


def _with_live(value: Any, live: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return live[value[_LIVE]] if value.keys() == {_LIVE} else {k: _with_live(v, live) for k, v in value.items()}
    return type(value)([_with_live(item, live) for item in value]) if isinstance(value, list | tuple) else value
