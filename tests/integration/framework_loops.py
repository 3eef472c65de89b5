"""A language model with experts under a framework and a policy that saves experts in turn.

Kinds are ``FRAMEWORK-POLICY``, such as ``lightning-pec``; each worker writes the hash of its weights.
"""

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.own_loop import Model, Noisy, arguments, loss_of


class Language(nn.Module):
    """Returns the loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = Model("stacked")

    def forward(self, input_ids):
        return {"loss": loss_of(self.inner, input_ids)}


def train_by_transformers(model, protection, iterations):
    """Trains with the Trainer of transformers."""
    import moc.transformers as of_trainer

    of_trainer.init()
    from transformers import TrainingArguments

    silent = dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
    args = TrainingArguments(
        protection["directory"], max_steps=iterations, per_device_train_batch_size=8, learning_rate=3e-3, **silent
    )
    data = [{"input_ids": tokens} for tokens in DataLoader(Noisy(), batch_size=None)]
    of_trainer.FaultTolerantTrainer(model=model, args=args, train_dataset=data, protection=protection).train()


def train_by_accelerate(model, protection, iterations):
    """Trains in a loop of accelerate."""
    from moc.accelerate import FaultTolerantAccelerator

    accelerator = FaultTolerantAccelerator(cpu=True, protection=protection | {"iterations": iterations})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Noisy(), 8, shuffle=True))
    while accelerator.iteration < iterations:
        for tokens in loader:
            accelerator.backward(model(tokens)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def train_by_lightning(model, protection, iterations):
    """Trains with the Trainer of Lightning."""
    import lightning

    from moc.lightning import FaultTolerantStrategy

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.language = model

        def training_step(self, batch, batch_idx):
            return self.language(batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = FaultTolerantStrategy("cpu", protection=protection)
    options = dict.fromkeys(silent, False) | {"accelerator": "cpu", "devices": 1, "max_steps": iterations}
    lightning.Trainer(strategy=strategy, **options).fit(Lit(), DataLoader(Noisy(), 8, shuffle=True))


def main():
    """Trains and writes."""
    asked = arguments()
    torch.manual_seed(1)
    framework, policy = asked.kind.split("-")
    model, options = Language(), {"experts": 3} if policy == "selective" else {}
    protection = dict(directory=asked.ckpt_dir, log_dir=asked.log_dir, policy=policy, options=options)
    globals()[f"train_by_{framework}"](model, protection, asked.iterations)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    with open(Path(asked.ckpt_dir).parent / f"weights of {digest.hexdigest()}", "a") as file:
        file.write("1")


if __name__ == "__main__":
    main()
