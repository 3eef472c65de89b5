"""Counts the tokens that each expert has learned, which of them are saved, and the cost of faults.

Without partial checkpoints, the state that a run resumes from contains every update. With them, an expert may be
restored to an earlier state than the rest. For each expert, the token ledger counts the tokens *given* to it until now,
and the tokens that its live state has *learned*. The difference is *lost*. Experts may process lost tokens later with
extra capacity (MoEtion, section 6).

Like the training state, a ledger belongs to an iteration and is stored with it. A recovery loads the ledger of the
iteration that it resumes from. So replayed tokens are not counted twice, losses before that iteration stay booked, and
losses after it are dropped.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moc.files import decode
from moc.files.decode import Count, StateError
from moc.policy.errors import PolicyError

TokenTable = tuple[tuple[Count, ...], ...]
"""Tokens by index of the layer among layers with experts, and by expert."""


class CapacityBoost(NamedTuple):
    """Capacity boost of experts that lost tokens, as a fraction, for at most ``iterations`` iterations."""

    fraction: float
    iterations: int


@dataclass(frozen=True)
class TokenDebt:
    """Tokens that experts must compensate; immutable, identical on every rank.

    Attributes:
        tokens: tokens to compensate.
        made_up: tokens compensated so far: processed beyond capacity.
        left: iterations left; 0 once all tokens are compensated.
    """

    tokens: TokenTable
    made_up: TokenTable
    left: Count

    @classmethod
    def after_recovery(
        cls, lost: Sequence[Sequence[int]], iterations: int, before: TokenDebt | None = None
    ) -> TokenDebt | None:
        """Returns the debt after a recovery: its lost tokens, and tokens still owed from before.

        Args:
            lost: tokens lost to this recovery; negative where a newer state than before was found.
            iterations: iterations for compensation; they restart if any tokens were lost.
            before: debt of the iteration that the run resumes from; continues unchanged if nothing was lost.
        """
        if not any(map(any, lost)):
            return before
        debt = _summed(before.remaining_debt, lost) if before is not None else lost
        tokens = tuple(tuple(max(0, number) for number in row) for row in debt)
        return cls(tokens, _zeros(lost), iterations if any(map(any, tokens)) else 0)

    @property
    def remaining_debt(self) -> TokenTable:
        """Tokens not compensated yet; 0 when the iterations are over."""
        pairs = zip(self.tokens, self.made_up, strict=True)
        return tuple(tuple(max(0, t - m) * bool(self.left) for t, m in zip(*rows, strict=True)) for rows in pairs)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens to compensate over all experts, and how many of them are compensated."""
        pairs = [pair for rows in zip(self.tokens, self.made_up, strict=True) for pair in zip(*rows, strict=True)]
        return sum(tokens for tokens, _ in pairs), sum(map(min, pairs))

    def after_iteration(self, beyond: Sequence[Sequence[int]]) -> TokenDebt:
        """Returns the debt after one more iteration, with these tokens processed by experts beyond their capacity."""
        debt = replace(self, made_up=_summed(self.made_up, beyond), left=max(0, self.left - 1))
        return debt if any(map(any, debt.remaining_debt)) else replace(debt, left=0)


def _summed(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> TokenTable:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(first, second, strict=True))


def _zeros(like: Sequence[Sequence[int]]) -> TokenTable:
    return tuple((0,) * len(row) for row in like)


class Version(NamedTuple):
    """A saved state of one expert: its iteration, and the tokens that it has learned."""

    iteration: Count
    learned: Count


_TIERS = ("memory", "storage", "peers")

Versions = tuple[tuple[Version, ...], ...]
"""Versions by index of the layer and by expert."""


class PendingSave(NamedTuple):
    """A save not known to be complete: its iteration, its experts by layer, and their learned tokens."""

    iteration: Count
    experts: tuple[tuple[Count, tuple[Count, ...]], ...]
    learned: TokenTable


@dataclass(frozen=True)
class TokenLedger:
    """Token counts after ``iteration`` iterations, identical on every rank; immutable, methods return new ledgers.

    Attributes:
        layers: global numbers of the layers with experts, ascending.
        given: tokens by layer and expert since training began.
        learned: tokens whose updates are in the live state.
        routed: tokens that routers sent to experts, by layer, including dropped ones: T_i TopK_i of MoC's eq. 7.
        memory: newest version of each expert in memory whose snapshot is complete.
        peers: newest version of each expert with copies in other nodes' memory; equals ``memory`` without peers.
        storage: newest version of each expert in storage.
        to_memory: snapshots in progress, oldest first.
        to_peers: experts of these that are copied to other nodes.
        to_storage: snapshots being persisted, oldest first.
        debt: lost tokens that experts compensate with extra capacity; None if there never were any.
    """

    iteration: Count
    layers: tuple[Count, ...]
    given: TokenTable
    learned: TokenTable
    routed: tuple[Count, ...]
    memory: Versions
    storage: Versions
    peers: Versions
    to_memory: tuple[PendingSave, ...] = ()
    to_storage: tuple[PendingSave, ...] = ()
    to_peers: tuple[PendingSave, ...] = ()
    debt: TokenDebt | None = None

    @classmethod
    def empty(cls, experts: Mapping[int, int]) -> TokenLedger:
        """Returns an empty ledger, before the first iteration, for numbers of experts by global layer number."""
        layers = tuple(sorted(experts))
        zeros = tuple((0,) * experts[layer] for layer in layers)
        versions = tuple((Version(0, 0),) * experts[layer] for layer in layers)
        return cls(0, layers, zeros, zeros, (0,) * len(layers), versions, versions, versions)

    def after_iteration(
        self,
        counts: Mapping[int, Sequence[int]],
        sent: Mapping[int, int] | None = None,
        beyond: Mapping[int, Sequence[int]] | None = None,
    ) -> TokenLedger:
        """Returns the ledger after one more iteration.

        Args:
            counts: tokens that each expert processed over all ranks, by layer.
            sent: tokens times TopK of the iteration by layer, if capacity may have dropped some; by default the sum of
                ``counts``.
            beyond: tokens in ``counts`` that experts processed beyond their capacity; by default none.

        Raises:
            ValueError: layers or experts differ from the ledger's, or a count is negative.
        """
        rows = [self._row(counts, layer) for layer in self.layers]
        extra = [self._row(beyond, layer) if beyond else (0,) * len(self.load[layer]) for layer in self.layers]
        total = [sum(row) for row in rows] if sent is None else [sent[layer] for layer in self.layers]
        return dataclasses.replace(
            self,
            iteration=self.iteration + 1,
            given=_added(self.given, rows),
            learned=_added(self.learned, rows),
            routed=tuple(map(sum, zip(self.routed, total, strict=True))),
            debt=self.debt and self.debt.after_iteration(extra),
        )

    def with_snapshot(
        self,
        experts: Mapping[int, Iterable[int]] | None,
        storage: Mapping[int, Iterable[int]] | None = None,
        peers: Mapping[int, Iterable[int]] | None = None,
    ) -> TokenLedger:
        """Returns the ledger after a snapshot has begun at this iteration.

        Args:
            experts: saved experts by layer; absent layers save none. None if the snapshot began earlier.
            storage: experts that are persisted; None if the snapshot is not.
            peers: experts that are copied to other nodes; None for all.
        """
        peers = experts if peers is None else peers
        started = {"to_memory": experts, "to_storage": storage, "to_peers": peers}
        return dataclasses.replace(
            self,
            **{
                name: (*getattr(self, name), self._pending_save(saved))
                for name, saved in started.items()
                if saved is not None
            },
        )

    def with_snapshot_completed(self, iteration: int) -> TokenLedger:
        """Returns the ledger after an iteration's snapshot, and its copies, are complete in memory; drops earlier ones.

        Raises:
            ValueError: no snapshot was begun at that iteration.
        """
        memory, later = _completed(self.memory, self.to_memory, iteration, "snapshot")
        peers, copies = _completed(self.peers, self.to_peers, iteration, "copy")
        return dataclasses.replace(self, memory=memory, to_memory=later, peers=peers, to_peers=copies)

    def with_persist_completed(self, iteration: int) -> TokenLedger:
        """Returns the ledger after a write to storage is complete, as :meth:`with_snapshot_completed`."""
        storage, later = _completed(self.storage, self.to_storage, iteration, "snapshot for storage")
        return dataclasses.replace(self, storage=storage, to_storage=later)

    def after_recovery(
        self, restored: Mapping[int, Mapping[int, int]], other_ledgers: Iterable[TokenLedger] = ()
    ) -> TokenLedger:
        """Returns the ledger of a run that resumes from this iteration with some experts in an earlier state.

        Such an expert loses the tokens given after its state's iteration. The loss is relative to the tokens that the
        state has learned. So losses to earlier faults are not booked again, and resuming twice from an iteration books
        the loss once.

        Args:
            restored: iteration of each restored expert's state, by layer and expert; 0 is the state before training.
                Other experts have the state of this iteration.
            other_ledgers: ledgers stored with other snapshots. They are needed if an expert's state is older than its
                newest version in memory and storage (after a damaged snapshot): only they have its learned tokens.

        Raises:
            ValueError: a state is newer than this ledger, or no ledger has its learned tokens.
        """
        ledger_by_iteration = {ledger.iteration: ledger for ledger in other_ledgers}
        for layer in restored:
            self._layer_index(layer)
        learned = list(map(list, self.learned))
        saved_in = {name: list(map(list, getattr(self, name))) for name in _TIERS}
        for position, layer in enumerate(self.layers):
            for expert in range(len(learned[position])):
                iteration = restored.get(layer, {}).get(expert, self.iteration)
                version = self._version(layer, expert, iteration, ledger_by_iteration)
                learned[position][expert] = version.learned
                for name, table in saved_in.items():
                    # The restored version is complete; newer ones were unusable and are removed.
                    pending = getattr(self, f"to_{name}")
                    saved = [v for save in pending if (v := _saved(save, position, expert)) and v == version]
                    table[position][expert] = min(version, max([table[position][expert], *saved]))
        tables = {"learned": _frozen(learned)} | {name: _frozen(table) for name, table in saved_in.items()}
        return dataclasses.replace(self, **tables, **{f"to_{name}": () for name in _TIERS})

    def with_debt(self, base: TokenLedger, iterations: int) -> TokenLedger:
        """Returns this ledger, :meth:`after_recovery` from ``base``, with iterations to compensate losses."""
        lost = [tuple(map(operator.sub, *rows)) for rows in zip(base.learned, self.learned, strict=True)]
        return dataclasses.replace(self, debt=TokenDebt.after_recovery(lost, iterations, base.debt))

    @property
    def remaining_debt(self) -> dict[int, tuple[int, ...]]:
        """Lost tokens not compensated yet, by layer and expert; empty if there are none."""
        rows = () if self.debt is None else self.debt.remaining_debt
        return dict(zip(self.layers, rows, strict=True)) if any(map(any, rows)) else {}

    @property
    def lost(self) -> dict[int, tuple[int, ...]]:
        """Tokens lost to all faults, by layer and expert: the live state lacks their updates."""
        rows = zip(self.layers, self.given, self.learned, strict=True)
        return {layer: tuple(map(operator.sub, routed, learned)) for layer, routed, learned in rows}

    @property
    def load(self) -> dict[int, tuple[int, ...]]:
        """Tokens given since training began, by layer and expert: the ``load`` of policies."""
        return dict(zip(self.layers, self.given, strict=True))

    @property
    def since_snapshot(self) -> dict[int, tuple[int, ...]]:
        """Tokens learned since the newest version in memory, by layer and expert."""
        return self._since(self.memory)

    @property
    def since_persist(self) -> dict[int, tuple[int, ...]]:
        """Tokens learned since the newest version in storage, by layer and expert."""
        return self._since(self.storage)

    def plt(self, routed: Mapping[int, int] | None = None) -> float:
        """Returns the proportion of lost tokens: the mean of :meth:`plt_by_layer` (MoC, section 3.1.2, eq. 7).

        Args:
            routed: T_i TopK_i of the full training by layer; by default the tokens routed so far.
        """
        shares = self.plt_by_layer(routed).values()
        return sum(shares) / len(shares) if shares else 0.0

    def plt_by_layer(self, routed: Mapping[int, int] | None = None) -> dict[int, float]:
        """Returns the tokens lost to all faults as a share of T_i TopK_i, by layer; 0 if nothing was routed."""
        total = dict(zip(self.layers, self.routed, strict=True)) if routed is None else routed
        return {layer: sum(lost) / total[layer] if total[layer] else 0.0 for layer, lost in self.lost.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the ledger as JSON-compatible values; nothing is copied, since its values never change."""
        return decode.field_values(self) | {"debt": None if self.debt is None else decode.field_values(self.debt)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TokenLedger:
        """Restores a :meth:`state_dict`, directly or through JSON.

        Raises:
            ValueError: the state is not from :meth:`state_dict`, or contradicts itself.
        """
        ledger = decode.convert_state(state, cls, "a token ledger")
        debt = () if ledger.debt is None else (ledger.debt.tokens, ledger.debt.made_up)
        tables = (ledger.given, ledger.learned, ledger.memory, ledger.storage, ledger.peers, *debt)
        shapes = {tuple(map(len, table)) for table in tables}
        pending = (*ledger.to_memory, *ledger.to_storage, *ledger.to_peers)
        fits = len(shapes) == 1 and len(ledger.given) == len(ledger.layers) == len(ledger.routed)
        if not fits or list(ledger.layers) != sorted(set(ledger.layers)) or not all(map(ledger._contains, pending)):
            raise StateError(
                "this state of a token ledger contradicts itself. Fix: start without it",
            )
        return ledger

    def _contains(self, save: PendingSave) -> bool:
        """Returns whether the experts of a save belong to this ledger and each have a number of tokens."""
        return len(save.experts) == len(save.learned) and all(
            position < len(self.given)
            and len(experts) == len(tokens)
            and max(experts, default=-1) < len(self.given[position])
            for (position, experts), tokens in zip(save.experts, save.learned, strict=True)
        )

    def _layer_index(self, layer: int) -> int:
        if layer not in self.layers:
            raise PolicyError(
                f"layer {layer} has no experts that the ledger counts. Fix: report the layers {self.layers}",
                code="counts-misfit",
            )
        return self.layers.index(layer)

    def _row(self, counts: Mapping[int, Sequence[int]], layer: int) -> tuple[int, ...]:
        row, experts = tuple(map(int, counts.get(layer, ()))), len(self.given[self._layer_index(layer)])
        if counts.keys() - set(self.layers) or len(row) != experts or min(row) < 0:
            raise PolicyError(
                f"the counts of iteration {self.iteration + 1} do not fit the {experts} experts of layer {layer}. Fix: "
                f"report one number of tokens for each expert of the layers {self.layers}",
                code="counts-misfit",
            )
        return row

    def _pending_save(self, experts: Mapping[int, Iterable[int]]) -> PendingSave:
        chosen = tuple((self._layer_index(layer), tuple(sorted(numbers))) for layer, numbers in sorted(experts.items()))
        learned = tuple(tuple(self.learned[position][e] for e in numbers) for position, numbers in chosen)
        return PendingSave(self.iteration, chosen, learned)

    def _version(
        self, layer: int, expert: int, iteration: int, ledger_by_iteration: Mapping[int, TokenLedger]
    ) -> Version:
        position = self._layer_index(layer)
        if iteration > self.iteration:
            raise PolicyError(
                f"expert {expert} of layer {layer} cannot have the state of iteration {iteration} when the run "
                f"continues from {self.iteration}. Fix: take the ledger of the iteration that it continues from",
                code="ledger-incomplete",
            )
        if iteration == self.iteration:
            return Version(iteration, self.learned[position][expert])
        learned = {0: 0} | {
            i: ledger.learned[ledger._layer_index(layer)][expert] for i, ledger in ledger_by_iteration.items()
        }
        for save in (*self.to_memory, *self.to_storage, *self.to_peers):
            if saved := _saved(save, position, expert):
                learned[save.iteration] = saved.learned
        learned |= {v.iteration: v.learned for v in (getattr(self, name)[position][expert] for name in _TIERS)}
        if iteration not in learned:
            raise PolicyError(
                f"what expert {expert} of layer {layer} had learned by iteration {iteration} is not in the ledger of "
                f"iteration {self.iteration}. Fix: add the ledger that was stored with the snapshot of {iteration}",
                code="ledger-incomplete",
            )
        return Version(iteration, learned[iteration])

    def _since(self, table: Versions) -> dict[int, tuple[int, ...]]:
        rows = zip(self.layers, self.learned, table, strict=True)
        return {
            layer: tuple(map(operator.sub, learned, (version.learned for version in versions)))
            for layer, learned, versions in rows
        }


def _added(table: TokenTable, rows: Iterable[Sequence[int]]) -> TokenTable:
    return tuple(tuple(map(sum, zip(old, new, strict=True))) for old, new in zip(table, rows, strict=True))


def _frozen(rows: Iterable[Iterable]) -> tuple[tuple, ...]:
    return tuple(map(tuple, rows))


def _saved(save: PendingSave, position: int, expert: int) -> Version | None:
    for (layer_position, experts), learned in zip(save.experts, save.learned, strict=True):
        if layer_position == position and expert in experts:
            return Version(save.iteration, learned[experts.index(expert)])
    return None


def _completed(
    table: Versions, pending: tuple[PendingSave, ...], iteration: int, kind: str
) -> tuple[Versions, tuple[PendingSave, ...]]:
    """Returns the versions after the save begun at an iteration is complete, and the saves still in progress."""
    completed = next((save for save in pending if save.iteration == iteration), None)
    if completed is None:
        raise PolicyError(
            f"no {kind} was started at iteration {iteration}. Fix: call with_snapshot() first",
            code="ledger-incomplete",
        )
    rows = list(map(list, table))
    for (position, experts), learned in zip(completed.experts, completed.learned, strict=True):
        for expert, tokens in zip(experts, learned, strict=True):
            rows[position][expert] = Version(iteration, tokens)
    return _frozen(rows), tuple(save for save in pending if save.iteration > iteration)
