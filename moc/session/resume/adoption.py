"""Reads parts of snapshots in memory that were written by absent nodes or in another layout.

Usually each rank finds the state that it loads in the memory of its own node, where it has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from moc.policy import Policy
from moc.recovery.copy_placement import NodeInventory, adopters, to_fetch
from moc.recovery.inventory import Summary, look
from moc.runtime.collectives import gather
from moc.runtime.replica_transfer import snapshots_directory
from moc.session.engine import Engine, Listener
from moc.session.peers import Peers
from moc.session.tiers import Tiers
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest
from moc.store.storage import LocalStorage
from moc.store.store import Store, is_shard_file_or_part, parse_rank


class AdoptedParts:
    """Other nodes' parts of snapshots that this node's memory has or fetches; ``adopt`` and ``fetch`` are collective.

    Args:
        peers: fetches from other nodes; None if there are none, or they keep no copies.

    Attributes:
        used: iterations of snapshots that other members wrote, and that this run reads.
    """

    def __init__(self, engine: Engine, tiers: Tiers, policy: Policy, peers: Peers | None, log: Listener):
        self._tiers, self._peers, self._layout, self._log = tiers, peers, dict(engine.layout), log
        self._node, self._adopted = tiers.nodes[engine.world.rank], frozenset[str]()
        self._sizes = {operator.name: operator.parameters for operator in policy.operators}
        self.used: set[int] = set()

    def adopt(self) -> None:
        """Takes over the available copies of absent nodes' parts."""
        if self._tiers.memory is None:
            return
        adopted = adopters(self._inventories())
        self._adopted = frozenset(of for of, holder in adopted.items() if holder == self._node)
        for of, holder in sorted(adopted.items()):
            self._log.message(f"node {of} is not there: node {holder} has a copy of its part of the snapshots")

    def look(self, check: Callable[[Manifest, str], None]) -> tuple[list[Summary], list[str]]:
        """Lists the parts that this node has adopted, as :func:`moc.recovery.inventory.look` does."""
        found = [look(self._store(of), check) for of in sorted(self._adopted)]
        return [part for parts, _ in found for part in parts], [one for _, problems in found for one in problems]

    def fetch(self, wanted: Mapping[int, Collection[str]]) -> None:
        """Fetches the state that ranks of this node load from snapshots in memory that other members wrote.

        Args:
            wanted: by iteration of a snapshot in memory, the operators that this rank loads from it.
        """
        if self._tiers.memory is None:
            return
        told = gather({iteration: sorted(names) for iteration, names in wanted.items()})
        mine = [told[rank] for rank in self._tiers.node]
        needed = {i: {name for one in mine for name in one.get(i, ())} for i in {i for one in mine for i in one}}
        foreign = {i for found in gather(sorted(self._foreign(needed))) for i in found}
        self.used |= foreign
        if not foreign or self._peers is None:
            return
        nodes = self._inventories()
        fetches = to_fetch(self._node, {i: names for i, names in needed.items() if i in foreign}, nodes, self._sizes)
        problems = self._peers.fetch(fetches) if self._tiers.leads_node else []
        for text in (text for of_node in gather(problems) for text in of_node):
            self._log.message(f"WARNING: a part of a snapshot cannot be had from another node: {text}")

    def stores(self, iteration: int) -> list[Store]:
        """Returns other stores in this node's memory with parts of a snapshot; communicates with no other worker."""
        if iteration not in self.used:
            return []
        return [store for store in map(self._store, self._names()) if iteration in store.iterations()]

    def _foreign(self, iterations: Iterable[int]) -> list[int]:
        """Returns the snapshots whose part on this node was not written by its ranks in this layout."""
        assert self._tiers.memory is not None  # otherwise there are no parts
        found = []
        for iteration in iterations:
            try:
                manifest = self._tiers.memory.read_manifest(iteration)
                is_own = manifest.layout == self._layout and manifest.writers == len(self._tiers.nodes)
                ranks = {
                    parse_rank(file) for file in filter(is_shard_file_or_part, manifest.files)
                }  # others hold single experts
                if not is_own or not ranks.issubset(self._tiers.node):
                    found.append(iteration)
            except CheckpointError:
                found.append(iteration)
        return found

    def _inventories(self) -> dict[str, NodeInventory]:
        mine, memory = None, self._tiers.memory
        if self._tiers.leads_node:
            assert memory is not None  # otherwise there are no parts
            copies = {of: look(self._store(of))[0] for of in self._names()}
            mine = self._node, NodeInventory(look(memory)[0], copies)
        return dict(filter(None, gather(mine)))

    def _names(self) -> list[str]:
        """Returns the nodes whose copies this node's memory has."""
        assert self._tiers.memory is not None  # otherwise there are no parts
        return sorted(name[len("of_") :] for name in self._tiers.memory.storage.list_names() if name.startswith("of_"))

    def _store(self, of: str) -> Store:
        assert self._tiers.memory is not None  # otherwise there are no parts
        place = self._tiers.memory.storage
        assert isinstance(place, LocalStorage)  # the memory tier is local
        return Store(LocalStorage(snapshots_directory(place.root, self._node, of), in_memory=True), allows_slack=True)
