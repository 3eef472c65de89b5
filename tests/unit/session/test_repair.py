"""Parts of snapshots that were lost are saved again when the state comes by them, or it is said why not."""

from types import SimpleNamespace

import pytest
import torch

from moc.session.resume.rebuilding import Repair
from moc.snapshot.contents import share
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Fragment, Region
from moc.store.errors import CheckpointError
from moc.store.manifest import OperatorEntry
from moc.store.storage import LocalStorage
from moc.store.store import Store

TORN = {5: {"output": Detail.FULL}, 6: {"output": Detail.FULL}}


@pytest.fixture(params=["memory", "storage"])
def repair(request, tmp_path):
    values = torch.randn(8)
    box = Region((0, 0), (4, 2))
    held = [Fragment("output_layer.weight", "master", (4, 2), box, values, True, False, values, 0, (0,), False)]
    contents = SimpleNamespace(
        share=lambda operators: share(held), entries=lambda operators: {"output": OperatorEntry("full", 1, {})}
    )
    storage, memory = (Store(LocalStorage(tmp_path / name)) for name in ("storage", "memory"))
    tiers = SimpleNamespace(storage=storage, memory=memory if request.param == "memory" else None)
    world = SimpleNamespace(rank=1, device=torch.device("cpu"))
    saver = Saver(world.rank, world.device, tiers.memory, storage)
    return Repair(world, contents, tiers, saver), memory if request.param == "memory" else storage


def test_only_torn_snapshots_are_repaired(repair):
    repair, store = repair
    with repair.enabled_for(TORN):
        for iteration in (4, 5, 6, 7):
            repair.on_reached(iteration)
    assert [store.is_publishable(iteration, [1]) for iteration in (4, 5, 6, 7)] == [False, True, True, False]
    assert repair.failure is None
    with repair.enabled_for(TORN):  # another time they are there already
        repair.on_reached(5)


def test_repair_without_room_reports_failure(repair, monkeypatch):
    def full(*args, **kwargs):
        raise CheckpointError("no room", code="memory-full")

    repair, store = repair
    monkeypatch.setattr("moc.snapshot.saver.HostBuffer", full)
    with repair.enabled_for(TORN):
        repair.on_reached(5)
    assert repair.failure == "no room [memory-full]" and not store.is_publishable(5, [1])
