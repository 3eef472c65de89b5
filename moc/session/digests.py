"""Computes the digests of each committed iteration, and verifies the state after recoveries and moves by them.

    completed    each worker sums its part of the state, on a CPU in a thread; nothing is sent
    all-reduce   of the next iteration: the sums of all workers become the digests of the iteration
    snapshot     contains the sums of each writer, so that it needs no all-reduce
    resume       the state must have the digests of its iteration: those of an all-reduce that a survivor took part in,
                 those in the snapshot, or those of the survivors that keep their state; replicas must be identical
    replay       by some stages: the last iteration lacks an all-reduce, so the one before must have its digests
    resize       survivors of another number of workers: their parts add up to the digests of the complete state
    move         the digests of the complete state must not change
    scalars      schedule, loss scale and counters that a worker keeps must have the hashes of their iteration

:mod:`moc.state.digests` defines the digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from moc.background import background
from moc.runtime.collectives import gather, sum_over_workers
from moc.runtime.device import HostCopy
from moc.session.engine import CommitParticipant, Engine
from moc.state.digests import (
    MASK,
    MODULE,
    Key,
    StateDigest,
    chunk_sums,
    differing_operators,
    from_limbs,
    key_of,
    keys_of,
    part_id,
    part_ids,
    to_limbs,
    to_text,
    total_of,
)
from moc.state.interface import TrainingState
from moc.state.operators import Detail, Fragment
from moc.state.record import Position
from moc.store.errors import CheckpointError
from moc.store.manifest import StateDigests

_MOST = 4  # iterations whose digests a worker remembers


@dataclass
class KnownDigests:
    """Digests that a worker keeps after the loss of another one.

    Attributes:
        own: iteration and sums of this worker's part of the state, replicas included, by key.
        totals: by iteration, the digests of the complete state.
        elements: elements of the complete state, by key.
        scalars: iteration, hashes of this worker's non-tensor state by name, and updates of its operators.
    """

    own: tuple[int, Mapping[Key, int]] | None = None
    totals: dict[int, Mapping[Key, int]] = field(default_factory=dict)
    elements: Mapping[Key, int] = field(default_factory=dict)
    scalars: tuple[int, Mapping[str, str], Mapping[str, int]] | None = None

    def add(self, iteration: int, total: Mapping[Key, int]) -> None:
        """Adds the digests of an iteration, and drops the oldest beyond the limit."""
        self.totals[iteration] = total
        for dropped in sorted(self.totals)[:-_MOST]:
            del self.totals[dropped]

    def changed_scalars(self, iteration: int, scalars: Mapping[str, Any], updates: Mapping[str, int]) -> list[str]:
        """Returns the names of non-tensor state that has changed since this worker remembered it.

        Args:
            iteration: iteration of the state.
            scalars: the state by name; names that were not remembered are ignored.
            updates: by operator, the updates that its moments have seen.
        """
        if self.scalars is None or self.scalars[0] != iteration:
            return []
        _, hashes, known_updates = self.scalars
        current = hash_values({name: scalars[name] for name in hashes if name in scalars})
        changed = [name for name in current if current[name] != hashes[name]]
        return changed + [
            f"updates of {name}" for name in updates if known_updates.get(name, updates[name]) != updates[name]
        ]


def hash_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the xxh3-64 of each JSON-compatible value."""
    return {
        name: xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode()) for name, value in values.items()
    }


@dataclass(frozen=True)
class LocalPart:
    """One rank's part of an operator, or one of its tensor chunks.

    Attributes:
        chunks: ID of its tensor chunks: see :class:`moc.recovery.plan.JobInventory`.
        sums: its sums by optimizer-state key; 0 is absent.
        is_kept: whether the state equals the state that this rank has kept since the iteration was committed; None if
            the rank has kept none.
        elements: its elements by optimizer-state key.
    """

    chunks: str
    sums: Mapping[str, int]
    is_kept: bool | None = None
    elements: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """Result of comparing the digests of the state with those of its iteration; identical on all workers.

    Attributes:
        iteration: iteration of the state.
        verified: number of operators whose digests are equal.
        unverified: operators without a known digest.
        replayed: those of them that were verified in the replay, at an earlier iteration.
        wrong: operators with another digest.
        ranks: ranks whose kept state has changed, or whose replica differs.
    """

    iteration: int
    verified: int
    unverified: tuple[str, ...] = ()
    replayed: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()

    def __str__(self) -> str:
        text = f"{self.verified} operators have the digests of the original iteration"
        unknown = set(self.unverified) - set(self.replayed)
        groups = (
            (self.replayed, "the digests of an earlier iteration"),
            (unknown, "no known digest"),
            (self.wrong, "another digest"),
        )
        return text + "".join(f", {len(operators)} {description}" for operators, description in groups if operators)


def compare_digests(
    iteration: int,
    parts: Sequence[Mapping[str, Sequence[LocalPart]]],
    total: Mapping[Key, int],
    reference: Mapping[Key, int] | None,
    stale: Collection[str] = (),
) -> Verification:
    """Compares the state with the digests of its iteration.

    Args:
        iteration: iteration of the state.
        parts: by rank, its parts of each operator.
        total: digests of the state.
        reference: digests of the iteration; None if no survivor and no snapshot has them.
        stale: operators without a digest: restored from older snapshots by a fallback, or incomplete.
    """
    replicas: dict[tuple[str, str], list[tuple[int, LocalPart]]] = defaultdict(list)
    for rank, rank_parts in enumerate(parts):
        for name, operator_parts in rank_parts.items():
            for part in operator_parts:
                replicas[name, part.chunks].append((rank, part))
    wrong, kept, unverified_names, ranks = set(), set(), set(), set()
    for (name, _), copies in replicas.items():
        kept_sums = [part.sums for _, part in copies if part.is_kept]
        expected = kept_sums[0] if kept_sums else copies[0][1].sums
        differing = [rank for rank, part in copies if part.is_kept is False or part.sums != expected]
        ranks.update(differing)
        (wrong if differing else kept if kept_sums else unverified_names).add(name)
    names = {name for name, _ in replicas}
    comparable = kept - unverified_names - set(stale)
    if reference is not None:
        # an absent digest is 0, except of tensors whose padding depends on the layout, and of user modules, which
        # converted checkpoints do not contain
        absent = total.keys() - reference.keys()
        incomparable = {name for name, slot in absent if ":" in slot or slot == MODULE}
        wrong |= set(differing_operators(total, reference, {*stale, *incomparable}))
        comparable = names - incomparable - set(stale)
    return Verification(
        iteration,
        verified=len(comparable - wrong),
        unverified=tuple(sorted(names - comparable - wrong)),
        wrong=tuple(sorted(wrong)),
        ranks=frozenset(ranks),
    )


def add_parts(
    parts: Sequence[Mapping[str, Sequence[LocalPart]]], elements: Mapping[Key, int]
) -> tuple[dict[Key, int], frozenset[str]]:
    """Returns the digests of the state that distinct parts of operators add up to, and the other operators.

    It needs no layout in force: after a change in the number of workers, state may be on any number of them.

    Args:
        parts: by rank, its parts of each operator; equal chunks are counted once.
        elements: elements of the complete state; the parts of an operator with others overlap, or lack some.
    """
    total: dict[Key, int] = {}
    counted: dict[Key, int] = defaultdict(int)
    distinct = {
        (name, part.chunks): part
        for rank_parts in parts
        for name, operator_parts in rank_parts.items()
        for part in operator_parts
    }
    for (name, _), part in distinct.items():
        for slot, count in part.elements.items():
            counted[name, slot] += count
        for slot, value in part.sums.items():
            total[name, slot] = (total.get((name, slot), 0) + value) & MASK
    names = {name for name, _ in distinct} | {name for name, _ in elements}
    return total, frozenset(names.intersection(differing_operators(counted, elements)))


def unlike_masters(state: TrainingState) -> set[str]:
    """Returns the operators on this rank with 16-bit weights that are not their rounded masters."""
    masters = {
        (master_fragment.name, master_fragment.region): master_fragment.view
        for master_fragment in state.fragments(state.operators(), Detail.MASTER)
    }
    operators = set()
    for fragment in state.fragments(state.operators(), Detail.COMPUTE):
        weights, master = fragment.view.view(-1), masters.get((fragment.name, fragment.region))
        if master is None or weights.itemsize != 2 or master.dtype != torch.float32:
            continue
        rounded = master.view(-1).to(weights.device, weights.dtype)  # with offload, from host memory
        if not torch.equal(weights.view(torch.int16), rounded.view(torch.int16)):
            operators.add(fragment.operator)
    return operators


def name_operators(operators: Sequence[str]) -> str:
    """Returns up to three operators for a message."""
    more = f" and {len(operators) - 3} more operators" if len(operators) > 3 else ""
    return ", ".join(operators[:3]) + more


class Digests(CommitParticipant):
    """Digests of the state in one generation.

    Args:
        engine: engine whose state they describe.
        interval: iterations between digests; 0 for none.
        known: digests that survive the generation.

    Attributes:
        stale: operators whose recovered state is of another iteration, and has no digest.
    """

    def __init__(self, engine: Engine, interval: int, known: KnownDigests):
        self._engine, self._interval, self._known = engine, interval, known
        self._keys = keys_of(self._fragments(), engine.operators, gather) if interval else ()
        self._sums: tuple[int, Future[Tensor]] | None = None  # of the last completed iteration
        self._thread = background("snapshot-digest") if engine.world.device.type == "cpu" else None
        self._is_pending = False  # no all-reduce has added these sums yet
        self._replayed: tuple[int, Tensor, Collection[str]] | None = None
        self._has_elements = False  # known.elements are of this generation
        self._unmoved: tuple[int, Mapping[Key, int], Collection[str]] | None = None  # verified, with the operators not
        self.stale: Collection[str] = ()
        self.renew()

    def renew(self) -> None:
        """Discards views of the previous state, after state has moved."""
        self._digest = StateDigest(self._fragments(), self._keys) if self._interval else None

    def completed(self, iteration: int) -> None:
        """Begins to sum this worker's part of the state after an update; communicates with no other worker.

        The state must not change before :meth:`contribution`, :meth:`keep` or :meth:`wait`.
        """
        self._sums = None
        if self._digest is None or iteration % self._interval:
            return
        if self._thread is None:  # on a device, the sums are computed after the update, and do not block the host
            self._set(iteration, self._digest.compute())
        else:
            self._sums, self._is_pending = (iteration, self._thread.submit(self._digest.compute)), True

    def remember_scalars(self, position: Position) -> None:
        """Hashes this worker's state at a position that is not tensors: schedule, loss scale, counters."""
        if self._interval:
            hashes = hash_values(self._engine.scalars(position))
            self._known.scalars = position.iteration, hashes, self._engine.state.steps()

    def wait(self) -> None:
        """Waits until the state has been read."""
        if self._sums is not None:
            wait([self._sums[1]])

    def contribution(self) -> dict[str, Tensor]:
        """Returns the contribution to the next all-reduce; the names are identical on all workers."""
        if self._digest is None or self._sums is None or not self._is_pending:
            return {}
        elements = {} if self._has_elements else {"digest_elements": self._digest.elements()[0].double()}
        return {"digests": to_limbs(self._sums[1].result()[0])} | elements

    def on_totals(self, totals: Mapping) -> None:
        """Receives the totals over all workers."""
        if self._sums is not None and "digests" in totals:
            self._known.add(self._sums[0], self._by_key(from_limbs(totals["digests"])))
            self._is_pending = False
        if "digest_elements" in totals:
            self._known.elements = self._by_key(map(int, totals["digest_elements"]))
            self._has_elements = True

    def of_snapshot(self, iteration: int) -> Callable[[], StateDigests | None]:
        """Returns a function that returns this worker's sums for its part of a snapshot; None if there are none.

        The function may wait for the device; it needs no lock.
        """
        sums, keys = self._sums, self._keys
        if sums is None or sums[0] != iteration:
            return lambda: None
        if self._thread is None:  # copied now: a later read would wait for all that is enqueued until then
            copied = HostCopy(sums[1].result()[0])
            return lambda: to_text(keys, copied.wait_unchecked().tolist())
        return lambda: to_text(keys, sums[1].result()[0].tolist())

    def keep(self, iteration: int) -> None:
        """Keeps this worker's sums for the next generation, if they describe this iteration, that of its state."""
        sums, self._known.own = self._sums, None
        if sums is not None and sums[0] == iteration:
            self._known.own = iteration, self._by_key(sums[1].result().sum(0).tolist())

    def checks_before(self, iteration: int) -> int | None:
        """Returns the last earlier iteration with a digest; None without digests."""
        return (iteration - 1) // self._interval * self._interval if self._interval else None

    def replayed(self, iteration: int, frozen: Collection[str]) -> None:
        """Sums this worker's part of the state after a replayed iteration; ``frozen`` operators are not compared."""
        if self._digest is not None:
            self._replayed = iteration, self._digest.compute(), frozenset(frozen)

    def verify_replay(self, result: Verification) -> Verification:
        """Compares the state of replayed stages at the last earlier iteration with a digest; a collective call."""
        assert self._digest is not None  # otherwise nothing was verified
        iteration, names = self.checks_before(result.iteration), self._engine.state.operators()
        local = self._replayed if self._replayed is not None and self._replayed[0] == iteration else None
        self._replayed = None
        reference = self._reference(iteration or 0, {}, 0)
        reports = gather((local is not None, names, sorted(local[2]) if local is not None else []))
        total = self._total(self._digest.compute() * 0 if local is None else local[1])
        if reference is None:
            return result
        not_compared = {
            name for is_replayed, rank_names, frozen in reports for name in (frozen if is_replayed else rank_names)
        }
        compared = {name for is_replayed, rank_names, _ in reports if is_replayed for name in rank_names} - not_compared
        wrong = compared.intersection(differing_operators(total, reference))
        replayed = tuple(name for name in result.unverified if name in compared - wrong)
        unverified = tuple(name for name in result.unverified if name not in wrong)
        all_wrong = tuple(sorted(wrong | set(result.wrong)))
        return dataclasses.replace(result, replayed=replayed, unverified=unverified, wrong=all_wrong)

    def verify(
        self,
        iteration: int,
        keeps_state: bool,
        saved: Mapping[str, StateDigests] | None = None,
        writers: int = 0,
        stale: Collection[str] = (),
        resized: bool = False,
    ) -> Verification | None:
        """Compares the state with the digests of its iteration; a collective call.

        Args:
            iteration: iteration of the state.
            keeps_state: this worker has kept its state since this iteration was committed.
            saved: by file of a snapshot of this iteration, the digests that this worker has read.
            writers: number of the snapshot's writers; 0 without a snapshot.
            stale: operators that a fallback has restored from older snapshots.
            resized: survivors of another number of workers hold the state, and move it afterwards.

        Returns:
            The result; None without digests.
        """
        if self._digest is None:
            return None
        sums = self._digest.compute()
        kept_sums = (
            self._known.own if keeps_state and self._known.own is not None and self._known.own[0] == iteration else None
        )
        local = self._parts(
            self._by_key(sums.sum(0).tolist()), None if kept_sums is None else kept_sums[1], by_chunk=resized
        )
        gathered = gather(
            {name: [dataclasses.astuple(part) for part in operator_parts] for name, operator_parts in local.items()}
        )
        parts = [
            {name: [LocalPart(*values) for values in operator_parts] for name, operator_parts in rank_parts.items()}
            for rank_parts in gathered
        ]
        reference = self._reference(iteration, saved or {}, writers)
        if resized:
            known_elements = self._known.elements
            elements = next(filter(None, gather(to_text(known_elements.keys(), known_elements.values()))), {})
            total, incomplete = add_parts(parts, total_of([elements]))
            stale = {*stale, *incomplete}
        else:
            total = self._total(sums)
        result = compare_digests(iteration, parts, total, reference, stale)
        if not result.wrong and resized:  # all state is there, but not where the layout in force expects it
            self._sums, self._unmoved = None, (iteration, total, result.unverified)
            if not result.unverified:
                self._known.add(iteration, total)
        elif not result.wrong:
            self._set(iteration, sums)
        return result

    @contextlib.contextmanager
    def moving(self, iteration: int) -> Iterator[None]:
        """Context of a move of state between workers, which must not change the state; a collective call.

        Raises:
            CheckpointError: on all workers: the move has changed the state.
        """
        if self._digest is None:
            yield
            return
        stale: Collection[str] = ()
        if self._unmoved is not None and self._unmoved[0] == iteration:
            _, before, stale = self._unmoved
        elif self._sums is not None and self._sums[0] == iteration:
            before = self._total(self._sums[1].result())
            self._known.add(iteration, before)
        else:  # after a recovery: an interrupted move may have left state on several workers
            before, stale = self._reference(iteration, {}, 0), self.stale
        # an interrupted move leaves other parts, and another placement of experts, on this worker
        self._sums = self._unmoved = self._known.scalars = None
        yield
        self.renew()
        assert self._digest is not None  # as before
        sums = self._digest.compute()
        if before is not None and (wrong := differing_operators(self._total(sums), before, stale)):
            raise CheckpointError(
                f"a move of state between workers has changed {name_operators(wrong)} after iteration {iteration}. "
                "Fix: start again, which loads the newest snapshot; if it happens again, report it",
                code="state-digest-differs",
            )
        self._set(iteration, sums)

    def _fragments(self) -> Iterator[Fragment]:
        return self._engine.state.fragments(self._engine.state.operators(), Detail.FULL)

    def _set(self, iteration: int, sums: Tensor) -> None:
        if iteration % self._interval == 0:
            future: Future[Tensor] = Future()
            future.set_result(sums)
            self._sums, self._is_pending = (iteration, future), True

    def _total(self, sums: Tensor) -> dict[Key, int]:
        added = sum_over_workers({"digests": to_limbs(sums[0])}, self._engine.world)
        return self._by_key(from_limbs(added["digests"]))

    def _by_key(self, sums: Iterable[int]) -> dict[Key, int]:
        return {key: value & MASK for key, value in zip(self._keys, sums, strict=True) if value & MASK}

    def _parts(
        self, sums: Mapping[Key, int], kept_sums: Mapping[Key, int] | None, by_chunk: bool
    ) -> dict[str, list[LocalPart]]:
        """Returns this worker's part of each operator; with ``by_chunk``, each of its tensor chunks."""
        changed = (
            None if kept_sums is None else {*differing_operators(sums, kept_sums), *unlike_masters(self._engine.state)}
        )
        parts: dict[str, list[LocalPart]] = defaultdict(list)
        if by_chunk:
            for fragment, value in chunk_sums(self._fragments()):
                operator, slot = key_of(fragment)
                is_kept = None if changed is None else operator not in changed
                counts = {slot: fragment.region.numel}
                parts[operator].append(LocalPart(part_id([fragment]), {slot: value}, is_kept, counts))
            return parts
        by_slot: dict[str, dict[str, int]] = defaultdict(dict)
        for (operator, slot), value in sums.items():
            by_slot[operator][slot] = value
        for name, chunks in part_ids(self._engine.state).items():
            parts[name].append(LocalPart(chunks, by_slot[name], None if changed is None else name not in changed))
        return parts

    def _reference(self, iteration: int, saved: Mapping[str, StateDigests], writers: int) -> dict[Key, int] | None:
        """Returns the digests of an iteration from a worker that took part in its all-reduce, or from a snapshot."""
        world, known_total = self._engine.world, self._known.totals.get(iteration)
        first_rank = next((rank for rank, is_known in enumerate(gather(known_total is not None)) if is_known), None)
        if first_rank is not None:
            texts = gather(
                to_text(known_total.keys(), known_total.values())
                if known_total is not None and world.rank == first_rank
                else {}
            )
            return total_of(texts)
        texts = gather((dict(saved), writers))
        files = {name: part for of_worker, _ in texts for name, part in of_worker.items()}
        writers = max(number for _, number in texts)
        return total_of(files.values()) if writers and len(files) == writers else None
