"""The loop of plain.py under moc.torch."""

import sys

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import moc.torch as ft

sys.path.insert(0, __file__.rsplit("/", 3)[0])
from benchmarks.torchft_loops.task import Record, Squares, arguments, digest, network

asked = arguments()
rank = ft.init().rank
model = network(asked.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(Squares(), 2, rank)
loader = DataLoader(Squares(), batch_size=32, sampler=sampler)
record = Record(f"{asked.directory}/{rank}")
run = ft.protect(
    model,
    optimizer,
    data=loader,
    iterations=asked.iterations,
    directory=f"{asked.directory}/snapshots",
    snapshot_interval=asked.snapshot_interval,
    wrap=DistributedDataParallel,
)
for vectors, lengths in run:
    record.write("body", run.iteration + 1)
    loss = mse_loss(run.model(vectors), lengths)
    loss.backward()
    if run.step():
        record.write("update", run.iteration)
record.write("end", asked.iterations, weights=digest(model))
