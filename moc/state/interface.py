"""The state that an engine trains, as fault tolerance sees it: what there is to save, load, freeze and activate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from moc.state.detail import Detail
from moc.state.fragments import Fragment


class FreezingError(RuntimeError):
    """Operators cannot be frozen; the message says why, and what to change."""


class TrainingState(Protocol):
    """The state of this rank's part of the model and its optimizer, by operator.

    Only :meth:`gather_weights` communicates.  All methods are called between iterations; gradients can be read from
    their reduction until the next iteration starts.
    """

    def operators(self) -> list[str]:
        """Names of the operators of which this rank holds a part, in model order."""
        ...

    def fragments(self, operators: Iterable[str], detail: Detail) -> Iterator[Fragment]:
        """Yields what lives on this rank of some operators, as views of live memory, in the same order each time.

        Over all ranks, the fragments with ``first_copy`` hold every element of every slot exactly once.

        Args:
            operators: names; those that live elsewhere are passed over.
            detail: how much of them.
        """
        ...

    def load(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes values into the live memory of a fragment, and keeps weights and masters consistent.

        After all ranks have loaded, :meth:`gather_weights` follows.

        Args:
            fragment: one that :meth:`fragments` gave, of any detail.
            values: ``fragment.region.numel`` elements in any shape, of the dtype of ``fragment.view``, on any device.

        Raises:
            ValueError: another number of elements, or another dtype.
        """

    def gather_weights(self) -> None:
        """Collects what of the weights data-parallel peers have loaded for this rank; a collective call of them."""

    def steps(self) -> dict[str, int]:
        """By operator, the updates that its moments have seen; operators without such a count are left out."""
        ...

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the number of updates of operators; those that live elsewhere are passed over."""

    @property
    def frozen(self) -> frozenset[str]:
        """The operators that are frozen, whether they live on this rank or not."""
        ...

    def freeze(self, operators: Iterable[str]) -> None:
        """Freezes operators until they are activated; called with the same operators on all ranks.

        A frozen operator computes forward and the gradients of its inputs, and takes no update; the gradients of all
        other operators stay bit-identical.

        Raises:
            FreezingError: they cannot be frozen; nothing has changed.
        """

    def activate(self, operators: Iterable[str]) -> None:
        """Lets frozen operators learn again, from the state that they have now; the others stay as they are.

        Raises:
            FreezingError: as :meth:`freeze`.
        """
