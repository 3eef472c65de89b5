#!/usr/bin/env python3
"""A training loop of plain PyTorch, protected in ten lines; ``kill -9`` of a worker changes no weight.

python -m moc.launch --nproc-per-node 2 examples/torch_loop.py --ckpt-dir /tmp/snapshots
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.functional import mse_loss

import moc.torch as ft
from moc.cli_output import print_lines


class Squares(torch.utils.data.Dataset):
    """Vectors and their squared lengths."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        vector = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return vector, vector.square().sum().view(1)


def main():
    """Trains, and prints the hash of the weights."""
    parser = argparse.ArgumentParser(description="Plain PyTorch that survives kill -9.", allow_abbrev=False)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int, default=400)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.iterations)
    data = torch.utils.data.DataLoader(Squares(), batch_size=32, shuffle=True)

    run = ft.protect(
        model,
        optimizer,
        data=data,
        scheduler=scheduler,
        iterations=asked.iterations,
        directory=asked.ckpt_dir,
        log_dir=asked.log_dir,
    )
    for vectors, lengths in run:  # recovers and commits
        loss = mse_loss(run.model(vectors), lengths)
        loss.backward()
        run.step(loss.detach())  # averages the gradients of all workers, and updates

    if run.rank == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        print_lines(f"iteration {run.iteration}: loss {run.loss}, weights {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
