"""Waits for other stages: each is in its context, now or when a request is waited for."""

from megatron.pretraining.process import cpu

cpu.install()

import contextlib  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

from megatron.pretraining.engine.boundary import Recorder, TimedCommunicator  # noqa: E402
from moc.logs.log import Pipeline  # noqa: E402
from tests.cases import each_row  # noqa: E402


class Request:
    """Notes when it is waited for."""

    def __init__(self, seen: list):
        self._seen = seen

    def wait(self) -> None:
        self._seen.append("waits")


@each_row("records", [False, True])
def test_every_communication_wait_runs_in_wait_context(records, monkeypatch):
    seen, sent, middle = [], [], SimpleNamespace(rank=lambda: 1)

    @contextlib.contextmanager
    def waiting():
        seen.append("begins")
        yield
        seen.append("ends")

    def communicate(self, *, wait_on_reqs=True, **message):
        seen.append("waits" if wait_on_reqs else "asks")
        return "activation", None, None if wait_on_reqs else {"recv_prev": Request(seen)}

    def through(wait_on_reqs: bool):
        seen.clear()
        message = dict(tensor_send_next=torch.ones(1), tensor_send_prev=None, recv_prev=True, recv_next=False)
        return one._communicate(**message, tensor_shape=(1,), wait_on_reqs=wait_on_reqs)

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: middle)
    monkeypatch.setattr(P2PCommunicator, "__init__", lambda self, group, config: setattr(self, "pp_group", group))
    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    recording = Pipeline(3, ((0, 0), (1, 0))), lambda crossing, tensor: sent.append(crossing)
    config: Any = None
    one = Recorder(config, *recording, waiting) if records else TimedCommunicator(config, waiting)
    assert through(True) == ("activation", None, None) and seen == ["begins", "waits", "ends"]
    _, _, requests = through(False)
    assert seen == ["asks"]
    requests["recv_prev"].wait()
    assert seen == ["asks", "begins", "waits", "ends"]
    assert len(sent) == 2 * records
