"""What the adapters of accelerate and Lightning cannot repeat is refused before training; in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from moc.errors import UserError, code_of


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(2)


@pytest.fixture(autouse=True)
def no_job_is_left(monkeypatch):
    monkeypatch.setattr("moc.torch.loop._job", None)
    monkeypatch.setattr("moc.torch.frameworks._job", None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def accelerated(directory, case):
    """Prepares an accelerator; the cases are refused."""
    from moc.accelerate import FaultTolerantAccelerator

    model, loader = nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    protection = {"iterations": 4, "policy": None, "directory": str(directory)}
    accelerator = FaultTolerantAccelerator(cpu=True, gradient_accumulation_steps=2, protection=protection)
    if case == "endless":
        accelerator.prepare(DataLoader(Endless()))
    if case == "short":
        accelerator.prepare(DataLoader(TensorDataset(torch.ones(1, 2))))
    if case == "two optimizers":
        accelerator.prepare(*optimizers)
    if case == "no model":
        next(iter(accelerator.prepare(loader)))
    if case == "early step":
        accelerator.prepare(optimizers[0]).step()


def lit(directory, case):
    """Fits a module; the cases are refused."""
    import lightning

    from moc.lightning import FaultTolerantStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = nn.Linear(2, 1), case != "manual"

        def training_step(self, batch, batch_idx):
            raise AssertionError("training has begun")

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return ([optimizer], [schedule]) if case == "epoch schedule" else optimizer

    strategy = FaultTolerantStrategy("cpu", protection={"policy": None, "directory": str(directory)})
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    limits = {"limit_train_batches": 2} if case == "limit" else {"max_epochs": -1} if case == "unlimited" else {}
    options = {"max_steps": -1 if case == "unlimited" else 2, **limits, **dict.fromkeys(silent, False)}
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, **options)
    dataset = Endless() if case == "endless" else TensorDataset(torch.ones(8, 2))
    trainer.fit(Module(), DataLoader(dataset, batch_size=2))


REFUSED = [
    (accelerated, "endless", "data-without-position"),
    (accelerated, "short", "data-without-position"),
    (accelerated, "two optimizers", "loop-call-unsupported"),
    (accelerated, "no model", "loop-call-unsupported"),
    (accelerated, "early step", "loop-call-unsupported"),
    (lit, "endless", "data-without-position"),
    (lit, "manual", "loop-call-unsupported"),
    (lit, "epoch schedule", "loop-call-unsupported"),
    (lit, "limit", "loop-call-unsupported"),
    (lit, "unlimited", "loop-call-unsupported"),
]


@pytest.mark.parametrize(("adapter", "case", "code"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_unrepeatable_settings_are_refused_before_training(adapter, case, code, tmp_path):
    pytest.importorskip("lightning" if adapter is lit else "accelerate")
    with pytest.raises(UserError) as refused:
        adapter(tmp_path, case)
    assert code_of(refused.value) == code
