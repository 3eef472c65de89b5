"""What this rank saves of a model, for any plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from moc.sharding import Scheme
from moc.sharding.shares import Stage, share_of, shares
from moc.state.detail import Detail
from moc.state.fragments import Fragment
from moc.state.training_state import TrainingState
from moc.store.manifest import OperatorEntry


class Contents:
    """The fragments that fall to this rank by the sharding rules; remembered, since they are views that stay.

    Args:
        state: the training state of this rank.
        stage: what all ranks of its pipeline stage hold.
        rank: this rank.
        scheme: the rules.
    """

    def __init__(self, state: TrainingState, stage: Stage, rank: int, scheme: Scheme):
        self._state, self._stage, self._rank, self._scheme = state, stage, rank, scheme
        self._known: dict[tuple, list[Fragment]] = {}

    def fragments(self, operators: Mapping[str, Detail]) -> list[Fragment]:
        """What this rank saves of some operators, each at its detail, in the order of live memory."""
        key = tuple(operators.items())
        if key not in self._known:
            held = [
                fragment
                for detail in dict.fromkeys(operators.values())
                for fragment in self._state.fragments((o for o, d in operators.items() if d is detail), detail)
            ]
            mine = shares(self._stage, operators, self._scheme).get(self._rank, [])
            self._known[key] = sorted(share_of(held, mine), key=lambda f: (f.slot, f.view.data_ptr()))
        return self._known[key]

    def entries(self, operators: Mapping[str, Detail], fragments: Iterable[Fragment]) -> dict[str, OperatorEntry]:
        """What these fragments are of each operator, and the updates that its moments have seen by now."""
        elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for fragment in fragments:
            elements[fragment.operator][fragment.slot] += fragment.region.numel
        steps = self._state.steps()
        return {
            name: OperatorEntry(operators[name].value, steps.get(name), dict(slots)) for name, slots in elements.items()
        }
