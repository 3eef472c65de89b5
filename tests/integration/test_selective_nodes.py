"""Memory and copies choose experts by themselves: whichever nodes are lost, each fragment is the newest that is left.

Each worker is a node, and keeps copies for one other.  Copies have fewer experts than memory.  What is left follows
from manifests alone, as JSON: of each node's part of an operator, its own memory's and those of copies on other nodes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.snapshot_files import events, node_memory
from tests.integration.test_pec_nodes import (
    NODES,
    PLACES,
    SUBSETS,
    Oracle,
    Scene,
    Source,
    Spot,
    elements,
    kill,
    manifests,
    merged,
)
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS
from tests.worlds import run_world

SELECTIVE = PLACES | dict(
    ckpt_policy="selective", ckpt_tier="peers", replicas=1, persist_interval=100, selective_gradients="off"
)
SCENES = {
    "each stage has its experts": Scene(LAYOUTS["PP2xEP2"][1], {}, {}, 10),
    # nodes 0 and 2 each save half of the same experts, and so do 1 and 3
    "two nodes share each expert": Scene(LAYOUTS["EP2"][1] | FOUR, {}, {}, 10),
}


def whole_in(model: dict[str, Counter], nodes: list[list[Path]]) -> Iterator[tuple[int, str]]:
    """Yields, by iteration, the operators of which the nodes have everything; each in any of its places."""
    there = [[manifests(place) for place in places] for places in nodes]
    for iteration in {i for places in there for place in places for i in place}:
        found: dict[str, Counter] = {name: Counter() for name in model}
        for places in there:
            of_node: dict[str, Counter] = {}
            for counts in (elements([place[iteration]]) for place in places if iteration in place):
                assert all(of_node.setdefault(name, its) == its for name, its in counts.items())  # a copy has all of it
            for name, its in of_node.items():
                found[name].update(its)
        yield from ((iteration, name) for name, its in found.items() if its == model[name])


def newest(spot: Spot) -> tuple[int, dict[str, Source]]:
    """From which iteration a run has to go on, and from where each operator has to come."""
    ((iteration, everything),) = manifests(spot.storage).items()
    model = elements([everything])
    whole: dict[str, set[Source]] = {name: {(iteration, "storage")} for name in model}
    copies = {node: [spot.node(other) / f"of_{node}" for other in NODES if other != node] for node in NODES}
    for iteration, name in whole_in(model, [[spot.node(node), *copies[node]] for node in NODES]):
        whole[name].add((iteration, "memory"))
    base = max(set.intersection(*({i for i, _ in w} for name, w in whole.items() if ".expert." not in name)))
    for iteration, name in whole_in(model, [[spot.node(node) / "before"] for node in NODES]):
        whole[name].add((iteration, "memory before"))  # of experts; the rest could not go on from there
    usable = {n: w if ".expert." in n else {one for one in w if one[0] == base} for n, w in whole.items()}
    return base, {name: min(places, key=lambda one: (-one[0], one[1])) for name, places in usable.items()}


@pytest.mark.recovery
@pytest.mark.parametrize("scene", SCENES)
def test_every_subset_of_nodes_can_be_lost(scene, data, tmp_path):
    flags = FLAGS | SCENES[scene].parallel | data | dict(train_iters=99, num_experts=8)
    with node_memory() as memory:
        run = Spot(tmp_path / "run", Path(memory))
        oracle = kill(
            SCENES[scene],
            flags | SELECTIVE | run.flags,
            run,
            tmp_path / "record",
            body="tests.integration.node_bodies:train_with_two_budgets",
            directory=str(tmp_path),
            experts=[4, 1],
        )
        spots = {lost: run.without(lost, f"without-{''.join(lost)}") for lost in SUBSETS}
        wanted = load(spots, flags, oracle, tmp_path)
        check_scene(wanted)
        again = {
            (lost, more): spots[lost].without(more, f"{''.join(lost)}-then-{''.join(more)}") for lost, more in TWICE
        }
        load(again, flags, oracle, tmp_path)


TWICE = [((), ("0",)), ((), ("1", "2")), (("1",), ("0",)), (("1",), ("2",)), (("0", "2"), ("3",)), (("2",), ("1", "3"))]
"""Nodes that are lost, and others that are lost once the job has gone on."""


def load(spots: dict[tuple, Spot], flags: dict, oracle: Oracle, directory) -> dict[tuple, tuple]:
    """Goes on in each place, and compares; what was to be."""
    logged, wanted = (
        dict(log_dir=str(directory / f"log-{len(spots)}")),
        {lost: newest(spot) for lost, spot in spots.items()},
    )
    places = [SELECTIVE | spot.flags for spot in spots.values()]
    body = "tests.integration.node_bodies:load_each_with_copies"
    told = run_world(4, body, directory=str(directory), flags=flags | logged, places=places)
    loads = zip(wanted.items(), zip(*told, strict=True), events(logged, "resume"), events(logged, "lost"), strict=True)
    for (lost, (base, best)), workers, resumed, booked in loads:
        assert {worker["start"] for worker in workers} == {base}
        reached = {name: iteration for name, (iteration, _) in best.items()}
        hashes = merged(worker["hashes"] for worker in workers)
        assert hashes == {name: oracle.hashes[iteration][name] for name, iteration in reached.items()}, lost
        assert resumed["iteration"] == base and {tuple(source) for source in resumed["sources"]} == set(best.values())
        assert booked["plt"] == pytest.approx(booked["raised_by"]) == pytest.approx(oracle.plt(base, reached))
    return wanted


def check_scene(wanted: dict[tuple, tuple]) -> None:
    """A worker's death costs fewer tokens than a node's, and that fewer than the loss of a node and its copies."""
    of_experts = {
        lost: Counter(source for name, source in best.items() if ".expert." in name)
        for lost, (_, best) in wanted.items()
    }
    ages = {lost: sum((wanted[()][0] - i) * n for (i, _), n in found.items()) for lost, found in of_experts.items()}
    for node, other in itertools.permutations(("0", "1")):
        both = tuple(sorted((node, other)))
        assert ages[()] < ages[node,] < ages[both], ages
        assert {tier for _, tier in of_experts[node,]} == {"memory"}, of_experts[node,]
