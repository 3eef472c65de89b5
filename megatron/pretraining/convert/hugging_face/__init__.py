"""Converts checkpoints of transformers: a directory of safetensors files, an index and a configuration."""

from __future__ import annotations

from pathlib import Path

HUGGING_FACE = "hf"
CONFIG = "config.json"


def is_hugging_face(directory: Path) -> bool:
    """Returns whether a directory is a checkpoint of transformers."""
    return (directory / CONFIG).is_file() and not (directory / "manifest.json").is_file()
