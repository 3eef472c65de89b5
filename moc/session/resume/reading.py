"""Reads the snapshots that this worker can reach: in storage, in its node's memory, and parts of absent nodes.

Usually each rank loads state that it has saved in the memory of its own node.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moc.errors import warning, with_code
from moc.fault_points import reach
from moc.files import decode
from moc.files.decode import short_repr
from moc.policy import Policy
from moc.policy.interval import Interval
from moc.policy.partial import experts_by_layer
from moc.policy.token_ledger import TokenLedger
from moc.recovery.gradient_folding import RULES
from moc.recovery.inventory import NodeInventory, Summary, adopting_nodes, in_storage, list_checkpoints, to_fetch
from moc.recovery.sources import (
    BEFORE,
    COMPUTE,
    LIVE,
    MEMORY,
    STORAGE,
    AvailableCheckpoint,
    RecoveryPath,
    ReplayPoint,
    part_of_slot,
)
from moc.runtime.collectives import gather, run_on_rank0
from moc.runtime.job import World
from moc.runtime.replica_transfer import snapshots_directory
from moc.session.auto import AutoState
from moc.session.engine import Engine, Listener
from moc.session.peers import Peers
from moc.session.resume.replay import record_of
from moc.session.resume.survivors import CommitReported, Survivors, commit_saved_snapshots, saved_elsewhere
from moc.session.tiers import LOOKING_S, Tiers
from moc.state.adam import Rules
from moc.state.operators import Detail, Fragment, UnsupportedStateError, operator_of
from moc.state.record import Position
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, merge_manifests
from moc.store.shard_file import MissingTensorError, ShardReader, read_ahead, read_stored_boxes, read_values
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, is_shard_file_or_part, parse_rank, shard_file_name

Key = tuple[int, str]
"""Identity of a checkpoint: see :class:`AvailableCheckpoint`."""

Problem = tuple[Key, str, list[str] | None]
"""A checkpoint, the description of its problem, and the operators that it cannot provide; None for all."""

UPDATES_BEFORE = "updates_before"
"""Key in the state of a snapshot: updates of the optimizer before the first iteration; 0 if absent."""

_Updates: Any = decode.Count | None


class AdoptedParts:
    """Other nodes' parts of snapshots that this node's memory has or fetches; ``adopt`` and ``fetch`` are collective.

    Args:
        peers: fetches from other nodes; None if there are none, or they keep no copies.

    Attributes:
        foreign_iterations: iterations of snapshots that other members wrote, and that this run reads.
    """

    def __init__(self, engine: Engine, tiers: Tiers, policy: Policy, peers: Peers | None, log: Listener):
        self._tiers, self._peers, self._layout, self._log = tiers, peers, dict(engine.layout), log
        self._node, self._adopted = tiers.nodes[engine.world.rank], frozenset[str]()
        self._sizes = {operator.name: operator.parameters for operator in policy.operators}
        self.foreign_iterations: set[int] = set()

    def adopt(self) -> None:
        """Takes over the available copies of absent nodes' parts."""
        if self._tiers.memory is None:
            return
        adopted = adopting_nodes(self._inventories())
        self._adopted = frozenset(owner for owner, holder in adopted.items() if holder == self._node)
        for owner, holder in sorted(adopted.items()):
            self._log.message(f"node {owner} is not there: node {holder} has a copy of its part of the snapshots")

    def list_parts(self, check: Callable[[Manifest, str], None]) -> tuple[list[Summary], list[str]]:
        """Lists the parts that this node has adopted, as :func:`moc.recovery.inventory.list_checkpoints` does."""
        listings = [list_checkpoints(self._store(owner), check) for owner in sorted(self._adopted)]
        return [part for parts, _ in listings for part in parts], [
            problem for _, problems in listings for problem in problems
        ]

    def fetch(self, required: Mapping[int, Collection[str]]) -> None:
        """Fetches the state that ranks of this node load from snapshots in memory that other members wrote.

        Args:
            required: by iteration of a snapshot in memory, the operators that this rank loads from it.
        """
        if self._tiers.memory is None:
            return
        requests = gather({iteration: sorted(names) for iteration, names in required.items()})
        node_requests = [requests[rank] for rank in self._tiers.node]
        needed = {
            i: {name for request in node_requests for name in request.get(i, ())}
            for i in {i for request in node_requests for i in request}
        }
        foreign = {i for iterations in gather(sorted(self._foreign(needed))) for i in iterations}
        self.foreign_iterations |= foreign
        if not foreign or self._peers is None:
            return
        nodes = self._inventories()
        fetches = to_fetch(self._node, {i: names for i, names in needed.items() if i in foreign}, nodes, self._sizes)
        problems = self._peers.fetch(fetches) if self._tiers.leads_node else []
        for text in (text for of_node in gather(problems) for text in of_node):
            self._log.message(f"WARNING: a part of a snapshot cannot be had from another node: {text}")

    def stores(self, iteration: int) -> list[Store]:
        """Returns other stores in this node's memory with parts of a snapshot; communicates with no other worker."""
        if iteration not in self.foreign_iterations:
            return []
        return [store for store in map(self._store, self._names()) if iteration in store.iterations()]

    def _foreign(self, iterations: Iterable[int]) -> list[int]:
        """Returns the snapshots whose part on this node was not written by its ranks in this layout."""
        assert self._tiers.memory is not None  # otherwise there are no parts
        foreign = []
        for iteration in iterations:
            try:
                manifest = self._tiers.memory.read_manifest(iteration)
                is_own = manifest.layout == self._layout and manifest.writers == len(self._tiers.nodes)
                ranks = {
                    parse_rank(file) for file in filter(is_shard_file_or_part, manifest.files)
                }  # others hold single experts
                if not is_own or not ranks.issubset(self._tiers.node):
                    foreign.append(iteration)
            except CheckpointError:
                foreign.append(iteration)
        return foreign

    def _inventories(self) -> dict[str, NodeInventory]:
        local, memory = None, self._tiers.memory
        if self._tiers.leads_node:
            assert memory is not None  # otherwise there are no parts
            copies = {owner: list_checkpoints(self._store(owner))[0] for owner in self._names()}
            local = self._node, NodeInventory(list_checkpoints(memory)[0], copies)
        return dict(filter(None, gather(local)))

    def _names(self) -> list[str]:
        """Returns the nodes whose copies this node's memory has."""
        assert self._tiers.memory is not None  # otherwise there are no parts
        return sorted(name[len("of_") :] for name in self._tiers.memory.storage.list_names() if name.startswith("of_"))

    def _store(self, owner: str) -> Store:
        assert self._tiers.memory is not None  # otherwise there are no parts
        storage = self._tiers.memory.storage
        assert isinstance(storage, LocalStorage)  # the memory tier is local
        return Store(
            LocalStorage(snapshots_directory(storage.root, self._node, owner), in_memory=True), allows_slack=True
        )


class Damage(NamedTuple):
    """Description of a checkpoint's damage for users, and the operators that it cannot provide; None for all."""

    text: str
    operators: frozenset[str] | None


class SnapshotReader:
    """Reader of checkpoints into this worker's state; communicates with no other worker.

    Args:
        exact: damage makes an entire checkpoint useless; otherwise its undamaged operators remain usable.
        adopted: other nodes' parts of snapshots in memory.
    """

    def __init__(self, engine: Engine, tiers: Tiers, exact: bool, adopted: AdoptedParts):
        self.adopted = adopted
        self._engine, self._world, self._state, self._exact = engine, engine.world, engine.state, exact
        self._stores = {STORAGE: tiers.storage, MEMORY: tiers.memory, BEFORE: tiers.before}

    def fragments(self, path: RecoveryPath) -> dict[Key, list[Fragment]]:
        """Returns, by checkpoint, the tensor chunks that this worker loads, without chunks saved by other stages."""
        fragments: dict[Key, list[Fragment]] = defaultdict(list)
        for point in path.points:
            for fragment in self.fragments_at(point):
                if not saved_elsewhere(fragment):
                    is_learning = fragment.operator in point.full
                    part = part_of_slot(fragment.slot) if is_learning else COMPUTE
                    source = point.sources[fragment.operator, part]
                    if source.tier != LIVE:
                        fragments[source.key].append(fragment)
            for checkpoint in (
                checkpoint for name in self.operators_to_update(point) for checkpoint in point.gradients[name]
            ):
                fragments.setdefault(checkpoint.key, [])  # memory for the gradients is allocated when they are read
        return fragments

    def operators_to_update(self, point: ReplayPoint) -> list[str]:
        """Returns the operators that this worker updates with saved gradients."""
        return list(
            dict.fromkeys(fragment.operator for fragment in self._state.fragments(point.gradients, Detail.GRAD))
        )

    def fragments_at(self, point: ReplayPoint) -> Iterator[Fragment]:
        """Yields the tensor chunks of this worker that a replay point fills."""
        yield from self._state.fragments(point.full, Detail.FULL)
        yield from self._state.fragments(point.frozen, Detail.COMPUTE)

    def manifests(self, path: RecoveryPath, fragments: Iterable[Key]) -> tuple[dict[Key, Manifest], Problem | None]:
        """Returns the manifests that this worker reads, and a problem if one cannot be read."""
        manifests, problem = {}, None
        needed = {*fragments, *(path.checkpoint_at(point.iteration).key for point in path.points)}
        for checkpoint in path.checkpoints():
            try:
                if (
                    checkpoint.key in needed and checkpoint.tier != LIVE
                ):  # memory of other nodes is neither readable nor needed
                    manifests[checkpoint.key] = self._manifest(checkpoint)
                    if checkpoint.iteration > path.points[0].iteration:
                        record_of(manifests[checkpoint.key].state, self.display_path(checkpoint))
            except CheckpointError as error:
                problem = problem or (checkpoint.key, with_code(error), None)
        return manifests, problem

    def fill(
        self, point: ReplayPoint, manifests: dict[Key, Manifest], fragments: dict[Key, list[Fragment]]
    ) -> Problem | None:
        """Loads the tensor chunks of a replay point; returns a problem with a checkpoint, or None."""
        reach("loading")
        for checkpoint in point.checkpoints():
            if checkpoint.key in manifests:
                manifest = manifests[checkpoint.key]
                problem = self._fill_from(
                    checkpoint, manifest, self._reader(checkpoint, manifest), fragments.get(checkpoint.key, [])
                )
                if problem is not None:
                    return self.problem(checkpoint, manifest, problem)
        return None

    def problem(self, checkpoint: AvailableCheckpoint, manifest: Manifest, text: str) -> Problem:
        """Returns the problem with a checkpoint, and the operators that this worker finds damaged."""
        return checkpoint.key, text, None if self._exact else self._damaged(checkpoint, manifest)

    def values(self, checkpoint: AvailableCheckpoint, manifest: Manifest) -> Callable[[Fragment], torch.Tensor]:
        """Returns a reader of tensor chunks from a checkpoint; it may raise MissingTensorError and OSError."""
        reader = self._reader(checkpoint, manifest)
        return lambda fragment: read_values(fragment, reader)

    def _fill_from(
        self, checkpoint: AvailableCheckpoint, manifest: Manifest, reader: ShardReader, fragments: list[Fragment]
    ) -> str | None:
        try:
            for fragment in read_ahead(fragments, reader):
                self._state.load(fragment, read_values(fragment, reader))
            home = self._home(checkpoint, manifest)
            for name in sorted(manifest.files)[self._world.rank :: self._world.size]:  # every file, needed or not
                home[name].open_verified(checkpoint.iteration, name, manifest.files[name])
        except MissingTensorError as error:
            return with_code(error)
        except OSError as error:
            unreadable = CheckpointError(
                f"{self.display_path(checkpoint)} cannot be read ({error.strerror or error}). Fix: restore it or its "
                "permissions, or load another one (--ckpt-step)",
                code="checkpoint-unreadable",
            )
            return with_code(unreadable)
        return None

    def _damaged(self, checkpoint: AvailableCheckpoint, manifest: Manifest) -> list[str] | None:
        """Returns the operators that are incomplete in this node's files; all hashes are compared."""
        undamaged: dict[str, Counter] = defaultdict(Counter)
        home = self._home(checkpoint, manifest)
        for name, entry in manifest.files.items():
            with contextlib.suppress(MissingTensorError, OSError, UnsupportedStateError):  # the last: a foreign name
                for source in read_stored_boxes(home[name].open_verified(checkpoint.iteration, name, entry)):
                    if source.find_damage() is None:
                        undamaged[operator_of(source.box.name)][source.box.slot] += source.box.region.numel
        damaged = [name for name, entry in manifest.operators.items() if undamaged[name] != Counter(entry.elements)]
        return damaged or None

    def _reader(self, checkpoint: AvailableCheckpoint, manifest: Manifest) -> ShardReader:
        own_file = shard_file_name(self._world.rank)  # in the same layout, it has nearly all that the rank loads
        names, home = sorted(manifest.files, key=lambda name: name != own_file), self._home(checkpoint, manifest)
        blobs = (home[name].open_verified(checkpoint.iteration, name, manifest.files[name]) for name in names)
        return ShardReader(blobs, verifies=True, opens_lazily=True)

    def _manifest(self, checkpoint: AvailableCheckpoint) -> Manifest:
        """Returns the manifest of the parts of a checkpoint that this worker can read."""
        parts = [store.read_manifest(checkpoint.iteration) for store in self._stores_of(checkpoint)]
        return parts[0] if len(parts) == 1 else merge_manifests(parts)

    def _home(self, checkpoint: AvailableCheckpoint, manifest: Manifest) -> dict[str, Store]:
        """Returns, by file of a checkpoint, the store that has it."""
        stores = self._stores_of(checkpoint)
        if len(stores) == 1:
            return dict.fromkeys(manifest.files, stores[0])
        return {name: store for store in stores for name in store.read_manifest(checkpoint.iteration).files}

    def _stores_of(self, checkpoint: AvailableCheckpoint) -> list[Store]:
        """Returns the stores with parts of a checkpoint that this worker may read: usually the store of its tier."""
        tier_store = self.store(checkpoint)
        adopted = self.adopted.stores(checkpoint.iteration) if checkpoint.tier == MEMORY else []
        return [tier_store, *adopted] if not adopted or checkpoint.iteration in tier_store.iterations() else adopted

    def store(self, checkpoint: AvailableCheckpoint) -> Store:
        """Returns the store of a checkpoint's tier."""
        return self._stores[checkpoint.tier]

    def display_path(self, checkpoint: AvailableCheckpoint) -> str:
        """Returns the path of a checkpoint, for messages."""
        return self.store(checkpoint).storage.display_path(checkpoint_name(checkpoint.iteration))

    def check(self, checkpoint: AvailableCheckpoint, manifest: Manifest, window: bool = False) -> None:
        """Refuses a checkpoint of another model or optimizer, and a window of another precision.

        Raises:
            CheckpointError: model, optimizer or precision differs.
        """
        self._engine.check(manifest.state, self.display_path(checkpoint), window)


def check_state(manifest: Manifest, where: str, engine: Engine, policy: Policy) -> None:
    """Validates the state in a manifest whose own fields are valid; changes nothing.

    Args:
        manifest: manifest of a snapshot, or of the part that a node has of it.
        where: name of the snapshot, for messages.
        engine: engine that would load the snapshot.
        policy: policy of the run, which loads only the state of a policy of the same name.

    Raises:
        ValueError: a value is missing, has another type or is impossible.
        CheckpointError: the snapshot belongs to another model or optimizer.
    """
    state = manifest.state
    decode.convert_state(state, Position, "a run", requires_every_field=True)
    engine.check(state, where)  # the other checks would report another model's state as damaged
    _check_updates(manifest)
    if state.get("ledger"):
        _check_ledger(TokenLedger.from_state(state["ledger"]), manifest.iteration, policy)
    if state.get("auto"):
        AutoState.read(state["auto"])
    if RULES in state:
        Rules.from_plain(state[RULES])
    if manifest.policy == policy.name:
        for owner, stored in _policy_states(policy, state):
            owner.loading(stored)


def _check_updates(manifest: Manifest) -> None:
    """Validates update counts of operators: at most the run's updates, and the engine's count if it has one for all."""
    counted = {entry.step for entry in manifest.operators.values() if entry.step is not None}
    before = decode.convert_state(manifest.state.get(UPDATES_BEFORE), _Updates, "an optimizer") or 0
    if max(counted, default=0) > manifest.iteration + before:
        raise ValueError(f"an operator has {max(counted)} updates after {manifest.iteration} iterations")
    if "optimizer_step" in manifest.state:
        engine_count = decode.convert_state(manifest.state["optimizer_step"], _Updates, "an optimizer")
        if engine_count:  # 0 may be of a rank that owns no parameters
            counted.add(engine_count)
        if len(counted) > 1:
            raise ValueError(
                f"operators and optimizer have different numbers of updates: {short_repr(sorted(counted))}"
            )


def _policy_states(policy: Policy, state: Mapping[str, Any]) -> list[tuple[Policy | Interval, Mapping[str, Any]]]:
    """Returns the interval and the policy with their saved states, omitting those without a saved state."""
    both = ((policy.interval, state.get("interval")), (policy, state.get("policy_state")))
    return [(owner, stored) for owner, stored in both if stored]


def _check_ledger(ledger: TokenLedger, iteration: int, policy: Policy) -> None:
    experts = {layer: len(row) for layer, row in ledger.load.items()}
    if ledger.iteration != iteration or experts != experts_by_layer(policy.operators):
        raise ValueError("its token ledger is of another iteration or model")


class StorageListing:
    """Listing of storage by the first worker, for all workers.

    Args:
        tiers: tiers that snapshots go to.
        commit: commits parts that lost workers have reported, if storage is the only tier.
        world: ranks of the job.
        check: as for :func:`moc.recovery.inventory.list_checkpoints`.
        log: receives a message and an event.

    Attributes:
        is_done: storage has been taken and listed.
    """

    def __init__(
        self,
        tiers: Tiers,
        commit: CommitReported,
        world: World,
        check: Callable[[Manifest, str], None],
        log: Listener,
    ):
        self._tiers, self._storage, self._commit, self._world = tiers, tiers.storage, commit, world
        self._check_manifest, self._log = check, log
        self.is_done = False

    def find(self, survivors: Survivors) -> tuple[list[AvailableCheckpoint], list[str]]:
        """Returns the checkpoints in storage and the problems of invalid ones; a collective call.

        It waits for storage without a limit.

        Raises:
            CheckpointError: on all workers: all snapshots belong to another model or optimizer.
        """
        with self._reporting_wait() if survivors.has_trained else contextlib.nullcontext():
            if self._tiers.memory is None:
                commit_saved_snapshots(survivors, self._tiers, self._commit, self._world)
            stored, problems = run_on_rank0(self._list, f"cannot look for snapshots in {self._storage.storage.name}")
        self.is_done = True
        return in_storage(stored), problems

    @contextlib.contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        """Context of a recovery's wait for storage."""
        name, start = self._storage.storage.name, time.perf_counter()
        message = warning(
            f"{name} has not answered for {LOOKING_S:.0f} s: the run waits for it, because the remaining workers lack "
            "state that it has. Fix: repair it",
            code="storage-silent",
        )

        def report_silence() -> None:
            self._log.events.write("storage_silent", where=name, waits=True)
            self._log.message(message)

        timer = threading.Timer(LOOKING_S, report_silence)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        seconds = round(time.perf_counter() - start, 6)
        self._log.events.write("storage_awaited", where=name, seconds=seconds)

    def _list(self) -> tuple[list[Summary], list[str]]:
        """Takes ownership of storage, so that no older generation can commit, and lists it.

        If storage cannot be used, but there is a memory tier, the list is empty.

        Raises:
            CheckpointError: all snapshots belong to another model or optimizer.
        """
        try:
            self._storage.take()
        except OSError as error:
            if self._tiers.memory is None:
                raise
            unusable = CheckpointError(
                f"{self._storage.storage.name} cannot be used ({error.strerror or error}). Fix: correct its "
                "permissions or repair it",
                code="storage-unwritable",
            )
            return [], [with_code(unusable)]
        mismatches: list[CheckpointError] = []

        def check(manifest: Manifest, where: str) -> None:
            try:
                self._check_manifest(manifest, where)
            except CheckpointError as error:
                mismatches.append(error)
                raise

        summaries, problems = list_checkpoints(self._storage, check)
        if mismatches and not summaries:
            raise mismatches[-1]  # of the newest
        return summaries, problems
