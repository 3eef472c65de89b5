"""Transfers of state between workers that keep a part of it in host memory."""

from types import SimpleNamespace
from typing import Any

import torch

from moc.recovery.plan import RankCopy
from moc.runtime import collectives
from moc.session.resume import survivors
from moc.state.operators import Region
from tests.fake_cuda import GPU, FakeCuda


class State:
    """A state whose masters are in host memory, and whose buffers are not."""

    def __init__(self):
        self.views = {GPU: torch.empty(6, device=GPU), "cpu": torch.empty(1000)}
        self.loaded: list[str] = []

    def operators(self):
        return ["embedding"]

    def fragments(self, operators, detail):
        for name, view in self.views.items():
            yield SimpleNamespace(operator="embedding", name=name, view=view, region=Region((0,), (len(view),)))

    def load(self, fragment, values):
        assert values.device == fragment.view.device and values.shape == fragment.view.shape
        self.loaded.append(fragment.name)


def test_host_memory_is_not_sent_over_nccl(monkeypatch):
    messages: list[tuple[str, int, Any]] = []

    def note(values, rank, group):
        messages.append((values.device.type, values.nbytes, group))

    world = SimpleNamespace(_device_types=[torch.device(GPU)])  # as NCCL's
    monkeypatch.setattr(collectives.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(collectives, "_group", "of gloo")
    monkeypatch.setattr(survivors.dist, "send", note)
    monkeypatch.setattr(survivors.dist, "recv", note)
    copies = [RankCopy("embedding", 0, 1)]
    with FakeCuda():
        state: Any = State()
        assert survivors.exchange(copies, state, rank=0) == 0 and not state.loaded
        assert survivors.exchange(copies, state, rank=1) == 4024 and sorted(state.loaded) == ["cpu", GPU]
    assert messages == 2 * [("cpu", 4000, "of gloo"), (GPU, 24, None)]
