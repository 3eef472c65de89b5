"""Model, data and record of the iterations of three loops: plain PyTorch, moc.torch and torchft."""

import argparse
import hashlib
import json
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Squares(Dataset):
    """Vectors and their squared lengths."""

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        vector = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return vector, vector.square().sum().view(1)


class Record:
    """Appends what this worker does to a file: time, event, iteration."""

    def __init__(self, path):
        self._file = open(path, "a", buffering=1)

    def write(self, event, iteration, **more):
        """Writes an event of an iteration; times are of the machine's monotonic clock, in seconds."""
        self._file.write(json.dumps({"time": time.monotonic(), "event": event, "iteration": iteration} | more) + "\n")


def arguments():
    """Returns the arguments of a loop."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--snapshot-interval", type=int, default=1)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return parser.parse_args()


def network(width):
    """Returns the model."""
    layers = [nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


def digest(model):
    """Returns the hash of the weights."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
