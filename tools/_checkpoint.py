"""Reads checkpoints for the checkpoint tools: without torch, and without unpickling anything."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training import checkpoint_files as files
from megatron.training.checkpoint_files import CheckpointError
from moc.state.region import Region

OPTIMIZER = "optimizer"
_ITERATION = re.compile(r"iter_(\d{7,})")
_LENGTH = 8  # a safetensors file starts with the length of its JSON header
_ELEMENT_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Box:
    """A box of one slot of a tensor, as the header of a file describes it."""

    file: str
    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    nbytes: int


@dataclass
class Checkpoint:
    """What a checkpoint says of itself, and what is wrong with it as far as that can be seen without reading it all."""

    directory: Path
    files: dict[str, dict]
    """The manifest's entries: bytes and xxh3_128 by name."""
    state: dict = field(default_factory=dict)
    """training_state.json; empty where it cannot be read."""
    broken: set[str] = field(default_factory=set)
    """Files that are missing, of another size than listed, or otherwise found damaged."""
    problems: list[str] = field(default_factory=list)

    @property
    def optimizer_files(self) -> list[str]:
        """Names of the listed files with optimizer state."""
        return sorted(name for name in self.files if name.startswith(f"{OPTIMIZER}/"))

    @property
    def weight_files(self) -> list[str]:
        """Names of the listed files with weights."""
        return sorted(name for name in self.files if name.endswith(".distcp"))

    def bytes_of(self, names: list[str]) -> int:
        """Bytes of these files, as listed."""
        return sum(self.files[name]["bytes"] for name in names)


def human(size: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is one checkpoint, rather than a --save directory of several."""
    named = _ITERATION.fullmatch(path.resolve().name)
    return bool(named) or any((path / name).is_file() for name in (files.MANIFEST, files.STATE))


def choose(root: Path, iteration: int | None) -> Path:
    """The checkpoint of an iteration in a --save directory; by default the tracker's, else the newest that is there.

    Raises:
        CheckpointError: there is none.
    """
    saved = files.saved_iterations(root)
    if iteration is None:
        iteration = _tracked(root)
        iteration = iteration if iteration in saved else max(saved, default=None)
    if iteration is None:
        raise CheckpointError(f"{root}: holds no checkpoint")
    if iteration not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"{root}: holds no checkpoint of iteration {iteration} (there are: {known})")
    return files.directory_of(root, iteration)


def _tracked(root: Path) -> int | None:
    try:
        return files.latest_iteration(root)
    except (CheckpointError, ValueError):
        return None


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads manifest and training state, and compares the directory with what the manifest lists.

    Raises:
        CheckpointError: there is no manifest that could be read.
    """
    try:
        manifest = files.read_manifest(directory)
    except OSError as error:
        raise CheckpointError(f"{files.MANIFEST}: cannot be read ({error.strerror})") from None
    if manifest is None:
        raise CheckpointError(f"{files.MANIFEST}: is missing, so this is no checkpoint of this program, or half of one")
    checkpoint = Checkpoint(directory, _listed(manifest))
    _compare_names(checkpoint, manifest)
    _compare_sizes(checkpoint)
    _read_state(checkpoint, manifest.get("iteration"))
    return checkpoint


def _listed(manifest: dict) -> dict[str, dict]:
    entries = manifest.get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{files.MANIFEST}: lists no files")
    for name, entry in entries.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{files.MANIFEST}: {name} lies outside of the checkpoint")
        if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and entry.get("xxh3_128")):
            raise CheckpointError(f"{files.MANIFEST}: the entry of {name} lacks size or hash")
    return entries


def _compare_names(checkpoint: Checkpoint, manifest: dict) -> None:
    say = checkpoint.problems.append
    named = _ITERATION.fullmatch(checkpoint.directory.resolve().name)
    if named and manifest.get("iteration") != int(named[1]):
        say(f"{files.MANIFEST}: is of iteration {manifest.get('iteration')}, and the directory of {int(named[1])}")
    for name in (files.STATE, ".metadata"):
        if name not in checkpoint.files:
            say(f"{files.MANIFEST}: does not list {name}")
    if not checkpoint.weight_files:
        say(f"{files.MANIFEST}: lists no weights (*.distcp)")
    for name in sorted(_present(checkpoint.directory) - checkpoint.files.keys() - {files.MANIFEST}):
        say(f"{name}: is not listed in {files.MANIFEST}")


def _present(directory: Path) -> set[str]:
    found = set()
    for parent, _, names in os.walk(directory):
        found |= {(Path(parent) / name).relative_to(directory).as_posix() for name in names}
    return found


def _compare_sizes(checkpoint: Checkpoint) -> None:
    for name, entry in checkpoint.files.items():
        path = checkpoint.directory / name
        if not path.is_file():
            problem = "is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            problem = f"has {size:,} bytes instead of {entry['bytes']:,}"
        else:
            continue
        checkpoint.broken.add(name)
        checkpoint.problems.append(f"{name}: {problem}")


def _read_state(checkpoint: Checkpoint, iteration: int) -> None:
    path = checkpoint.directory / files.STATE
    if files.STATE in checkpoint.broken or not path.is_file():
        return  # said already
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        checkpoint.broken.add(files.STATE)
        checkpoint.problems.append(f"{files.STATE}: cannot be read ({error})")
        return
    checkpoint.state = state
    if state.get("iteration") != iteration:
        checkpoint.problems.append(
            f"{files.STATE}: is of iteration {state.get('iteration')}, {files.MANIFEST} of {iteration}"
        )
    if state.get("optimizer") and not checkpoint.optimizer_files:
        checkpoint.problems.append(f"{files.MANIFEST}: lists no file with the state of optimizer {state['optimizer']}")


def read_optimizer(checkpoint: Checkpoint) -> tuple[list[Box], list[str]]:
    """Boxes of all files with optimizer state that can be read, and a problem for each of the other files.

    Files that are missing are among the checkpoint's own problems.
    """
    boxes, problems = [], []
    for name in checkpoint.optimizer_files:
        try:
            boxes += read_boxes(checkpoint.directory, name)
        except CheckpointError as error:
            if name not in checkpoint.broken:
                problems.append(str(error))
            checkpoint.broken.add(name)
    return boxes, problems


def read_boxes(directory: Path, name: str) -> list[Box]:
    """What the header of a file of regions describes.

    Raises:
        CheckpointError: the header makes no sense, or the file does not hold what it describes.
    """
    try:
        header, room = _header(directory / name)
        index = json.loads(header.pop("__metadata__")["regions"])
        boxes = [_box(name, header[key], entry) for key, entry in index.items()]
        if unknown := header.keys() - index.keys():
            raise ValueError(f"nothing says what its tensor {min(unknown)} is")
        _check_spans([header[key]["data_offsets"] for key in index], room)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: its header is not one of regions ({error!r})") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{name}: its header is damaged ({error})") from None
    return boxes


def _header(path: Path) -> tuple[dict, int]:
    """The JSON header of a safetensors file, and the number of bytes behind it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > size - _LENGTH:
            raise ValueError("it ends beyond the file")
        return json.loads(file.read(length)), size - _LENGTH - length


def _box(file: str, tensor: dict, entry: list) -> Box:
    name, slot, global_shape, offset, *_digest = entry
    shape = tensor["shape"]
    if not all(isinstance(n, int) for n in (*global_shape, *offset, *shape)) or not isinstance(name, str):
        raise TypeError("a box has no place")
    if not len(global_shape) == len(offset) == len(shape):
        raise ValueError(f"{slot} of {name} has {len(global_shape)} axes, and a box of it {len(shape)}")
    start, stop = tensor["data_offsets"]
    element = _ELEMENT_BYTES.get(tensor["dtype"])
    if element and math.prod(shape) * element != stop - start:
        raise ValueError(f"a box of {slot} of {name} has {stop - start} bytes instead of {math.prod(shape) * element}")
    return Box(file, name, slot, tuple(global_shape), Region(tuple(offset), tuple(shape)), stop - start)


def _check_spans(spans: list[list[int]], room: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(
                f"byte {min(start, end):,} of its data belongs to {'no' if start > end else 'more than one'} box"
            )
        end = stop
    if end != room:
        raise ValueError(f"it describes {end:,} bytes, and {room:,} follow")
