#!/usr/bin/env python3
"""A loop of Hugging Face accelerate; ``kill -9`` of a worker changes no weight.

python -m moc.launch --nproc-per-node 2 examples/accelerate_loop.py --ckpt-dir /tmp/snapshots
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from moc.accelerate import FaultTolerantAccelerator
from moc.cli_output import print_lines


def main():
    """Trains, and prints the hash of the weights."""
    parser = argparse.ArgumentParser(description="A loop of accelerate that survives kill -9.", allow_abbrev=False)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("--iterations", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    vectors = torch.randn(320, 16)
    data = TensorDataset(vectors, vectors.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.iterations)
    loader = DataLoader(data, batch_size=8, shuffle=True)

    accelerator = FaultTolerantAccelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        protection={"iterations": asked.iterations, "directory": asked.ckpt_dir, "log_dir": asked.log_dir},
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(-(-asked.iterations // (len(loader) // 2))):
        for inputs, lengths in loader:  # recovers and commits
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), lengths)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if accelerator.is_main_process:
        print_lines(f"iteration {accelerator.iteration}: weights {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
