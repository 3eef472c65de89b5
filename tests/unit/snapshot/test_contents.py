"""What a rank saves is the same file in every run of the same flags, wherever the state came to lie in memory."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.sharding import parse_scheme
from moc.sharding.save_plan import StageReplicas, describe_replicas, planned_bytes_by_rank
from moc.snapshot import contents as of_ranks
from moc.snapshot.contents import Contents, share
from moc.state.operators import Detail, Fragment, Region
from moc.store.manifest import FileEntry, OperatorEntry, RankReport, merge_reports
from tests.unit.sharding.fragment_worlds import NAMES, Tensor, World

ROOT = Path(__file__).parents[3]

WRITES = """
import sys
from pathlib import Path
import torch
from tests.unit.sharding.fragment_worlds import NAMES, Tensor, World
from moc.sharding import parse_scheme
from moc.sharding.save_plan import StageReplicas, describe_replicas
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.storage import LocalStorage
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
stage = StageReplicas({rank: describe_replicas(state.held, Detail.FULL) for rank, state in enumerate(states)})
storage = Store(LocalStorage(sys.argv[1]))
for rank, state in enumerate(states):
    contents = Contents(state, stage, rank, parse_scheme("EE+AN"))
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


def test_files_do_not_depend_on_hash_seed(tmp_path):
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
def test_entries_follow_order_within_memory_not_addresses(numbers, addresses, random):
    memories = numbers[:3], numbers[3:5], numbers[5:]
    fragments = fragments_in(memories, addresses)
    random.shuffle(fragments)
    told = [int(entry.name.rpartition(".")[2]) for entry in share(fragments).layout.entries]
    assert told == [number for memory in sorted(memories, key=lambda memory: memory[0]) for number in memory]


class Held:
    """The state of a rank of a world, as far as it is saved."""

    def __init__(self, world, rank):
        self._world, self._rank, self.asked = world, rank, 0

    def operators(self):
        return list(NAMES)

    def fragments(self, operators, detail):
        self.asked += 1
        return iter(self._world.fragments(self._rank, dict.fromkeys(operators, detail)))

    def steps(self):
        return {"output": 9}


def contents_of(rank):
    """The contents of one of two data-parallel ranks which hold all operators but one alike, and what all hold."""
    made = [
        Tensor(name, torch.arange(60).view(20, 3), False, (0, 1), (0.5,))
        for operator, names in NAMES.items()
        for name in names
        if operator != "layers.1.expert.7"
    ]
    world = World(1, 2, False, tuple(made))
    full = dict.fromkeys(NAMES, Detail.FULL)
    stage = StageReplicas({one: describe_replicas(world.fragments(one, full), Detail.FULL) for one in world.ranks})
    state = Held(world, rank)
    return Contents(state, stage, rank, parse_scheme("EE+AN")), state, stage


def test_shards_of_all_ranks_cover_plan():
    plan = dict.fromkeys(NAMES, Detail.FULL)
    reports = []
    for rank in (0, 1):
        contents, _, stage = contents_of(rank)
        reports.append(RankReport(str(rank), FileEntry(0, 0, ""), contents.entries(plan)))
        assert (
            max(contents.loads(plan).values())
            == max(planned_bytes_by_rank(stage, plan, parse_scheme("EE+AN")).values())
            > 0
        )
    elements = {"master": 120, "exp_avg": 120, "exp_avg_sq": 120}
    expected = {name: OperatorEntry("full", 9 if name == "output" else None, elements) for name in NAMES}
    del expected["layers.1.expert.7"]  # which another stage holds
    expected["layers.1.router"] = OperatorEntry("full", None, dict.fromkeys(elements, 60) | {"param": 60})
    assert merge_reports(reports)[1] == expected


def test_shard_of_rank_is_cached_per_plan(monkeypatch):
    monkeypatch.setattr(of_ranks, "_REMEMBERED", 3)
    contents, state, _ = contents_of(0)
    plans = [{name: Detail.FULL} for name in list(NAMES)[:4]]
    first, *others = [contents.share(plan) for plan in plans[:3]]
    assert contents.share(dict(plans[0])) is first
    last = contents.share(plans[3])  # the oldest goes
    assert [contents.share(plan) for plan in plans[1:]] == [*others, last]
    assert contents.share(plans[0]) is not first and state.asked == 1
