"""The loop of plain.py under torchft, as its example train_ddp.py: each worker is a replica group."""

import os
import sys
from datetime import timedelta

import torch
import torchft  # pyright: ignore[reportMissingImports]  # in no extra
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

sys.path.insert(0, __file__.rsplit("/", 3)[0])
from benchmarks.torchft_loops.task import Record, Squares, arguments, digest, network

asked = arguments()
rank = int(os.environ["REPLICA_GROUP_ID"])
model = network(asked.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = torchft.DistributedSampler(Squares(), rank, 2, group_rank=0, num_replicas=1)
loader = DataLoader(Squares(), batch_size=32, sampler=sampler)
record = Record(f"{asked.directory}/{rank}")


def load_state_dict(state):
    """Loads the state of another replica."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def state_dict():
    """Returns the state that a replacement loads."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=asked.min_replicas,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"replica_{rank}",
    timeout=timedelta(seconds=30),
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
)
model = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, optimizer)
for vectors, lengths in loader:
    optimizer.zero_grad()
    record.write("body", manager.current_step() + 1)
    loss = mse_loss(model(vectors), lengths)
    loss.backward()
    before = manager.current_step()
    optimizer.step()
    if manager.current_step() > before:
        record.write("update", manager.current_step())
    if manager.current_step() >= asked.iterations:
        break
record.write("end", manager.current_step(), weights=digest(model))
manager.shutdown()
sys.stdout.flush()
os._exit(0)  # its threads would keep the process alive
