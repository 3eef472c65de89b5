"""The directory of a dense checkpoint, to be read: names, tracker and manifest.

``megatron.pretraining.checkpoint.files`` writes it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from moc.store.errors import CheckpointError

MANIFEST = "manifest.json"
STATE = "training_state.json"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "moc-megatron dense checkpoint 1"
_NAME = re.compile(r"^iter_(\d{7,})$")


def directory_of(root: str | Path, iteration: int) -> Path:
    """Megatron's name for the checkpoint of an iteration, ``iter_0000100``."""
    return Path(root) / f"iter_{iteration:07d}"


def saved_iterations(root: str | Path) -> list[int]:
    """Iterations that have a published checkpoint under ``root``, ascending."""
    root = Path(root)
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return sorted(int(match.group(1)) for match in map(_NAME.match, names) if match)


def latest_iteration(root: str | Path) -> int | None:
    """The iteration that the tracker file names, or None where there is no tracker.

    Raises:
        CheckpointError: the tracker does not hold a number.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(f"{tracker} holds {text!r} instead of an iteration: write the iteration to load into it")
    return int(text)


def read_manifest(directory: Path) -> dict | None:
    """The manifest of a checkpoint, or None where it has none (stock Megatron-LM wrote it).

    Raises:
        CheckpointError: the directory or manifest is damaged.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist: check --load and --ckpt-step")
    path = directory / MANIFEST
    if not path.is_file():
        if (directory / STATE).is_file():
            raise damaged(f"{path} is missing although {STATE} is there")
        return None
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {manifest['format']!r}; this program reads {FORMAT!r}")
        return manifest
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {_remedy()}") from None


def damaged(what: str) -> CheckpointError:
    """The refusal of a damaged checkpoint."""
    return CheckpointError(f"{what}; {_remedy()}")


def _remedy() -> str:
    return "load an older checkpoint with --ckpt-step"
