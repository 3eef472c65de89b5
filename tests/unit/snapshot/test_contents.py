"""What a rank saves is the same file in every run of the same flags, wherever the state came to lie in memory."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.snapshot.contents import share
from moc.state.fragments import Fragment
from moc.state.region import Region

ROOT = Path(__file__).parents[3]

WRITES = """
import sys
from pathlib import Path
import torch
from tests.unit.sharding.fragment_worlds import NAMES, Tensor, World
from moc.sharding import scheme_named
from moc.sharding.shares import StageHoldings, describe
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.store.storage import LocalPlace
from moc.store.store import Store

names = {name for both in NAMES.values() for name in both}  # a set: its order follows the seed of hashes
made = {name: Tensor(name, torch.arange(60).view(20, 3) % 251, "router" not in name, (0, 1), (0.4,)) for name in names}
world = World(1, 2, True, tuple(made.values()))
plan = {operator: Detail.FULL for operator in NAMES}

class State:
    def __init__(self, rank):
        self.held = world.fragments(rank, plan)
    def operators(self):
        return list(NAMES)
    def fragments(self, operators, detail):
        return [f for f in self.held if f.operator in operators]
    def steps(self):
        return {}

states = [State(rank) for rank in world.ranks]
stage = StageHoldings({rank: describe(state.held, Detail.FULL) for rank, state in enumerate(states)})
storage = Store(LocalPlace(sys.argv[1]))
for rank, state in enumerate(states):
    contents = Contents(state, stage, rank, scheme_named("EE+AN"))
    saver = Saver(rank, torch.device("cpu"), None, storage)
    snapshot = saver.take(0, 5, contents.share(plan), contents.entries(plan))
    saver.persist(snapshot)
    snapshot.persisted.result()
    saver.close()
"""


def written(directory, seed):
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", WRITES, str(directory)], cwd=ROOT, env=environment, check=True)
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_files_do_not_follow_the_seed_of_hashes(tmp_path):
    one, other = (written(tmp_path / str(seed), seed) for seed in (1, 2))
    assert list(one) == list(other) == sorted(one) and len(one) == 4  # of each rank its file, and word of it
    for name in one:
        assert one[name] == other[name], name


def fragments_in(memories, addresses):
    """One fragment for each number in some memories, which are allocated in the order of ``addresses``."""
    flat = torch.zeros(100 * len(memories))  # so that what comes first there has the lower address
    made = []
    for memory, address in zip(memories, addresses, strict=True):
        own = torch.frombuffer(flat.numpy().data, dtype=torch.float32, count=100, offset=400 * address)
        for position, number in enumerate(memory):
            box = Region((0,), (2,))
            view = own[2 * position : 2 * position + 2]
            name = f"output_layer.{number}"
            made.append(Fragment(name, "master", (2,), box, view, True, False, view, 0, (0,), False))
    return made


@given(st.permutations(range(6)), st.permutations(range(3)), st.randoms())
def test_the_order_is_that_of_each_memory_and_not_of_addresses(numbers, addresses, random):
    memories = numbers[:3], numbers[3:5], numbers[5:]
    fragments = fragments_in(memories, addresses)
    random.shuffle(fragments)
    told = [int(entry.name.rpartition(".")[2]) for entry in share(fragments).layout.entries]
    assert told == [number for memory in sorted(memories, key=lambda memory: memory[0]) for number in memory]
