"""Plain PyTorch: a lost worker ends the training."""

import itertools
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, __file__.rsplit("/", 3)[0])
from benchmarks.torchft_loops.task import Record, Squares, arguments, digest, network

asked = arguments()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = network(asked.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(Squares(), 2, rank)
loader = DataLoader(Squares(), batch_size=32, sampler=sampler)
record = Record(f"{asked.directory}/{rank}")
model = DistributedDataParallel(model)
for iteration, (vectors, lengths) in enumerate(itertools.islice(loader, asked.iterations), 1):
    record.write("body", iteration)
    optimizer.zero_grad()
    loss = mse_loss(model(vectors), lengths)
    loss.backward()
    optimizer.step()
    record.write("update", iteration)
record.write("end", asked.iterations, weights=digest(model))
dist.destroy_process_group()
