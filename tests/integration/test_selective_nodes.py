"""Memory and copies choose experts by themselves: whichever nodes are lost, each fragment is the newest that is left.

Each worker is a node, and keeps copies for one other.  Copies have fewer experts than memory.  What is left follows
from manifests alone, as JSON: of each node's part of an operator, its own memory's and those of copies on other nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.snapshot_files import events, node_memory
from tests.integration.test_pec_nodes import (
    NODES,
    PLACES,
    Oracle,
    Scene,
    Source,
    Spot,
    Wanted,
    best_of,
    elements,
    kill,
    manifests,
    merged,
    reached_by,
    subsets,
)
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS
from tests.shared import ALL
from tests.worlds import run_world

SELECTIVE = PLACES | dict(ckpt_policy="selective", ckpt_tier="peers", replicas=1, persist_interval=100)
APART, SHARED = "each stage has its experts", "two nodes share each expert"
SCENES = {
    APART: Scene(LAYOUTS["PP2xEP2"][1], {}, {}, 10),
    # nodes 0 and 2 each save half of the same experts, and so do 1 and 3
    SHARED: Scene(LAYOUTS["EP2"][1] | FOUR, {}, {}, 10),
}


def found_in(nodes: list[list[Path]]) -> Iterator[tuple[int, str, Counter]]:
    """Yields, by iteration, the operators that nodes have, with the elements of each; each in any of its places."""
    there = [[manifests(place) for place in places] for places in nodes]
    for iteration in {i for places in there for place in places for i in place}:
        found: dict[str, Counter] = {}
        for places in there:
            of_node: dict[str, Counter] = {}
            for counts in (elements([place[iteration]]) for place in places if iteration in place):
                assert all(of_node.setdefault(name, its) == its for name, its in counts.items())  # a copy has all of it
            for name, its in of_node.items():
                found.setdefault(name, Counter()).update(its)
        yield from ((iteration, name, its) for name, its in found.items())


def newest(spot: Spot) -> Wanted:
    """What a run has to go on with."""
    ((first, everything),) = manifests(spot.storage).items()
    model = elements([everything])
    whole: dict[str, set[Source]] = {name: {(first, "storage")} for name in model}
    gradients: dict[str, set[int]] = {name: set() for name in model}
    copies = {node: [spot.node(other) / f"of_{node}" for other in NODES if other != node] for node in NODES}
    for iteration, name, its in found_in([[spot.node(node), *copies[node]] for node in NODES]):
        if its == model[name]:
            whole[name].add((iteration, "memory"))
        elif its == {"grad": model[name]["master"]}:
            gradients[name].add(iteration)
    for iteration, name, its in found_in([[spot.node(node) / "before"] for node in NODES]):
        if its == model[name] and ".expert." in name:  # the rest could not go on from there
            whole[name].add((iteration, "memory before"))
    return best_of(whole, gradients)


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("scene", "gradients", "turn"),
    [(SHARED, "on", 1), *ALL * [(APART, "off", 0), (APART, "on", 0), (SHARED, "off", 2)]],
)
def test_every_subset_of_nodes_can_be_lost(scene, gradients, turn, data, tmp_path):
    flags = FLAGS | SCENES[scene].parallel | data | dict(train_iters=99, num_experts=8)
    selective = SELECTIVE | dict(selective_gradients=gradients)
    with node_memory() as memory:
        run = Spot(tmp_path / "run", Path(memory))
        oracle = kill_with_copies(SCENES[scene], flags | selective, run, tmp_path)
        spots = {lost: run.without(lost, f"without-{''.join(lost)}") for lost in subsets(turn)}
        wanted = load(spots, flags, selective, oracle, tmp_path)
        check_scene(wanted, gradients == "on")
        again = {
            (lost, more): spots[lost].without(more, f"{''.join(lost)}-then-{''.join(more)}")
            for number, (lost, more) in enumerate(TWICE)
            if ALL or number % 3 == turn
        }
        load(again, flags, selective, oracle, tmp_path)


@pytest.mark.recovery
@pytest.mark.parametrize(("scene", "turn"), [(APART, 2), *ALL * [(SHARED, 1)]])
def test_nodes_can_be_lost_again_after_resume(scene, turn, data, tmp_path):
    """Chains and copies begun after the first loss, beside those of before it."""
    flags = FLAGS | SCENES[scene].parallel | data | dict(train_iters=99, num_experts=8)
    with node_memory() as memory:
        run = Spot(tmp_path / "run", Path(memory))
        before = kill_with_copies(SCENES[scene], flags | SELECTIVE, run, tmp_path)
        later = run.without(["1"], "later")
        (base, *_), longer = newest(later), dataclasses.replace(SCENES[scene], iteration=17)
        oracle = kill_with_copies(longer, flags | SELECTIVE, later, tmp_path / "second")
        known = {iteration: hashes for iteration, hashes in before.hashes.items() if iteration <= base}
        oracle.hashes = known | oracle.hashes
        spots = {lost: later.without(lost, f"later-{''.join(lost)}") for lost in subsets(turn)}
        wanted = load(spots, flags, SELECTIVE, oracle, tmp_path, first=False)
    assert wanted[()][0] >= 17 > base
    check_scene(wanted, gradients=True)


def kill_with_copies(scene: Scene, flags: dict, spot: Spot, directory: Path) -> Oracle:
    """Trains with copies of fewer experts, until a scene has come."""
    told = dict(directory=str(directory), experts=[4, 1])
    body = "tests.integration.node_bodies:train_with_two_budgets"
    return kill(scene, flags | spot.flags, spot, directory / "record", body=body, **told)


TWICE = [((), ("0",)), ((), ("1", "2")), (("0", "2"), ("3",)), (("2",), ("1", "3")), (("1",), ("0",)), (("1",), ("2",))]
"""Nodes that are lost, and others that are lost once the job has gone on; each third is of subsets of its turn."""


def load(
    spots: dict[tuple, Spot], flags: dict, selective: dict, oracle: Oracle, directory: Path, first: bool = True
) -> dict[tuple, Wanted]:
    """Goes on in each place, and compares, lost tokens too if it is the first time; what was to be."""
    logged = dict(log_dir=str(directory / f"log-{len(spots)}"))
    wanted = {lost: newest(spot) for lost, spot in spots.items()}
    places = [selective | spot.flags for spot in spots.values()]
    body = "tests.integration.node_bodies:load_each_with_copies"
    told = run_world(4, body, directory=str(directory), flags=flags | logged, places=places)
    loads = zip(wanted.items(), zip(*told, strict=True), events(logged, "resume"), events(logged, "lost"), strict=True)
    for (lost, (base, best, steps)), workers, resumed, booked in loads:
        assert {worker["start"] for worker in workers} == {base}
        hashes, reached = merged(worker["hashes"] for worker in workers), reached_by(best, steps)
        assert hashes == {name: oracle.hashes[iteration][name] for name, iteration in reached.items()}, lost
        sources = set(best.values()).union(*steps.values())
        assert resumed["iteration"] == base and {tuple(source) for source in resumed["sources"]} == sources
        assert resumed["stale"] == sum(iteration != base for iteration in reached.values())
        assert not first or booked["plt"] == pytest.approx(booked["raised_by"]) == pytest.approx(
            oracle.plt(base, reached)
        )
    return wanted


def check_scene(wanted: dict[tuple, Wanted], gradients: bool) -> None:
    """A worker's death costs fewer tokens than a node's, and that fewer than the loss of a node and its copies."""
    ages, (base, *_) = {}, wanted[()]
    for lost, (_, best, steps) in wanted.items():
        ages[lost] = sum(base - iteration for iteration in reached_by(best, steps).values())
    for node, other in itertools.permutations(("0", "1")):
        both = tuple(sorted((node, other)))
        assert ages[()] <= ages[node,] <= ages[both], ages
        assert gradients or ages[()] < ages[node,] < ages[both], ages  # with them, copies can be of all that there is
        _, best, steps = wanted[node,]
        assert {tier for name, (_, tier) in best.items() if ".expert." in name} == {"memory"}, best
    assert gradients == any(any(steps.values()) for _, _, steps in wanted.values())
