"""A small model of a job that takes snapshots, to enumerate all of its reachable states.

The buffer rotation is the real one.  The model adds the operations of ``moc/session/saving/pipeline.py`` and the
background work: copies, headers and writes that end at any time, workers at different positions between two commit
all-reduces, and leaders of nodes that commit later than others continue.  A kill is not a step: each reachable state
must be recoverable.

Intervals, the length of training, and the snapshots for storage are not fixed: any choice is possible at each
all-reduce.  The results therefore hold for every interval, and for runs of any length.

With windows, a snapshot is valid only with all snapshots of its window.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from moc.policy.windows import kept_of_windows
from moc.session.saving.stages import POSITIONS
from moc.snapshot.buffer_pool import Rotation, Slot
from moc.store.host_memory import most_copies

COPYING, COPIED, WHOLE, TORN = "copying", "copied", "whole", "torn"  # how far the content of a buffer is
NOTHING = (-1, TORN)


class Violation(Exception):
    """A state that the job cannot continue from; the message has the reason."""


@dataclass(frozen=True)
class Setting:
    """Configuration of the model.

    Attributes:
        nodes: the ranks of each node; the first one publishes in its memory.
        memory: there is a memory tier.
        stores: snapshots in memory may go to storage too, from when they begin, or at the end of the run.
        recovered: memory holds a snapshot of an earlier job, which this one resumes from.
        window: number of snapshots that are valid together.
        machine: the state machine.
        spare: buffers in addition to the ones needed to recover.
        removes_at_once: a leader removes the older snapshot together with publishing, rather than after the next vote.
        waits: the update waits for copies of the state that it changes.
        peers: each node keeps a copy of the previous node's snapshots; a snapshot is complete when all have it,
            and then any node may be lost with its memory.
        impatient: with peers, a snapshot is complete when it is committed.
        fails: storage may refuse what ranks write, or the manifest; then all give that snapshot up.
        waits_for_storage: with a memory tier, too, a rank without a buffer waits for writes.
        carries: snapshots are partial: the leader of a node retains missing experts of the previous snapshot, which
            is committed by then; its own part counts as finalized only afterwards.
        carries_late: its own part counts as finalized before that.
    """

    nodes: tuple[tuple[int, ...], ...] = ((0, 1),)
    memory: bool = True
    stores: bool = False
    recovered: bool = False
    window: int = 1
    machine: type[Rotation] = Rotation
    spare: int = 2
    removes_at_once: bool = False
    waits: bool = True
    peers: bool = False
    impatient: bool = False
    fails: bool = False
    waits_for_storage: bool = False
    carries: bool = False
    carries_late: bool = False

    @property
    def leaders(self) -> set[int]:
        """Ranks that commit in memory."""
        return {node[0] for node in self.nodes} if self.memory else set()

    @property
    def slots(self) -> int:
        """Number of buffers that are ever needed."""
        return self.machine.of(self.spare, self.memory, stores=self.stores).max_buffers(
            self.window, kept_of_windows(self.window)
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    def begin(self) -> State:
        """Returns the state after setup; snapshots are numbered, and a snapshot of an earlier job is number 0."""
        rotation = self.machine.of(self.spare, self.memory, [0] if self.recovered else [])
        # one buffer more: the one of the earlier job, which this one does not write to
        buffers = (*[NOTHING] * self.slots, (0, WHOLE))
        manifests = tuple(
            (Published(0, 0, tuple((rank, self.slots) for rank in node)),) if self.recovered else ()
            for node in self.nodes
        )
        copies = ((0,) if self.recovered else (),) * len(self.nodes) if self.peers else ()
        rank = Rank("vote", rotation, buffers, place=self.window)
        return State((rank,) * self.size, manifests, copies, begun=self.recovered)


class Taken(NamedTuple):
    """A snapshot and its buffer, and the first of its window if it is the last one."""

    number: int
    slot: int
    ends: int | None


class Published(NamedTuple):
    """A snapshot in the memory of a node, with its buffer by rank."""

    number: int
    ends: int | None
    files: tuple[tuple[int, int], ...]


class Rank(NamedTuple):
    """One process."""

    at: str  # vote, remove, publish, act, ended
    rotation: Rotation
    buffers: tuple[tuple[int, str], ...]
    newest: int = 0
    place: int = 1  # of the newest in its window, from 1 on
    stores: bool = False  # the window goes to storage, too
    copying: tuple[Taken, ...] = ()
    replicating: tuple[Taken, ...] = ()
    writing: tuple[Taken, ...] = ()
    written: int = 0  # of those, by this rank
    then: str = "go on"  # what to do after the vote; or "take", "take, to storage too", "store" the newest, or "end"
    waiting: bool = False  # a snapshot is due and there was no buffer
    publishes: tuple[Taken, ...] = ()
    removes: int | None = None  # what is older than this
    superseded: int | None = None  # the same, after the next all-reduce: the newer one is durable
    carrying: tuple[int, ...] = ()  # for these is still to be carried what they lack


class State(NamedTuple):
    """All processes, and the state that outlives them: buffers, manifests in each node's memory, and storage."""

    ranks: tuple[Rank, ...]
    manifests: tuple[tuple[Published, ...], ...]
    copies: tuple[tuple[int, ...], ...] = ()  # by node, of the one before it
    begun: bool = False  # a snapshot was published
    to_publish: tuple[int, ...] = ()  # in storage, by rank 0
    stored: int | None = None


def check(state: State, setting: Setting) -> None:
    """Checks the invariant: once a window was committed, a valid one exists.

    Raises:
        Violation: there is none.
    """
    if state.begun and not (is_safe(state) if setting.memory else state.stored is not None):
        ended = any(rank.at == "ended" for rank in state.ranks)
        if not (ended and state.stored == state.ranks[0].newest):
            raise Violation("no published snapshot is whole")


def is_safe(state: State) -> bool:
    """Whether a window is valid in memory, with peers after the loss of any node."""
    lost = range(len(state.manifests)) if state.copies else ()
    return any_whole_in_memory(state) and all(any_whole_in_memory(state, node) for node in lost)


def any_whole_in_memory(state: State, lost: int | None = None) -> bool:
    """Whether the manifests of all nodes name a window that all of their buffers hold.

    Args:
        state: of all.
        lost: a node without which it has to be so, but for the copy on the next one.
    """
    left = [manifests for node, manifests in enumerate(state.manifests) if node != lost]
    common = set.intersection(*({one.number for one in manifests} for manifests in left))
    if lost is not None:
        common &= set(state.copies[(lost + 1) % len(state.copies)])
    damaged = {
        one.number
        for manifests in left
        for one in manifests
        for rank, slot in one.files
        if state.ranks[rank].buffers[slot] != (one.number, WHOLE)
    }
    windows = [range(one.ends, one.number + 1) for one in left[0] if one.ends is not None]
    return any(common.issuperset(window) and not damaged.intersection(window) for window in windows)


def following(state: State, setting: Setting) -> Iterator[tuple[str, State]]:
    """Yields every possible next step: its description, and the state after it.

    Raises:
        Violation: a step writes invalid content, or the ranks disagree.
    """
    for number, rank in enumerate(state.ranks):
        for what, after in _beside(rank, _lacks(state, setting, number)):
            yield f"{number} {what}", _with(state, number, after)
        for coming in rank.carrying[:1]:
            if not _lacks_before(state, setting, number, coming):
                yield f"{number} carried", _with(state, number, rank._replace(carrying=rank.carrying[1:]))
    for node in range(len(state.copies)):
        yield from _copied(state, setting, node)
    if state.to_publish:
        first, *others = state.to_publish
        yield "stored", state._replace(to_publish=tuple(others), stored=first, begun=state.begun or not setting.memory)
        if setting.fails:
            yield "not published", state._replace(to_publish=tuple(others))
    if all(rank.at == "vote" and not (rank.waiting and not _has_waited(rank, setting)) for rank in state.ranks):
        yield from _commits(state, setting)
    for number, rank in enumerate(state.ranks):
        if rank.at in ("remove", "publish"):
            yield f"{number} {rank.at}", _led(state, setting, number)
        if rank.at == "act":
            yield f"{number} {rank.then}", _acted(state, setting, number)


def _beside(rank: Rank, lacks: bool) -> Iterator[tuple[str, Rank]]:
    """Steps of the threads of a rank: each at any time, in the order of the requests."""
    unsealed = _unsealed(rank)
    if unsealed and not lacks:
        yield "sealed", _filled(rank, unsealed, WHOLE)
    if rank.written < len(rank.writing):
        number, slot, _ = rank.writing[rank.written]
        holds, stage = rank.buffers[slot]
        if holds != number or stage == TORN:
            raise Violation("storage gets what is not whole")
        if stage == WHOLE:
            yield "written", rank._replace(written=rank.written + 1)


def _unsealed(rank: Rank) -> Taken | None:
    return next((taken for taken in rank.copying if not _sealed(rank, taken)), None)


def _lacks(state: State, setting: Setting, number: int) -> bool:
    """Whether what a leader is about to seal has to wait, since nothing can be carried for it yet."""
    unsealed = _unsealed(state.ranks[number])
    if not setting.carries or setting.carries_late or number not in setting.leaders or unsealed is None:
        return False
    return _lacks_before(state, setting, number, unsealed.number)


def _lacks_before(state: State, setting: Setting, number: int, coming: int) -> bool:
    """Whether the snapshot before one is not published yet, so that a leader can carry nothing out of it.

    Raises:
        Violation: it is not there any more, or its buffers are written over.
    """
    rank, before = state.ranks[number], coming - 1
    which = next(i for i, node in enumerate(setting.nodes) if node[0] == number)
    files = next((one.files for one in state.manifests[which] if one.number == before), None)
    if files is not None:
        if any(state.ranks[other].buffers[slot] != (before, WHOLE) for other, slot in files):
            raise Violation("what is to be carried is written over")
        return False
    if any(taken.number == before for taken in (*rank.copying, *rank.publishes)):
        return True
    if state.begun:
        raise Violation("what is to be carried is given up")
    return False  # it is the first one


def _copied(state: State, setting: Setting, node: int) -> Iterator[tuple[str, State]]:
    """The replica server of a node copies what its leader wants, as soon as the node before it has published that."""
    wanted, before = state.ranks[setting.nodes[node][0]].replicating, (node - 1) % len(setting.nodes)
    number = next((taken.number for taken in wanted if taken.number not in state.copies[node]), None)
    files = next((one.files for one in state.manifests[before] if one.number == number), None)
    if files is not None:
        if any(state.ranks[rank].buffers[slot] != (number, WHOLE) for rank, slot in files):
            raise Violation("a peer copies what is not whole")
        copies = _each(state.copies, node, lambda kept: (*kept, number))
        if len(copies[node]) > most_copies(kept_of_windows(setting.window), setting.spare):
            raise Violation("a node keeps more copies than are ever needed")
        after = state._replace(copies=copies)
        yield f"node {node} copies", after._replace(begun=after.begun or is_safe(after))


def _told(queue: tuple[Taken, ...], done: Callable[[Taken], bool]) -> int:
    """Returns how many snapshots at the head of a queue an all-reduce shows to be done."""
    return len(list(itertools.takewhile(done, queue[:POSITIONS])))


def _commits(state: State, setting: Setting) -> Iterator[tuple[str, State]]:
    """All ranks contribute and receive the totals; later work counts as done after the all-reduce.

    A contribution is filled line by line, so it may lack the header of a snapshot that it reports as written.
    """
    first = state.ranks[0]
    if any(rank.rotation != first.rotation for rank in state.ranks):
        raise Violation("the ranks disagree")
    copied = min(_told(rank.copying, partial(_sealed, rank)) for rank in state.ranks)
    written = min(POSITIONS, *(rank.written for rank in state.ranks))
    replicated = _told(first.replicating, lambda taken: all(taken.number in kept for kept in state.copies))
    taking = ["take"] + ["take, to storage too"] * (setting.stores and not first.rotation.persisting)
    if first.place < setting.window:
        taking = ["take, to storage too" if first.stores else "take"]
    if first.waiting:
        choices = taking
    else:
        choices = ["go on", *taking]
        done = first.place == setting.window
        if setting.memory and done and not (first.copying or first.replicating or first.writing or state.to_publish):
            choices += ["end"] * (state.stored == first.newest)
            own = first.rotation.recovery == first.newest and (first.newest, WHOLE) in first.buffers[: setting.slots]
            choices += ["store"] * (own and setting.stores and setting.window == 1)
    for says_copied in {copied, copied if first.waiting or not written else 0}:
        to_publish = tuple(taken.number for taken in first.writing[:written])  # others come before it
        to_publish = to_publish or state.to_publish
        kept = {to_publish} | ({state.to_publish} if written and setting.fails else set())
        for to_publish, then in itertools.product(kept, choices):
            ranks = tuple(
                _heard(rank._replace(then=then), says_copied, replicated, written, number in setting.leaders, setting)
                for number, rank in enumerate(state.ranks)
            )
            heard = " copied" * says_copied + " replicated" * replicated + " written" * written
            what = f"vote{heard}, {then}"
            yield what, state._replace(ranks=ranks, to_publish=to_publish)


def _heard(rank: Rank, copied: int, replicated: int, written: int, leads: bool, setting: Setting) -> Rank:
    rotation, ready = rank.rotation.committed(), rank.copying[:copied]
    at_once = not setting.peers or setting.impatient
    safe = [*(ready if at_once else ()), *(() if setting.impatient else rank.replicating[:replicated])]
    for taken in safe:
        rotation = rotation.complete(taken.number)
    for taken in rank.writing[:written]:
        rotation = rotation.persisted(taken.number)
    publishes = ready if leads else ()
    return rank._replace(
        at="remove" if rank.superseded is not None else "publish" if publishes else _act(rank),
        rotation=rotation,
        copying=rank.copying[copied:],
        writing=rank.writing[written:],
        written=rank.written - written,
        replicating=(*rank.replicating[replicated:], *(ready if setting.peers else ())),
        publishes=publishes,
        removes=rank.superseded,
        superseded=max((taken.ends for taken in safe if taken.ends is not None), default=None) if leads else None,
    )


def _led(state: State, setting: Setting, number: int) -> State:
    """Steps of the leader of a node in its memory."""
    rank = state.ranks[number]
    which = next(i for i, node in enumerate(setting.nodes) if node[0] == number)
    manifests = state.manifests[which]
    copies = state.copies
    if rank.at == "remove":
        manifests = tuple(one for one in manifests if one.number >= rank.removes)
        copies = _each(copies, which, lambda kept: tuple(number for number in kept if number >= rank.removes))
        rank = rank._replace(removes=None, at="publish" if rank.publishes else _act(rank))
    else:
        taken, *others = rank.publishes
        files = tuple((other, _slot_of(state.ranks[other], taken.number)) for other in setting.nodes[which])
        manifests = (*manifests, Published(taken.number, taken.ends, files))
        rank = rank._replace(publishes=tuple(others), at="publish" if others else _act(rank))
        if setting.removes_at_once and rank.superseded is not None and not others:
            rank = rank._replace(at="remove", removes=rank.superseded, superseded=None)
    all_manifests = _each(state.manifests, which, lambda _: manifests)
    after = _with(state, number, rank)._replace(manifests=all_manifests, copies=copies)
    return after._replace(begun=after.begun or is_safe(after))


def _act(rank: Rank) -> str:
    return "vote" if rank.then == "go on" else "act"


def _acted(state: State, setting: Setting, number: int) -> State:
    """Updates and takes the next snapshot; or brings the newest to storage, and gives the node its memory back."""
    rank = state.ranks[number]
    if rank.then == "end":
        manifests = tuple(
            () if node[0] == number else left for node, left in zip(setting.nodes, state.manifests, strict=True)
        )
        copies = tuple(
            () if node[0] == number else kept for node, kept in zip(setting.nodes, state.copies, strict=False)
        )
        return _with(state, number, rank._replace(at="ended"))._replace(manifests=manifests, copies=copies)
    if rank.then == "store":
        taken = Taken(rank.newest, rank.rotation.holding(rank.newest), rank.newest)
        rotation = rank.rotation.persist(rank.newest)
        return _with(state, number, rank._replace(at="vote", then="go on", rotation=rotation, writing=(taken,)))
    if not rank.waiting:  # else the update was before
        for taken in rank.copying:
            if rank.buffers[taken.slot] == (taken.number, COPYING):
                rank = _filled(rank, taken, COPIED if setting.waits else TORN)
    then, slot = rank.then, rank.rotation.free()
    rank = rank._replace(at="vote", then="go on")
    if slot is None:
        return _with(state, number, rank._replace(waiting=True))
    if slot >= setting.slots:
        raise Violation("there are more buffers than are ever needed")
    newest, place = rank.newest + 1, rank.place % setting.window + 1
    late = setting.carries_late and number in setting.leaders and any(not slot.free for slot in rank.rotation.slots)
    taken = Taken(newest, slot, newest - place + 1 if place == setting.window else None)
    stores = not setting.memory or then == "take, to storage too"
    rank = rank._replace(
        rotation=rank.rotation.begin(newest, stores, taken.ends),
        newest=newest,
        place=place,
        stores=stores,
        copying=(*rank.copying, taken),
        writing=(*rank.writing, taken) if stores else rank.writing,
        waiting=False,
        carrying=(*rank.carrying, newest) if late else rank.carrying,  # the first one lacks nothing
    )
    return _with(state, number, _filled(rank, taken, COPYING))


def _has_waited(rank: Rank, setting: Setting) -> bool:
    if rank.copying:
        return _sealed(rank, rank.copying[0])
    if rank.replicating:
        return True  # it votes now and then, to hear of losses
    if setting.memory and not setting.waits_for_storage:
        return True
    return rank.written > 0 or not rank.writing


def _sealed(rank: Rank, taken: Taken) -> bool:
    return rank.buffers[taken.slot] in ((taken.number, WHOLE), (taken.number, TORN))


def _slot_of(rank: Rank, number: int) -> int:
    for slot, (holds, _) in enumerate(rank.buffers):
        if holds == number:
            return slot
    raise Violation("what is published is written over already")


def _filled(rank: Rank, taken: Taken, stage: str) -> Rank:
    buffers = list(rank.buffers)
    buffers[taken.slot] = (taken.number, stage)
    return rank._replace(buffers=tuple(buffers))


def _each(values: tuple, which: int, change) -> tuple:
    return tuple(change(value) if i == which else value for i, value in enumerate(values))


def _with(state: State, number: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:number], rank, *state.ranks[number + 1 :]))


def canonical(state: State, setting: Setting) -> State:
    """Returns the same state with new snapshot numbers, and without values that have no effect any more."""
    alive = {one.number for node in state.manifests for one in node}
    alive |= {number for kept in state.copies for number in kept}
    for rank in state.ranks:
        taken = (*rank.copying, *rank.replicating, *rank.writing, *rank.publishes)
        alive |= {rank.newest, *(one.number for one in taken)}
        alive |= {slot.iteration for slot in rank.rotation.slots if not slot.free}
        alive |= {number for coming in rank.carrying for number in (coming - 1, coming)}
    numbers = {old: new for new, old in enumerate(sorted(alive))}
    renumbering = tuple(numbers.items())
    newest = len(numbers) - 1
    stored = {number: new if new == newest else -1 for number, new in numbers.items()} | {None: None}
    if not setting.memory and state.begun:  # later ones replace it, and its number has no effect
        state, stored = state._replace(to_publish=()), {}
    return State(
        tuple(_renumbered(rank, renumbering) for rank in state.ranks),
        tuple(
            tuple(Published(numbers[one.number], numbers.get(one.ends), one.files) for one in node)
            for node in state.manifests
        ),
        tuple(tuple(numbers[number] for number in kept) for kept in state.copies),
        state.begun,
        tuple(stored.get(number, -1) for number in state.to_publish),
        stored.get(state.stored, -1),
    )


@cache
def _renumbered(rank: Rank, renumbering: tuple[tuple[int, int], ...]) -> Rank:
    numbers = dict(renumbering)
    slots = (
        Slot()
        if s.free
        else Slot(s.use, numbers[s.iteration], s.persisting, numbers.get(s.supersedes), numbers.get(s.superseded_by))
        for s in rank.rotation.slots
    )

    def renumbered(taken: Taken) -> Taken:
        return Taken(numbers[taken.number], taken.slot, numbers.get(taken.ends))

    return rank._replace(
        rotation=_same(type(rank.rotation)(tuple(slots), rank.rotation.spare, rank.rotation.keep)),
        buffers=tuple((numbers[n], stage) if n in numbers else NOTHING for n, stage in rank.buffers),
        newest=numbers[rank.newest],
        copying=tuple(map(renumbered, rank.copying)),
        writing=tuple(map(renumbered, rank.writing)),
        replicating=tuple(map(renumbered, rank.replicating)),
        publishes=tuple(map(renumbered, rank.publishes)),
        removes=numbers.get(rank.removes),
        superseded=numbers.get(rank.superseded),
        carrying=tuple(numbers[coming] for coming in rank.carrying),
    )


@cache
def _same(rotation: Rotation) -> Rotation:
    """Of equal ones always the same one, which is compared faster."""
    return rotation


def explore(setting: Setting, most: int = 400_000) -> set[State]:
    """Returns all reachable states, and checks each.

    Raises:
        Violation: with the shortest way to it.
    """
    first = canonical(setting.begin(), setting)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        try:
            check(state, setting)
            after = list(following(state, setting))
            if not after and any(rank.at != "ended" for rank in state.ranks):
                raise Violation("nothing can happen any more")
        except Violation as violation:
            raise Violation(f"{violation}:\n" + "\n".join(_way(came_from, state))) from None
        for what, new in map(lambda step: (step[0], canonical(step[1], setting)), after):
            if new not in came_from:
                came_from[new] = state, what
                queue.append(new)
        assert len(came_from) < most, "the model has more states than it should"
    return set(came_from)


_BY_STORAGE = (" written", "stored", "not published")


def takes_what_is_due(state: State, setting: Setting, frozen: bool = False) -> bool:
    """Whether ranks that wait for a buffer get one, when threads are quick and no other snapshot becomes due.

    Args:
        state: in which they wait.
        setting: of it.
        frozen: storage does nothing any more.
    """
    for _ in range(60):
        if not any(rank.waiting for rank in state.ranks):
            return True
        steps = (after for what, after in following(state, setting) if not (frozen and what.endswith(_BY_STORAGE)))
        if (state := next(steps, None)) is None:
            return False
    return False


def _way(came_from, state) -> list[str]:
    steps = []
    while came_from[state] is not None:
        state, what = came_from[state]
        steps.append(what)
    return steps[::-1]
