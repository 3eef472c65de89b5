"""The training state of a plain PyTorch model, replicated on all workers, with a torch optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from moc.state.detail import Detail
from moc.state.fragments import Fragment, OwnedSlice, Piece, fragments_of
from moc.state.interface import FreezingError
from moc.state.operators import Operator, operator_of
from moc.state.region import Region

MOMENTS = ("exp_avg", "exp_avg_sq")


class ReplicatedState:
    """A :class:`moc.state.interface.TrainingState` of data-parallel replicas; operators cannot be frozen.

    Args:
        parameters: parameters by their names in checkpoints, which are Megatron's: ``embedding.*``,
            ``decoder.layers.N.self_attention.*``, ``decoder.layers.N.mlp.router.*``,
            ``decoder.layers.N.mlp.experts.experts.E.*``, ``output_layer.*`` (:func:`moc.state.operators.operator_of`).
        optimizer: torch's Adam or AdamW.
        rank: rank of this worker.

    Raises:
        ValueError: a parameter belongs to no known operator.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Adam, rank: int):
        self._parameters, self._optimizer, self._rank = dict(parameters), optimizer, rank
        self._operators = {name: operator_of(name) for name in self._parameters}
        for parameter in self._parameters.values():  # torch would create this state only in the first update
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def operators(self) -> list[str]:
        """Names of the operators, in model order."""
        return list(dict.fromkeys(self._operators.values()))

    def described(self) -> list[Operator]:
        """The operators, in model order."""
        sizes: Counter[str] = Counter()
        for name, parameter in self._parameters.items():
            sizes[self._operators[name]] += parameter.numel()
        return [_operator(name, size) for name, size in sizes.items()]

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields the slots of a detail of some operators; rank 0 holds the first copy."""
        wanted = set(operators)
        for name, parameter in self._parameters.items():
            if self._operators[name] in wanted:
                shape = tuple(parameter.shape)
                box, replica = Region((0,) * len(shape), shape), (0, 0, self._rank)
                piece = Piece(name, shape, box, parameter.detach(), start=0, replica=replica, padded=False)
                owned = OwnedSlice(parameter, 0, parameter.numel(), self._slots(parameter, detail), sharded=False)
                yield from fragments_of(owned, [piece])

    def _slots(self, parameter: torch.nn.Parameter, detail: Detail) -> dict[str, torch.Tensor]:
        weights, moments = parameter.detach(), self._optimizer.state[parameter]
        if detail is Detail.COMPUTE:
            slots = {"param": weights}
        elif detail is Detail.GRAD:
            if parameter.grad is None:  # allocated for loading
                parameter.grad = torch.zeros_like(parameter)
            slots = {"grad": parameter.grad}
        else:
            slots = {"master": weights} | {moment: moments[moment] for moment in MOMENTS}
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
        """Number of updates of each operator's moments."""
        return {self._operators[name]: int(self._count(parameter)) for name, parameter in self._parameters.items()}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates by operator."""
        for name, parameter in self._parameters.items():
            if self._operators[name] in steps:
                self._count(parameter).fill_(steps[self._operators[name]])

    def _count(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._optimizer.state[parameter]["step"]

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
            raise FreezingError(f"this model cannot freeze {frozen[0]}: take a policy without replay of windows")

    def activate(self, operators: Iterable[str]) -> None:
        """No-op: no operator is ever frozen."""


def _operator(name: str, size: int) -> Operator:
    _, *place = name.split(".")
    if not place:
        return Operator(name, name, None, None, size)
    layer, kind, *expert = place
    return Operator(name, kind, int(layer), int(expert[0]) if expert else None, size)
