"""The interface of an engine's training state to fault tolerance: save, load, freeze and activate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from moc.errors import UserError
from moc.state.operators import Detail, Fragment


class FreezingError(UserError, RuntimeError):
    """Operators cannot be frozen; the message names the reason and the remedy."""

    code = "freezing-unsupported"


class TrainingState(Protocol):
    """The state of this rank's part of the model and its optimizer, by operator.

    Only :meth:`gather_weights` communicates.  All methods are called between iterations; gradients are readable after
    their reduction until the next iteration starts.
    """

    def operators(self) -> list[str]:
        """Returns the names of the operators that this rank holds, at least in part, in model order."""
        ...

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields this rank's fragments of some operators, as views of live memory, in a fixed order.

        Over all ranks, the fragments with ``first_copy`` hold every element of every slot exactly once.  Operators of
        other ranks are ignored.  If a policy saves gradients, their memory must stay the same too.
        """
        ...

    def load(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes values into the live memory of a fragment, and keeps weights and masters consistent.

        After all ranks have loaded, :meth:`gather_weights` must be called.

        Args:
            fragment: fragment from :meth:`fragments`, of any state subset.
            values: ``fragment.region.numel`` elements in any shape, of the dtype of ``fragment.view``, on any device.

        Raises:
            ValueError: number of elements or dtype differ.
        """

    def gather_weights(self) -> None:
        """Gathers the weights that data-parallel peers have loaded; collective among them."""

    def steps(self) -> dict[str, int]:
        """Returns the number of updates of each operator's moments; operators without a count are absent."""
        ...

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates by operator; operators of other ranks are ignored."""

    @property
    def frozen(self) -> frozenset[str]:
        """The frozen operators, on this rank or not."""
        ...

    def freeze(self, operators: Iterable[str]) -> None:
        """Freezes operators until activated; called with the same operators on all ranks.

        A frozen operator computes its forward pass and input gradients, and takes no update; the gradients of all other
        operators stay bit-identical.

        Raises:
            FreezingError: the operators cannot be frozen; nothing has changed.
        """

    def activate(self, operators: Iterable[str]) -> None:
        """Unfreezes operators, which continue from their current state; the other operators are unaffected.

        Raises:
            FreezingError: as :meth:`freeze`.
        """
