"""A run that cannot go on ends with one sentence of one worker."""

import signal

import pytest
import torch.distributed as dist

from megatron.pretraining.process import cpu
from moc.errors import with_code
from tests.cases import each_row
from tests.errors import only_code

cpu.install()

from megatron.pretraining.config import ConfigError  # noqa: E402
from megatron.pretraining.errors import reported  # noqa: E402
from megatron.pretraining.process import topology as first_worker  # noqa: E402
from moc.runtime.groups import Aborted, PeerFailure  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402


@pytest.fixture
def handled():
    """SIGTERM is only noted, as with --exit-signal-handler."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@each_row("error, code", [(CheckpointError("it is damaged"), 1), (ConfigError("it is wrong"), 2)])
def test_error_prints_one_line_and_exit_code(error, code, capsys, monkeypatch, handled):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended, reported():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == f"pretrain_gpt_moe.py: error (worker 0): {with_code(error)}\n"


@each_row("kind", [PeerFailure, Aborted, dist.DistNetworkError, dist.DistStoreError])
def test_lost_connection_is_reported_in_one_line(kind, capsys, monkeypatch, handled):
    monkeypatch.setenv("RANK", "0")
    gloo = (
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:40934\nException raised from ... (most recent call first)"
    )
    with pytest.raises(SystemExit) as ended, reported():
        raise kind(gloo)
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1
    assert only_code(said) == "worker-unreachable" and "[pair.cc:553]" in said and "most recent" not in said


def test_launcher_can_end_worker_that_waits_for_first(monkeypatch, handled):
    monkeypatch.setenv("RANK", "1")
    waited = []
    monkeypatch.setattr(first_worker.time, "sleep", lambda _: waited.append(signal.getsignal(signal.SIGTERM)))
    with pytest.raises(SystemExit), reported():
        raise CheckpointError("it is damaged")
    assert waited == [signal.SIG_DFL]
