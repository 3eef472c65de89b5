"""A snapshot of replicas on several nodes, without processes: what each node's memory has, sends, and gets back."""

import asyncio
import shutil
import threading

import pytest
import torch

from moc.recovery.copy_placement import not_sent, place_copies, redundancy
from moc.recovery.inventory import in_memory, list_checkpoints
from moc.runtime import async_connections
from moc.runtime.replica_server import ReplicaServer
from moc.runtime.replica_transfer import CopyRequest, copy_snapshot, snapshots_directory
from moc.session.saving import committing
from moc.session.tiers import Tiers
from moc.sharding import parse_scheme
from moc.sharding.save_plan import StageReplicas, describe_replicas, replicated_operators
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Operator
from moc.store.manifest import assemble, replicas_entry
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.cases import each_row
from tests.unit.runtime.peers import TOKEN
from tests.unit.sharding.fragment_worlds import NAMES, Tensor, World

ITERATION = 5
SCHEME = parse_scheme("EE+AN")
PLAN = dict.fromkeys(["layers.0.attention", "layers.1.router", "layers.1.expert.0", "layers.1.expert.7"], Detail.FULL)
PLACES = {"layers.1.expert.0": (0, 2), "layers.1.expert.7": (1, 3)}  # data-parallel ranks of an operator; all of others
SHAPES = {"layers.0.attention": (500, 60), "layers.1.router": (8, 30)}


def world() -> World:
    tensors = []
    for operator in PLAN:
        for name in NAMES[operator]:
            shape = (8,) if name.endswith("expert_bias") else SHAPES.get(operator, (40, 30))
            values = torch.arange(torch.Size(shape).numel()).view(shape) % 251
            tensors.append(Tensor(name, values, False, PLACES.get(operator, (0, 1, 2, 3)), (0.5, 0.6, 0.7)))
    return World(1, 4, False, tuple(tensors))


class State:
    """Of one rank."""

    def __init__(self, held):
        self.held = held

    def operators(self):
        return list(PLAN)

    def fragments(self, operators, detail):
        return [fragment for fragment in self.held if fragment.operator in operators]

    def steps(self):
        return dict.fromkeys(PLAN, ITERATION)


class Nodes:
    """Four ranks on some nodes, with a snapshot in the memory of each, and in storage."""

    def __init__(self, root, names: str):
        self.names, self.root, self.states = list(names), root, [State(world().fragments(r, PLAN)) for r in range(4)]
        self.memory = {name: Store(LocalStorage(root / name, in_memory=True), allows_slack=True) for name in names}
        self.storage, self.again = Store(LocalStorage(root / "storage")), Store(LocalStorage(root / "again"))
        stage = StageReplicas(
            {rank: describe_replicas(state.held, Detail.FULL) for rank, state in enumerate(self.states)}
        )
        self.alike = redundancy([replicated_operators(stage, PLAN, self.names)])
        sizes = {o: sum(t.values.numel() for t in world().tensors if t.name in NAMES[o]) for o in PLAN}
        sizes["layers.1.router"] -= 8  # its biases
        self.operators = [
            Operator(o, o.split(".")[2], 0, int(o[-1]) if "expert" in o else None, n) for o, n in sizes.items()
        ]
        for rank, state in enumerate(self.states):
            contents = Contents(state, stage, rank, SCHEME, self.names)
            saver = Saver(rank, torch.device("cpu"), self.memory[names[rank]], self.storage)
            snapshot = saver.take(0, ITERATION, contents.share(PLAN), contents.entries(PLAN))
            saver.persist(snapshot)
            snapshot.persisted.result()
            saver.close()
        for name, store in self.memory.items():
            self.publish(
                store, [rank for rank in range(4) if names[rank] == name], replicas_entry(PLAN, self.alike.copies)
            )
        self.publish(self.storage, range(4), {})

    def publish(self, store: Store, ranks, state: dict) -> None:
        parts = store.read_reports(ITERATION, ranks)
        store.publish(assemble(parts, ITERATION, "full", 4, self.operators, {}, state))

    def tiers(self, rank: int) -> Tiers:
        node = tuple(r for r in range(4) if self.names[r] == self.names[rank])
        return Tiers(self.again, self.memory[self.names[rank]], tuple(self.names), rank == node[0], node, None, 2)

    async def copy(self, holder: str, of: str, held_by: str):
        """A node copies another one's part, or gets its own back."""
        server = ReplicaServer(TOKEN)
        server._roots[held_by] = self.root / held_by
        own = None if holder == of else self.root / holder
        async with await async_connections.serve("127.0.0.1:0", TOKEN, server.serve_reads) as served:
            wanted = CopyRequest(ITERATION, of, held_by, served.address)
            return await copy_snapshot(wanted, TOKEN, snapshots_directory(self.root / holder, holder, of), own)

    def check(self, rank: int, store: Store) -> None:
        """All that a rank holds is there, with its values; each element once."""
        manifest = store.read_manifest(ITERATION)
        files = [store.open_verified(ITERATION, name, entry) for name, entry in manifest.files.items()]
        reader = ShardReader(files, verifies=True)
        for f in self.states[rank].held:
            assert torch.equal(reader.read_region(f.name, f.slot, f.region).reshape(-1), f.view), f.name

    def size(self, name: str) -> int:
        return self.memory[name].read_manifest(ITERATION).nbytes


@each_row("names", ["abcd", "aabb", "abab", "aaaa"])
def test_nodes_hold_their_ranks_state_and_storage_one_copy(tmp_path, names):
    nodes = Nodes(tmp_path, names)
    for rank in range(4):
        nodes.check(rank, nodes.memory[names[rank]])
        nodes.check(rank, nodes.storage)
    parameters = sum(operator.parameters for operator in nodes.operators)
    stored = nodes.storage.read_manifest(ITERATION).operators.values()
    assert sum(entry.elements["master"] for entry in stored) == parameters


@pytest.mark.slow
@each_row(("names", "groups"), [("abcd", ((0, 2), (1, 3))), ("aabb", ((0, 1),)), ("abab", ((0, 1),))])
def test_lost_node_restores_distinct_copies(tmp_path, names, groups):
    nodes, told = Nodes(tmp_path, names), list(dict.fromkeys(names))
    alike = {frozenset(map(told.index, of)): amount for of, amount in nodes.alike.nbytes.items()}
    placement = place_copies(len(told), 1, alike)
    assert placement.groups == groups
    unsent = 0
    for owner, holders in placement.holders.items():
        for holder in holders:
            pulled = asyncio.run(nodes.copy(told[holder], told[owner], told[owner]))
            assert pulled.bytes + pulled.alike == nodes.size(told[owner]) and not pulled.differs + pulled.damaged
            unsent += pulled.alike
    assert unsent == not_sent(placement, alike) > 0
    everything = in_memory([list_checkpoints(store)[0] for store in nodes.memory.values()], nodes.operators)
    shutil.rmtree(tmp_path / "b")
    (left,) = in_memory([list_checkpoints(store)[0] for store in nodes.memory.values()], nodes.operators)
    needed = {fragment.operator for rank in range(4) if names[rank] == "b" for fragment in nodes.states[rank].held}
    assert left.operators.keys() == PLAN.keys() - needed  # each node resumes from its own memory
    (holder,) = placement.holders[told.index("b")]
    asyncio.run(nodes.copy("b", "b", told[holder]))
    assert in_memory([list_checkpoints(store)[0] for store in nodes.memory.values()], nodes.operators) == everything
    for rank in range(4):
        nodes.check(rank, nodes.memory[names[rank]])


@each_row("names", ["abcd", "abab", "aaaa"])
def test_storage_copied_from_memory_has_each_element_once(tmp_path, names, monkeypatch):
    nodes, threads = Nodes(tmp_path, names), []
    told, barrier, me = [None] * 4, threading.Barrier(4), threading.local()

    def gather(value):
        told[me.rank] = value
        barrier.wait()
        found = list(told)
        barrier.wait()
        return found

    def on_all(action, what):
        action()
        barrier.wait()

    monkeypatch.setattr(committing, "gather", gather)
    monkeypatch.setattr(committing, "run_on_all", on_all)
    monkeypatch.setattr(committing, "run_on_rank0", lambda action, what: action() if me.rank == 0 else None)
    policy = type("Policy", (), {"operators": nodes.operators})

    def copy(rank):
        me.rank = rank
        committing._copy_snapshot(ITERATION, nodes.tiers(rank), policy)

    threads = [threading.Thread(target=copy, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(4):
        nodes.check(rank, nodes.again)
    there, stored = (store.read_manifest(ITERATION) for store in (nodes.again, nodes.storage))
    assert there.operators == stored.operators and there.is_complete and not there.replica_counts
