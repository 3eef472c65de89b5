"""Whichever nodes are lost, each fragment comes back in its newest state that has survived (MoC-System, section 5.1).

Each worker is a node.  What that state is follows from manifests alone, as JSON; how it looked, from a record that
workers kept while they trained, apart from all that they saved.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from moc.state.operators import operator_of
from moc.store.shard_file import read_stored_boxes
from moc.store.storage import LocalBlob, LocalStorage
from moc.store.store import Store
from tests.host_memory import find_memory_storage
from tests.integration.snapshot_files import events, node_memory
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS
from tests.shared import ALL
from tests.worlds import run_world, start_world

NODES = ["0", "1", "2", "3"]
SUBSETS = [lost for number in range(len(NODES) + 1) for lost in itertools.combinations(NODES, number)]
PLACES = dict(ckpt_tier="memory", ckpt_keep=99, node_of_rank=",".join(NODES), snapshot_interval=1, persist_interval=2)
PEC = PLACES | dict(ckpt_policy="pec", pec_k_snapshot=4, pec_k_persist=1)
TRAIN = "tests.integration.node_bodies:train_recorded"
SELECTIVE = PLACES | dict(ckpt_policy="selective", selective_experts=2, selective_gradients="off")
GRADIENTS = SELECTIVE | dict(selective_experts=8, selective_gradients="on")

Source = tuple[int, str]
"""Iteration and tier of what something comes from; of one iteration, memory sorts before storage."""

Wanted = tuple[int, dict[str, Source], dict[str, list[Source]]]
"""From which iteration a run has to go on, where each operator has to come from, and the gradients that follow."""


@dataclass(frozen=True)
class Spot:
    """The places of one run: storage and the memory of its nodes."""

    storage: Path
    memory: Path

    @property
    def flags(self) -> dict:
        """The flags that name them."""
        return dict(ckpt_dir=str(self.storage), ckpt_memory_dir=str(self.memory))

    def node(self, node: str) -> Path:
        """Memory of one node."""
        return find_memory_storage(self.memory, str(self.storage), node).root

    def without(self, lost: Iterable[str], name: str) -> Spot:
        """A copy after some nodes were lost; it shares files, which nobody writes to in place."""
        copy = Spot(self.storage.parent / name, self.memory / name)
        copy.memory.mkdir()
        left_out = shutil.ignore_patterns("slots", ".lock.*", ".fence")
        shutil.copytree(self.storage, copy.storage, copy_function=os.link, ignore=left_out)
        for node in set(NODES) - set(lost):
            shutil.copytree(self.node(node), copy.node(node), copy_function=os.link, ignore=left_out)
        return copy


def manifests(directory: Path) -> dict[int, dict]:
    """The manifests in one place, by iteration."""
    found = (json.loads(path.read_text()) for path in directory.glob("iter_*/manifest.json"))
    return {manifest["iteration"]: manifest for manifest in found}


def elements(parts: Iterable[dict]) -> dict[str, Counter]:
    """By operator, how many elements of each slot some manifests name together."""
    found: dict[str, Counter] = {}
    for part in parts:
        for name, entry in part["operators"].items():
            found.setdefault(name, Counter()).update(entry["elements"])
    return found


def newest(spot: Spot, damaged: tuple[int, set[str]] = (0, set())) -> Wanted:
    """What a run has to go on with.

    Args:
        spot: where the run is.
        damaged: an iteration, and the operators of which nothing can be used that memory has of it.
    """
    storage, nodes = manifests(spot.storage), [manifests(spot.node(node)) for node in NODES]
    model = elements([storage[min(storage)]])  # the first one has everything
    whole: dict[str, set[Source]] = {name: set() for name in model}
    gradients: dict[str, set[int]] = {name: set() for name in model}
    for iteration, manifest in storage.items():
        for name in manifest["operators"]:
            whole[name].add((iteration, "storage"))
    for iteration in set().union(*nodes):
        for name, counts in elements(node[iteration] for node in nodes if iteration in node).items():
            if iteration == damaged[0] and name in damaged[1]:
                continue
            if counts == model[name]:
                whole[name].add((iteration, "memory"))
            elif counts == {"grad": model[name]["master"]}:
                gradients[name].add(iteration)
    return best_of(whole, gradients)


def best_of(whole: dict[str, set[Source]], gradients: dict[str, set[int]]) -> Wanted:
    """What a run has to go on with, by operator its whole states and the iterations of its gradients."""
    iterations = [{i for i, _ in places} for name, places in whole.items() if ".expert." not in name]
    base = max(set.intersection(*iterations))
    best, steps = {}, {}
    for name, places in whole.items():
        usable = places if ".expert." in name else {source for source in places if source[0] == base}
        first = lambda source: (-source[0], source[1])  # noqa: E731
        best[name] = min(usable, key=first)
        past = min((source for source in usable if source[0] <= base), key=first)
        unbroken = itertools.takewhile(gradients[name].__contains__, range(past[0] + 1, base + 1))
        steps[name] = [(iteration, "memory") for iteration in unbroken if past[1] != "memory before"]
        if steps[name] and steps[name][-1][0] == base:
            best[name] = past
        elif best[name] != past:
            steps[name] = []
    return base, best, steps


def reached_by(best: dict[str, Source], steps: dict[str, list[Source]]) -> dict[str, int]:
    """By operator, the iteration of its state."""
    return {name: (steps[name] or [source])[-1][0] for name, source in best.items()}


class Oracle:
    """What workers recorded while they trained: by iteration."""

    def __init__(self, directory: Path):
        self.hashes: dict[int, dict[str, dict[str, str]]] = {}
        self.tokens: dict[int, dict[int, Counter]] = {}
        for path in directory.iterdir():
            for line in map(json.loads, path.read_text().split("\n")[:-1]):  # the last one may be torn
                known = self.hashes.get(line["iteration"], {})
                self.hashes[line["iteration"]] = merged([known, line["hashes"]])
                for layer, counts in line["tokens"].items():
                    of_layer = self.tokens.setdefault(line["iteration"], {}).setdefault(int(layer), Counter())
                    of_layer.update(dict(enumerate(counts)))

    def plt(self, base: int, reached: dict[str, int]) -> float:
        """MoC-System, eq. 7, for the first fault of a run."""
        shares = []
        for layer in self.tokens[base]:
            lost = routed = 0
            for iteration in range(1, base + 1):
                for expert, tokens in self.tokens[iteration][layer].items():
                    routed += tokens
                    lost += tokens * (reached[f"layers.{layer}.expert.{expert}"] < iteration)
            shares.append(lost / routed)
        return sum(shares) / len(shares)


def merged(tables: Iterable[dict[str, dict]]) -> dict[str, dict]:
    """Tables of tables in one."""
    found: dict[str, dict] = {}
    for table in tables:
        for name, entries in table.items():
            found.setdefault(name, {}).update(entries)
    return found


def damage(spot: Spot, node: str) -> tuple[int, set[str]]:
    """Flips bits all over the data of the newest snapshot in a node's memory; its iteration, and what is hit."""
    iteration, manifest = max(manifests(spot.node(node)).items())
    ((name, entry),) = manifest["files"].items()
    path = spot.node(node) / f"iter_{iteration:07d}" / name
    content = bytearray(path.read_bytes())
    for position in range(entry["header_bytes"], entry["bytes"], 1000):
        content[position] ^= 1
    path.unlink()  # other copies share it
    path.write_bytes(content)
    return iteration, {operator_of(one.box.name) for one in read_stored_boxes(LocalBlob(path)) if one.find_damage()}


@dataclass(frozen=True)
class Scene:
    """How a run is cut short.

    Attributes:
        parallel: flags of the layout.
        changes: other flags.
        body: how workers are held up; see ``node_bodies.train_recorded``.
        iteration: they are killed as soon as this one is in memory, or a newer one.
        behind: but not in that of this node.
        stored: and when this one is in storage.
    """

    parallel: dict
    changes: dict
    body: dict
    iteration: int
    behind: str | None = None
    stored: int = 0

    def reached(self, spot: Spot) -> bool:
        """Whether it is time."""
        if not Store(LocalStorage(spot.storage)).iterations():  # nor is there a run whose memory could be found
            return False
        nodes = [spot.node(node) for node in NODES if node != self.behind]
        storage, *memory = (max(Store(LocalStorage(root)).iterations(), default=0) for root in (spot.storage, *nodes))
        return min(memory) >= self.iteration and storage >= self.stored


SCENES = {
    "storage is behind": Scene(LAYOUTS["PP2xEP2"][1], {}, dict(hold_from=8), 10),
    # experts in the memory of the other nodes are newer than the rest can be
    "a node is behind": Scene(LAYOUTS["EP4"][1], {}, dict(hold_from=8, late=[3, 10]), 10, behind="3"),
    # nodes 0 and 2 share the same experts, and so do 1 and 3; storage has the newest snapshot too, with fewer experts
    "storage is level": Scene(
        LAYOUTS["EP2"][1] | FOUR,
        dict(snapshot_interval=4, persist_interval=4, ckpt_blocking=True),
        dict(stop_at=9),
        8,
        stored=8,
    ),
}


def subsets(turn: int) -> list[tuple[str, ...]]:
    """Nodes that are lost together: those that each scene is known by, and a third of the others; or all of them.

    Thirds take turns, so that three scenes have every subset.
    """
    known = [(), ("0",), ("1",), ("0", "1"), tuple(NODES)]
    return SUBSETS if ALL else [*known, *[lost for lost in SUBSETS if lost not in known][turn % 3 :: 3]]


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("policy", "scene", "turn"),
    [
        *((PEC, scene, turn) for turn, scene in enumerate(SCENES)),
        (SELECTIVE, "storage is level", 2),
        (GRADIENTS, "a node is behind", 1),
        *ALL * [(SELECTIVE, scene, turn) for turn, scene in enumerate(("storage is behind", "a node is behind"))],
        *ALL * [(GRADIENTS, "storage is behind", 0)],
    ],
)
def test_every_subset_of_nodes_can_be_lost(policy, scene, turn, data, tmp_path):
    flags = FLAGS | SCENES[scene].parallel | data | dict(train_iters=99, num_experts=8)
    pec = policy | SCENES[scene].changes
    logged = dict(log_dir=str(tmp_path / "log"))
    with node_memory() as memory:
        run = Spot(tmp_path / "run", Path(memory))
        oracle = kill(SCENES[scene], flags | pec | run.flags, run, tmp_path / "record")
        spots = {lost: run.without(lost, f"without-{''.join(lost)}") for lost in subsets(turn)}
        wanted = {lost: newest(spot) for lost, spot in spots.items()}
        spots["damaged"] = run.without([], "damaged")
        wanted["damaged"] = newest(run, damaged=damage(spots["damaged"], "2"))
        load = dict(flags=flags | logged, places=[pec | spot.flags for spot in spots.values()])
        told = run_world(4, "tests.integration.node_bodies:load_each", **load)
    check_scene(scene, wanted, policy is GRADIENTS)
    loads = zip(wanted.values(), zip(*told, strict=True), events(logged, "resume"), events(logged, "lost"), strict=True)
    for (base, best, steps), workers, resumed, lost in loads:
        assert {worker["start"] for worker in workers} == {base} and all(w["steps"] == [base] for w in workers)
        hashes = merged(worker["hashes"] for worker in workers)
        reached = reached_by(best, steps)
        assert hashes == {name: oracle.hashes[iteration][name] for name, iteration in reached.items()}
        sources = set(best.values()).union(*steps.values())
        assert resumed["iteration"] == base and {tuple(source) for source in resumed["sources"]} == sources
        assert lost["plt"] == pytest.approx(lost["raised_by"]) == pytest.approx(oracle.plt(base, reached))


def kill(scene: Scene, flags: dict, spot: Spot, record: Path, body: str = TRAIN, **told) -> Oracle:
    """Trains, and kills all workers when a scene has come; what they recorded."""
    record.mkdir(parents=True)
    world = start_world(4, body, flags=flags, record_dir=str(record), **scene.body, **told)
    wait_for(lambda: world.ended() or scene.reached(spot))
    world.kill()
    ended = world.wait()
    assert {result.exit for result in ended} == {-9}, "\n".join(result.output[-3000:] for result in ended)
    return Oracle(record)


def check_scene(scene: str, wanted: dict[tuple[str, ...] | str, Wanted], gradients: bool) -> None:
    """The scene is what it is meant to be."""
    base, best, steps = wanted[()]
    assert gradients == any(steps.values())
    newest_in_storage = wanted[tuple(NODES)][0]
    one_lost = wanted["1",][1]
    if scene == "storage is behind":
        assert base > newest_in_storage and (base, "memory") in best.values()
    elif scene == "a node is behind":
        assert (gradients or max(best.values()) == (base + 1, "memory")) and base > newest_in_storage
    else:
        assert base == newest_in_storage and (base, "memory") in best.values()
    assert {tier for _, tier in one_lost.values()} == {"memory", "storage"}
    assert len({iteration for iteration, _ in wanted[tuple(NODES)][1].values()}) > 1
