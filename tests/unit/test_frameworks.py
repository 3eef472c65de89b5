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
    if case == "wrap":
        protection["wrap"] = nn.parallel.DistributedDataParallel
    accelerator = FaultTolerantAccelerator(cpu=True, gradient_accumulation_steps=2, protection=protection)
    if case == "no iterations":
        accelerator._protection.pop("iterations")
        next(iter(accelerator.prepare(model, optimizers[0], loader)[-1]))
    if case == "plateau":
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
        next(iter(accelerator.prepare(model, optimizers[0], schedule, loader)[-1]))
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

    protection = {"policy": None, "directory": str(directory)} | ({"wrap": nn.Sequential} if case == "wrap" else {})
    strategy = FaultTolerantStrategy("cpu", protection=protection)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    limits = {
        "limit": {"limit_train_batches": 2},
        "one batch": {"limit_train_batches": 1},
        "unlimited": {"max_epochs": -1},
    }.get(case, {})
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
    (accelerated, "no iterations", "loop-call-unsupported"),
    (accelerated, "plateau", "loop-call-unsupported"),
    (accelerated, "wrap", "loop-call-unsupported"),
    (lit, "endless", "data-without-position"),
    (lit, "manual", "loop-call-unsupported"),
    (lit, "epoch schedule", "loop-call-unsupported"),
    (lit, "limit", "loop-call-unsupported"),
    (lit, "one batch", "loop-call-unsupported"),
    (lit, "wrap", "loop-call-unsupported"),
    (lit, "unlimited", "loop-call-unsupported"),
]


@pytest.mark.parametrize(("adapter", "case", "code"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_unrepeatable_settings_are_refused_before_training(adapter, case, code, tmp_path):
    pytest.importorskip("lightning" if adapter is lit else "accelerate")
    with pytest.raises(UserError) as refused:
        adapter(tmp_path, case)
    assert code_of(refused.value) == code


def test_accelerate_adds_gradients_of_all_batches(tmp_path):
    pytest.importorskip("accelerate")
    from moc.accelerate import FaultTolerantAccelerator

    model, data = nn.Linear(2, 1, bias=False), TensorDataset(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
    protection = {"iterations": 1, "policy": None, "directory": str(tmp_path)}
    accelerator = FaultTolerantAccelerator(cpu=True, gradient_accumulation_steps=2, protection=protection)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model.weight.detach().clone()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data))
    for (inputs,) in loader:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert (before - model.weight).tolist() == [pytest.approx([1.0, 2.0])]


def test_lightning_reports_mean_loss_and_ends_on_all_workers(tmp_path):
    """The iteration after the end tells the other workers; the Trainer ends within an iteration."""
    lightning = pytest.importorskip("lightning")
    from moc.lightning import FaultTolerantStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = self.global_step == 2
            return self.net(batch[0]).sum() * 0 + 3.0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    strategy = FaultTolerantStrategy("cpu", protection={"policy": None, "directory": str(tmp_path)})
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=9, accumulate_grad_batches=2, **silent
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 2))))
    assert (trainer.global_step, strategy.run.iteration, strategy.run.loss) == (2, 3, 3.0)
    assert strategy.next_group() is None


def test_trainer_evaluates_after_each_epoch_and_ends_early(tmp_path):
    pytest.importorskip("transformers")
    import moc.transformers as of_trainer

    of_trainer.init()
    from transformers import EarlyStoppingCallback, TrainingArguments

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, inputs, labels):
            return {"loss": self.net(inputs).sum() * 0 + 3.0, "logits": labels}

    data = [{"inputs": torch.ones(2), "labels": torch.ones(1)} for _ in range(8)]
    args = TrainingArguments(
        str(tmp_path),
        num_train_epochs=9,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=False,
        **dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True),
    )
    trainer = of_trainer.FaultTolerantTrainer(
        model=Constant(),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[EarlyStoppingCallback(2)],
        protection={"policy": None, "directory": str(tmp_path)},
    )
    trainer.train()
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[:3] == [2, 4, 6] and trainer.state.epoch == 3.0
    assert trainer.state.global_step == 6 and trainer._run.iteration == 7 and trainer.next_group() is None
    with pytest.raises(UserError) as refused:
        trainer.train()
    assert code_of(refused.value) == "loop-call-unsupported"
