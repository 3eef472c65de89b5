#!/usr/bin/env python3
"""A training with the Trainer of Lightning; ``kill -9`` of a worker changes no weight.

python -m moc.launch --nproc-per-node 2 examples/lightning_trainer.py --ckpt-dir /tmp/snapshots
"""

import argparse
import hashlib

import lightning
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from moc.cli_output import print_lines
from moc.lightning import FaultTolerantStrategy


class Squares(lightning.LightningModule):
    """Learns the squared length of a vector."""

    def __init__(self, steps):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.steps = steps

    def training_step(self, batch, batch_idx):
        inputs, lengths = batch
        loss = mse_loss(self.net(inputs), lengths)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    """Trains, and prints the hash of the weights."""
    parser = argparse.ArgumentParser(description="Lightning's Trainer that survives kill -9.", allow_abbrev=False)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    vectors = torch.randn(320, 16)
    data = TensorDataset(vectors, vectors.square().sum(1, keepdim=True))
    module = Squares(asked.iterations)

    strategy = FaultTolerantStrategy("cpu", protection={"directory": asked.ckpt_dir, "log_dir": asked.log_dir})
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=asked.iterations,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))

    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters()))
    if trainer.is_global_zero:
        print_lines(
            f"epoch {trainer.current_epoch}, iteration {trainer.global_step}: weights {digest.hexdigest()[:16]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
