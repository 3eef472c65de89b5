"""Reader processes of a DataLoader, which end with their worker."""

import multiprocessing
import os
import signal
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from moc.torch.data import Batches


class Blocking(Dataset):
    """Samples whose readers do not return from the last one."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            time.sleep(3600)
        return torch.tensor(index)


def read(loader, pipe):
    batches = Batches(loader(Blocking(), batch_size=2, num_workers=2), seed=1, rank=0)
    batches.begin(0)
    batches.take()
    pipe.send([child.pid for child in psutil.Process().children()])
    batches.take()
    time.sleep(3600)


class Stateful(DataLoader):
    """A loader whose position is part of its state, as torchdata's."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("loader", [DataLoader, Stateful])
def test_busy_reader_ends_with_its_worker(loader):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=read, args=(loader, theirs))
    worker.start()
    readers = [psutil.Process(pid) for pid in ours.recv()]
    assert len(readers) >= 2
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    psutil.wait_procs(readers)
