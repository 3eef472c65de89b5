"""Protects any PyTorch training loop (docs/how-to/own-loop.md); needs only torch."""

from moc.torch.data import DataError
from moc.torch.loop import Run, init, protect

__all__ = ["DataError", "Run", "init", "protect"]
