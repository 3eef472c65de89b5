"""The training state of PyTorch models with a torch optimizer: replicated, or partitioned over workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moc.state.interface import FreezingError
from moc.state.operators import (
    Detail,
    Fragment,
    Operator,
    OwnedSlice,
    Piece,
    Region,
    UnsupportedStateError,
    fragments_of,
    operator_of,
)


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """This worker's chunk of a tensor of the unpartitioned model.

    Attributes:
        name: name in checkpoints, which determines the operator (:func:`moc.state.operators.operator_of`).
        tensor: parameter or buffer that contains the chunk; a DTensor if it is partitioned.
        global_shape: shape of the unpartitioned tensor.
        region: box of the unpartitioned tensor in this chunk.
        start: index of the first element of the chunk in the flattened local tensor.
        copy: index of this worker among those with the same chunk; 0 for the first.
        sharded: other workers have other chunks.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    region: Region
    start: int
    copy: int
    sharded: bool

    @classmethod
    def replicated(cls, name: str, tensor: torch.Tensor, rank: int) -> SavedTensor:
        """Returns a tensor that all workers have."""
        shape = tuple(tensor.shape)
        return cls(name, tensor, shape, Region((0,) * len(shape), shape), start=0, copy=rank, sharded=False)


class TorchState:
    """A :class:`moc.state.interface.TrainingState` of tensors and a torch optimizer.

    The optimizer state is bit-identical to torch's, if each update reaches all parameters of an operator or none.

    Args:
        tensors: this worker's chunks of all tensors to save.
        optimizer: an optimizer of ``torch.optim`` (:func:`primed_moments`), with all its parameter groups.

    Raises:
        UnsupportedStateError: a parameter belongs to no known operator, the optimizer updates a parameter without a
            name, the optimizer keeps unknown state, or the memory of a tensor is not contiguous.
    """

    def __init__(self, tensors: Sequence[SavedTensor], optimizer: torch.optim.Optimizer):
        self._tensors, self._optimizer = tuple(tensors), optimizer
        self._operators = {saved.name: operator_of(saved.name) for saved in self._tensors}
        self._moments = {parameter: primed_moments(optimizer, group, parameter) for parameter, group in self._updated()}
        self._frozen: frozenset[str] = frozenset()
        for saved in self._tensors:
            if not local_values(saved.tensor).is_contiguous():
                raise UnsupportedStateError(
                    f"the memory of {saved.name} is not contiguous. Fix: call contiguous() on it before the optimizer "
                    "is created",
                    code="parameter-not-contiguous",
                )

    def _updated(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Yields the parameters that the optimizer updates, with their groups."""
        named = {saved.tensor for saved in self._tensors}
        for number, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in named:
                    names = group.get("param_names")
                    label = names[position] if names else f"{position} of group {number}"
                    raise UnsupportedStateError(
                        f"parameter {label} of the optimizer, of shape {tuple(parameter.shape)}, would not be saved: "
                        "it has no name in the state. Fix: name every parameter that is updated",
                        code="parameter-unnamed",
                    )
                yield parameter, group

    def operators(self) -> list[str]:
        """Returns the names of the operators that this worker holds, at least in part, in model order."""
        return list(dict.fromkeys(self._operators[saved.name] for saved in self._tensors if saved.region.numel))

    def described(self) -> list[Operator]:
        """Returns the operators of the unpartitioned model, in model order."""
        sizes: Counter[str] = Counter()
        slots = {slot for counts in self._moments.values() for slot in counts}
        counts = {name: Counter(dict.fromkeys(slots, 0)) for name in self._operators.values()}
        for saved in self._tensors:
            operator, elements = self._operators[saved.name], math.prod(saved.global_shape)
            sizes[operator] += elements
            counts[operator].update(dict.fromkeys(self._moments.get(saved.tensor, {}), elements))
        return [_operator(name, size, counts[name]) for name, size in sizes.items()]

    def parameters(self, operators: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns the parameters of some operators that the optimizer updates, by name."""
        selected = set(operators)
        return {
            saved.name: saved.tensor
            for saved in self._tensors
            if self._operators[saved.name] in selected and saved.tensor in self._moments
        }

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields the slots of a state subset of some operators; the worker with copy 0 holds the first copy."""
        selected = set(operators)
        for saved in self._tensors:
            if self._operators[saved.name] in selected:
                values, replica = local_values(saved.tensor), (0, 0, saved.copy)
                piece = Piece(
                    saved.name, saved.global_shape, saved.region, values, saved.start, replica=replica, padded=False
                )
                slots = self._slots(saved.tensor, detail)
                owned = OwnedSlice(
                    saved.tensor, 0, values.numel(), slots, sharded=saved.sharded, copy=saved.copy * saved.sharded
                )
                yield from fragments_of(owned, [piece])

    def _slots(self, parameter: torch.Tensor, detail: Detail) -> dict[str, torch.Tensor]:
        if detail is Detail.COMPUTE:
            slots = {"param": parameter}
        elif detail is Detail.GRAD and parameter in self._moments:
            if parameter.grad is None:  # allocated for loading
                parameter.grad = torch.zeros_like(parameter)
            slots = {"grad": parameter.grad}
        else:  # values that the optimizer does not update are saved without moments
            slots = {"master": parameter} | self._moments.get(parameter, {})
        return {slot: local_values(values).view(-1) for slot, values in slots.items() if detail.holds(slot)}

    @torch.no_grad()
    def load(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes values into the live memory of a fragment.

        Raises:
            ValueError: number of elements or dtype differ.
        """
        view = fragment.view
        if values.numel() != view.numel() or values.dtype != view.dtype:
            raise ValueError(f"{fragment.slot} of {fragment.name} takes {view.numel()} elements of {view.dtype}")
        view.copy_(values.reshape(-1))

    def gather_weights(self) -> None:
        """No-op: each worker loads all of its weights."""

    def steps(self) -> dict[str, int]:
        """Returns the number of updates of each operator's moments; empty for SGD and Muon, which do not count."""
        counts: dict[str, int] = {}
        for name, count in self.counts().items():  # the most: a parameter without gradients counts none
            counts[self._operators[name]] = max(counts.get(self._operators[name], 0), count)
        return counts

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates by operator."""
        for name, counter in self._counters():
            if self._operators[name] in steps:
                counter.fill_(steps[self._operators[name]])

    def counts(self) -> dict[str, int]:
        """Returns the number of updates by tensor; empty for SGD and Muon, which do not count."""
        names, counters = [name for name, _ in self._counters()], [counter for _, counter in self._counters()]
        return dict(zip(names, _read(counters), strict=True))

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Sets the number of updates of some tensors."""
        for name, counter in self._counters():
            if name in counts:
                counter.fill_(counts[name])

    def _counters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for saved in self._tensors:
            if saved.tensor in self._moments and "step" in self._optimizer.state[saved.tensor]:
                yield saved.name, self._optimizer.state[saved.tensor]["step"]

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen operators, whose parameters the engine does not update."""
        return self._frozen

    def freeze(self, operators: Iterable[str]) -> None:
        """Freezes operators.

        Raises:
            FreezingError: an operator shares a tensor with another one, as stacked experts do.
        """
        frozen = set(operators)
        by_tensor: dict[torch.Tensor, set[str]] = {}
        for saved in self._tensors:
            by_tensor.setdefault(saved.tensor, set()).add(self._operators[saved.name])
        for names in by_tensor.values():
            if len(names) > 1 and not frozen.isdisjoint(names):
                raise FreezingError(
                    f"{min(names & frozen)} shares a parameter with other experts, so it cannot be frozen. Fix: "
                    "choose a policy that freezes nothing, such as --ckpt-policy full"
                )
        self._frozen |= frozen

    def activate(self, operators: Iterable[str]) -> None:
        """Unfreezes operators."""
        self._frozen -= set(operators)


class ReplicatedState(TorchState):
    """A :class:`TorchState` of data-parallel replicas; operators cannot be frozen.

    Args:
        parameters: all parameters that the optimizer updates, by their names in checkpoints
            (:data:`moc.state.operators.OPERATORS`).
        optimizer: as for :class:`TorchState`.
        rank: rank of this worker.

    Raises:
        UnsupportedStateError: as for :class:`TorchState`.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, rank: int):
        super().__init__([SavedTensor.replicated(name, tensor, rank) for name, tensor in parameters.items()], optimizer)

    def freeze(self, operators: Iterable[str]) -> None:
        """Always refuses: freezing is not supported.

        Raises:
            FreezingError: ``operators`` is not empty.
        """
        if frozen := list(operators):
            raise FreezingError(
                f"replicated state cannot freeze {frozen[0]}. Fix: choose a policy that freezes nothing, such as "
                "--ckpt-policy full"
            )


def _read(counters: Sequence[torch.Tensor]) -> list[int]:
    """Returns update counts; those on a device (fused optimizers) are read together, since each read waits for it."""
    on_device = [counter for counter in counters if counter.device.type != "cpu"]
    values = iter(torch.stack(on_device).tolist() if on_device else ())
    return [int(counter if counter.device.type == "cpu" else next(values)) for counter in counters]


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's values of a tensor, as a view without gradient."""
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _operator(name: str, size: int, moments: Mapping[str, int]) -> Operator:
    counted = None if all(count == size for count in moments.values()) else tuple(moments.items())
    _, *parts = name.split(".")
    if not parts:
        return Operator(name, name, None, None, size, moments=counted)
    layer, kind, *expert = parts
    return Operator(name, kind, int(layer), int(expert[0]) if expert else None, size, moments=counted)


def primed_moments(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Creates the state that torch creates in the first update, with the same result; returns the moments.

    Raises:
        UnsupportedStateError: the optimizer keeps another state.
    """
    moments, state = _initial_moments(type(optimizer), group), optimizer.state[parameter]
    if moments is None:
        kind = type(optimizer).__name__
        raise UnsupportedStateError(
            f"{kind + ' with dampening' if kind == 'SGD' else kind} keeps state that is not supported. Fix: use Adam, "
            "AdamW, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, Muon or SGD without dampening of torch.optim, "
            "or implement moc.TrainingState for it",
            code="optimizer-unsupported",
        )
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Muon)):  # which do not count updates
        on = parameter.device if group.get("capturable") or group.get("fused") else "cpu"  # as torch has it
        is_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        state.setdefault("step", torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device=on))
    return {
        slot: state.setdefault(slot, torch.full_like(parameter.detach(), value)).detach()
        for slot, value in moments.items()
    }


def _initial_moments(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the values of the moments before the first update; None if the optimizer is not supported."""
    adam = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    match kind:
        case torch.optim.Adam | torch.optim.AdamW:
            return adam | ({"max_exp_avg_sq": 0.0} if group["amsgrad"] else {})
        case torch.optim.RAdam:
            return adam
        case torch.optim.Adamax:
            return {"exp_avg": 0.0, "exp_inf": 0.0}
        case torch.optim.Adagrad:
            return {"sum": group["initial_accumulator_value"]}
        case torch.optim.Adadelta:
            return {"square_avg": 0.0, "acc_delta": 0.0}
        case torch.optim.Rprop:
            return {"prev": 0.0, "step_size": float(group["lr"])}
        case torch.optim.RMSprop:
            optional = {"momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
            return {"square_avg": 0.0} | {slot: 0.0 for slot, is_kept in optional.items() if is_kept}
        case torch.optim.Muon:
            return {"momentum_buffer": 0.0}
        case torch.optim.SGD if not group["dampening"]:
            # torch's first buffer is the gradient itself: only -0.0 + x is x for each x, bit by bit
            return {"momentum_buffer": -0.0} if group["momentum"] else {}
    return None
