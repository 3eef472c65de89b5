"""Random streams follow from the position: (seed, iteration, stage, data-parallel rank) and megatron-core's ranks."""

import pytest

from tests.integration.tiny import FLAGS, LAYOUTS
from tests.worlds import run_world


@pytest.fixture(scope="module")
def workers(data):
    flags = {layout: FLAGS | LAYOUTS[layout][1] | data | dict(seed=5) for layout in ("PP2xEP2", "TP2xEP2")}
    draws = {name: run_world(4, "tests.integration.stream_bodies:draw", flags=f, iterations=[3, 4, 3])
             for name, f in flags.items()}  # fmt: skip
    return draws


@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2"])
def test_random_streams_depend_on_iteration(layout, workers):
    for worker in workers[layout]:
        third, fourth, again = worker["drawn"]
        assert again == third
        assert fourth["default"] != third["default"]
        assert fourth["tensor parallel"] != third["tensor parallel"]


@pytest.mark.parametrize("layout", ["PP2xEP2", "TP2xEP2"])
def test_default_stream_is_shared_by_tp_peers_only(layout, workers):
    by_place = {}
    for worker in workers[layout]:
        by_place.setdefault((worker["stage"], worker["data"]), set()).add(worker["drawn"][0]["default"])
    assert all(len(values) == 1 for values in by_place.values())
    assert len(set.union(*by_place.values())) == len(by_place)


def test_tensor_parallel_stream_differs_per_rank(workers):
    inside = [(w["data"], w["drawn"][0]["tensor parallel"]) for w in workers["TP2xEP2"]]
    assert len(set(inside)) == 4
