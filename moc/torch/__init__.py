"""Protects any PyTorch training loop (docs/how-to/own-loop.md); needs only torch."""

from moc.torch.data import PositionError
from moc.torch.loop import ProtectedRun, init, protect

__all__ = ["PositionError", "ProtectedRun", "init", "protect"]
