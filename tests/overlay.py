"""Installed packages with an edited file, as a release has them that nobody has tried."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def edited(root: Path, module: str, *edits: tuple[str, str]) -> Path:
    """A directory for ``PYTHONPATH`` with links to a package, and one module of it with other text.

    Args:
        root: an empty directory.
        module: such as ``torch.distributed.distributed_c10d``.
        edits: texts of the module, each of which is replaced by another one everywhere.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin)
    parts = [*module.split("."), "__init__"] if source.stem == "__init__" else module.split(".")
    whole, here = source.parents[len(parts) - 1], root
    for number, part in enumerate(parts[:-1]):
        whole, here = whole / part, here / part
        here.mkdir()
        following = parts[number + 1]
        for each in whole.iterdir():
            if each.name not in (following, f"{following}.py", "__pycache__") and not _is_ours(each):
                (here / each.name).symlink_to(each)
    text = source.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    (here / source.name).write_text(text)
    return root


def _is_ours(path: Path) -> bool:
    return path.parts[-2:] == ("megatron", "pretraining")
