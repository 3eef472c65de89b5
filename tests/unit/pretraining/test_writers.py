"""Services that fail or hang: their values are dropped, reported once and counted, and no caller waits."""

import threading
from types import SimpleNamespace

import pytest

from megatron.pretraining.logging import writers
from megatron.pretraining.logging.writers import Board, Listeners, MlflowWriter, WandbWriter


class Told:
    """Listeners that remember what they were told."""

    def __init__(self):
        self.said, self.lost, self.again = [], [], threading.Event()
        self.listeners = Listeners(self.said.append, self._lose)

    def _lose(self, *lost):
        self.lost.append(lost)
        self.again.set()


@pytest.fixture
def told():
    return Told()


class Hanging:
    """A module ``wandb`` that does not answer until it is released."""

    def __init__(self):
        self.hangs, self.released, self.calls, self.options = threading.Event(), threading.Event(), [], {}

    def init(self, **options):
        self.options = options

    def log(self, values, step=None, commit=True):
        self.hangs.set()
        self.released.wait()
        self.calls.append((values, step, commit))

    def finish(self):
        self.released.wait()
        self.calls.append("finished")


def test_unwritable_files_drop_values_until_writable(tmp_path, told):
    pytest.importorskip("tensorboard")
    directory = tmp_path / "board"
    directory.write_text("in its place")
    board = Board(str(directory), 10, told.listeners)
    for step in range(5):
        board.add_scalars({"loss": 1.0, "norm": 2.0}, step)
    board.add_scalar("loss", 3.0, 5)
    while board._dropped < 11:
        assert len(told.said) <= 1
    assert len(told.said) == 1 and str(directory) in told.said[0]
    directory.unlink()
    while not told.again.wait(0.05):
        board.add_scalar("loss", 4.0, 6)
    board.close()
    assert told.lost[0][:2] == ("tensorboard", told.lost[0][1]) and told.lost[0][1] >= 11 and len(told.lost) == 1
    assert list(directory.glob("events.out.tfevents.*"))


def test_hanging_service_delays_no_caller(told):
    service = Hanging()
    writer = WandbWriter(service, told.listeners)
    writer.init(project="p", config={"lr": 1.0})
    writer.begin_run("job7")
    writer.log({"loss": 1.0}, 0)
    assert service.hangs.wait(60)
    for step in range(1, 30_000):  # returns, although the service does not
        writer.log({"loss": 1.0}, step)
    writer.add_text("moc/recovery", "worker lost", 7)
    assert writer._dropped == 20_000 and len(told.said) == 1
    service.released.set()
    assert told.again.wait(60)
    assert service.options == {"project": "p", "config": {"lr": 1.0}, "id": "job7", "resume": "allow"}
    writer.close()
    assert sum(values for _, values, _ in told.lost) == 30_001 - len(service.calls) + 1
    assert service.calls[0] == ({"loss": 1.0}, 0, True) and service.calls[-1] == "finished"


def test_values_of_hanging_service_are_counted_at_close(told, monkeypatch):
    monkeypatch.setattr(writers, "_CLOSING_S", 0.05)
    service = Hanging()
    writer = WandbWriter(service, told.listeners)
    writer.init(config={})
    writer.begin_run("job7")
    writer.add_scalars({"moc/plt": 0.1, "moc/k": 2.0}, 3)
    writer.close()
    assert told.lost == [("wandb", 2, 0.0)]
    service.released.set()


def test_replacement_continues_its_mlflow_run(told, monkeypatch):
    calls, runs = [], []
    service = SimpleNamespace(
        set_experiment=lambda name: calls.append(name),
        search_runs=lambda **query: runs,
        start_run=lambda **options: calls.append(options),
        log_metrics=lambda values, step: calls.append((values, step)),
        set_tag=lambda name, text: calls.append((name, text)),
        end_run=lambda: None,
    )
    monkeypatch.setattr(writers, "import_module", lambda name: service)
    first = MlflowWriter("pre-training", "job7", told.listeners)
    first.add_scalars({"moc/loss": 2.0}, 5)
    first.add_text("moc/recovery", "worker lost", 6)
    first.close()
    assert calls == ["pre-training", {"tags": {"moc.job": "job7"}}, ({"moc/loss": 2.0}, 5),
                     ("moc/recovery/6", "worker lost")]  # fmt: skip
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="r1")))
    MlflowWriter("pre-training", "job7", told.listeners).close()
    assert calls[-1] == {"run_id": "r1"} and told.lost == []
