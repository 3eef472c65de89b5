"""The training state of a plain PyTorch model, replicated on all workers, with a torch optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from moc.state.fragments import Fragment, OwnedSlice, Piece, fragments_of
from moc.state.interface import FreezingError
from moc.state.operators import Detail, Operator, UnsupportedStateError, operator_of
from moc.state.region import Region


class ReplicatedState:
    """A :class:`moc.state.interface.TrainingState` of data-parallel replicas; operators cannot be frozen.

    The optimizer state is bit-identical to torch's, if each update reaches all parameters of an operator or none.

    Args:
        parameters: all parameters that the optimizer updates, by their names in checkpoints, which are Megatron's
            (:data:`moc.state.operators.OPERATORS`).
        optimizer: torch's Adam, AdamW or SGD, with all its parameter groups.
        rank: rank of this worker.

    Raises:
        UnsupportedStateError: a parameter belongs to no known operator, the optimizer updates a parameter without a
            name, or the optimizer keeps unknown state.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, rank: int):
        self._parameters, self._optimizer, self._rank = dict(parameters), optimizer, rank
        self._operators = {name: operator_of(name) for name in self._parameters}
        self._moments = {parameter: _primed(optimizer, group, parameter) for parameter, group in self._updated()}

    def _updated(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Yields the parameters that the optimizer updates, with their groups."""
        named = set(self._parameters.values())
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in named:
                    told = group["param_names"][place] if "param_names" in group else f"{place} of group {number}"
                    raise UnsupportedStateError(
                        f"parameter {told} of the optimizer, of shape {tuple(parameter.shape)}, would not be saved: it "
                        "has no name in the state. Fix: name every parameter that is updated",
                        code="parameter-unnamed",
                    )
                yield parameter, group

    def operators(self) -> list[str]:
        """Returns the names of the operators, in model order."""
        return list(dict.fromkeys(self._operators.values()))

    def described(self) -> list[Operator]:
        """Returns the operators, in model order."""
        sizes: Counter[str] = Counter()
        for name, parameter in self._parameters.items():
            sizes[self._operators[name]] += parameter.numel()
        return [_operator(name, size) for name, size in sizes.items()]

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields the slots of a state subset of some operators; rank 0 holds the first copy."""
        wanted = set(operators)
        for name, parameter in self._parameters.items():
            if self._operators[name] in wanted:
                shape = tuple(parameter.shape)
                box, replica = Region((0,) * len(shape), shape), (0, 0, self._rank)
                piece = Piece(name, shape, box, parameter.detach(), start=0, replica=replica, padded=False)
                owned = OwnedSlice(parameter, 0, parameter.numel(), self._slots(parameter, detail), sharded=False)
                yield from fragments_of(owned, [piece])

    def _slots(self, parameter: torch.Tensor, detail: Detail) -> dict[str, torch.Tensor]:
        weights = parameter.detach()
        if detail is Detail.COMPUTE:
            slots = {"param": weights}
        elif detail is Detail.GRAD and parameter in self._moments:
            if parameter.grad is None:  # allocated for loading
                parameter.grad = torch.zeros_like(parameter)
            slots = {"grad": parameter.grad}
        else:  # values that the optimizer does not update are saved without moments
            slots = {"master": weights} | self._moments.get(parameter, {})
        return {slot: values.view(-1) for slot, values in slots.items() if detail.holds(slot)}

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
        """No-op: each worker loads all weights."""

    def steps(self) -> dict[str, int]:
        """Returns the number of updates of each operator's moments; empty for SGD, which does not count."""
        counts: dict[str, int] = {}
        for name, counter in self._counters():  # the most: a parameter without gradients counts none
            counts[self._operators[name]] = max(counts.get(self._operators[name], 0), int(counter))
        return counts

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates by operator."""
        for name, counter in self._counters():
            if self._operators[name] in steps:
                counter.fill_(steps[self._operators[name]])

    def _counters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            if parameter in self._moments and "step" in self._optimizer.state[parameter]:
                yield name, self._optimizer.state[parameter]["step"]

    @property
    def frozen(self) -> frozenset[str]:
        """Always empty."""
        return frozenset()

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

    def activate(self, operators: Iterable[str]) -> None:
        """No-op: no operator is ever frozen."""


def _operator(name: str, size: int) -> Operator:
    _, *place = name.split(".")
    if not place:
        return Operator(name, name, None, None, size)
    layer, kind, *expert = place
    return Operator(name, kind, int(layer), int(expert[0]) if expert else None, size)


def _primed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Creates the state that torch creates in the first update, with the same result; returns the moments.

    Raises:
        UnsupportedStateError: the optimizer keeps another state.
    """
    kind, state = type(optimizer), optimizer.state[parameter]
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        slots, begins = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + group["amsgrad"]], 0.0
        on = parameter.device if group["capturable"] or group["fused"] else "cpu"  # as torch has it
        state.setdefault("step", torch.zeros((), device=on))
    elif kind is torch.optim.SGD and not group["dampening"]:
        # torch's first buffer is the gradient itself: only -0.0 + x is x for each x, bit by bit
        slots, begins = ("momentum_buffer",) if group["momentum"] else (), -0.0
    else:
        what = "SGD with dampening" if kind is torch.optim.SGD else kind.__name__
        raise UnsupportedStateError(
            f"ReplicatedState supports torch's Adam, AdamW and SGD without dampening, not {what}. Fix: use one of "
            "them, or implement moc.TrainingState for it",
            code="optimizer-unsupported",
        )
    return {slot: state.setdefault(slot, torch.full_like(parameter, begins)).detach() for slot in slots}
