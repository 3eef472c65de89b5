"""Reads checkpoints of both formats for the checkpoint tools: without torch, and without unpickling anything."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moc.inspect import dense
from moc.state.region import Region
from moc.store import manifest as manifests
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry

SNAPSHOT, DENSE = "snapshot", "dense"
OPTIMIZER = "optimizer"
_PARTS = ("rank_", ".rank_", f"{dense.MANIFEST}.")  # what there is of Format v1 before its manifest
_ITERATION = re.compile(r"iter_(\d{7,})")
_LENGTH = 8  # a safetensors file starts with the length of its JSON header
_NUMBER_FORMATS = {8: "F64 I64", 4: "F32 I32", 2: "F16 BF16 I16", 1: "F8_E4M3 I8 U8 BOOL"}  # by bytes of an element
_ELEMENT_BYTES = {name: number for number, names in _NUMBER_FORMATS.items() for name in names.split()}


@dataclass(frozen=True)
class StoredBox:
    """A box of one slot of a tensor, as the header of a file describes it."""

    file: str
    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    nbytes: int
    start: int = 0
    """Its first byte in the file."""
    digest: str | None = None
    """xxh3-128 of its bytes in hex, where the file says it."""


@dataclass
class Checkpoint:
    """What a checkpoint says of itself, and what is wrong with it as far as that can be seen without reading it all."""

    directory: Path
    files: dict[str, dict]
    """The manifest's entries by name: bytes, and xxh3_128 of all or (Format v1) header_bytes and header_xxh3_128."""
    format: str = DENSE
    """``snapshot`` for Format v1, or ``dense``."""
    iteration: int | None = None
    state: Mapping = field(default_factory=dict)
    """What is no tensor: training_state.json, or in Format v1 part of the manifest; empty where it cannot be read."""
    policy: str | None = None
    """What asked for it; None for dense ones."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the layout that wrote it, where it says them."""
    operators: Mapping[str, OperatorEntry] | None = None
    """What Format v1 promises of each operator; None for dense ones."""
    broken: set[str] = field(default_factory=set)
    """Files that are missing, of another size than listed, or otherwise found damaged."""
    problems: list[str] = field(default_factory=list)

    @property
    def region_files(self) -> list[str]:
        """Names of the listed files of regions: all of Format v1, and those with optimizer state of dense ones."""
        return sorted(name for name in self.files if self.format == SNAPSHOT or name.startswith(f"{OPTIMIZER}/"))

    @property
    def weight_files(self) -> list[str]:
        """Names of the listed files with weights."""
        return sorted(name for name in self.files if name.endswith(".distcp"))

    def bytes_of(self, names: list[str]) -> int:
        """Bytes of these files, as listed."""
        return sum(self.files[name]["bytes"] for name in names)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is one checkpoint, rather than a --save directory of several."""
    named = _ITERATION.fullmatch(path.resolve().name)
    return bool(named) or any((path / name).is_file() for name in (dense.MANIFEST, dense.STATE))


def format_of(directory: Path) -> str:
    """``snapshot`` where the manifest says Format v1, ``dense`` otherwise."""
    try:
        return SNAPSHOT if json.loads((directory / dense.MANIFEST).read_text())["format"] == manifests.FORMAT else DENSE
    except (OSError, ValueError, LookupError, TypeError):
        return DENSE


def is_unpublished(directory: Path) -> bool:
    """Whether a directory is what a save in Format v1 has written so far: without a manifest, it is no checkpoint."""
    names = [path.name for path in directory.iterdir()]
    return dense.MANIFEST not in names and all(name.startswith(_PARTS) for name in names)


def saved_iterations(root: Path) -> list[int]:
    """Iterations of the checkpoints in a directory, ascending."""
    return [i for i in dense.saved_iterations(root) if not is_unpublished(dense.directory_of(root, i))]


def choose(root: Path, iteration: int | None) -> Path:
    """The checkpoint of an iteration in a directory; by default the tracker's, else the newest that is there.

    Raises:
        CheckpointError: there is none.
    """
    saved = saved_iterations(root)
    if iteration is None:
        iteration = _tracked(root)
        iteration = iteration if iteration in saved else max(saved, default=None)
    if iteration is None:
        raise CheckpointError(f"{root}: holds no checkpoint")
    if iteration not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"{root}: holds no checkpoint of iteration {iteration} (there are: {known})")
    return dense.directory_of(root, iteration)


def _tracked(root: Path) -> int | None:
    try:
        return dense.latest_iteration(root)
    except (CheckpointError, ValueError):
        return None


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads manifest and training state, and compares the directory with what the manifest lists.

    Raises:
        CheckpointError: there is no manifest that could be read.
    """
    if format_of(directory) == SNAPSHOT:
        return _read_snapshot(directory)
    try:
        manifest = dense.read_manifest(directory)
    except OSError as error:
        raise CheckpointError(f"{dense.MANIFEST}: cannot be read ({error.strerror})") from None
    if manifest is None:
        raise CheckpointError(f"{dense.MANIFEST}: is missing, so this is no checkpoint of this program, or half of one")
    checkpoint = Checkpoint(directory, _listed(manifest), iteration=manifest.get("iteration"))
    _compare_names(checkpoint)
    for name in (dense.STATE, ".metadata"):
        if name not in checkpoint.files:
            checkpoint.problems.append(f"{dense.MANIFEST}: does not list {name}")
    if not checkpoint.weight_files:
        checkpoint.problems.append(f"{dense.MANIFEST}: lists no weights (*.distcp)")
    _compare_sizes(checkpoint)
    _read_state(checkpoint)
    return checkpoint


def _read_snapshot(directory: Path) -> Checkpoint:
    manifest = Manifest.from_json((directory / dense.MANIFEST).read_text(), dense.MANIFEST)
    checkpoint = Checkpoint(
        directory,
        {name: asdict(entry) for name, entry in manifest.files.items()},
        format=SNAPSHOT,
        iteration=manifest.iteration,
        state=manifest.state,
        policy=manifest.policy,
        layout=manifest.layout,
        operators=manifest.operators,
    )
    _compare_names(checkpoint)
    _compare_sizes(checkpoint)
    if not manifest.complete:
        checkpoint.problems.append(
            f"{dense.MANIFEST}: names {len(manifest.files)} of {manifest.writers} files, those of one node"
        )
    return checkpoint


def _listed(manifest: dict) -> dict[str, dict]:
    entries = manifest.get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{dense.MANIFEST}: lists no files")
    for name, entry in entries.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{dense.MANIFEST}: {name} lies outside of the checkpoint")
        if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and entry.get("xxh3_128")):
            raise CheckpointError(f"{dense.MANIFEST}: the entry of {name} lacks size or hash")
    return entries


def _compare_names(checkpoint: Checkpoint) -> None:
    say = checkpoint.problems.append
    named = _ITERATION.fullmatch(checkpoint.directory.resolve().name)
    if named and checkpoint.iteration != int(named[1]):
        say(f"{dense.MANIFEST}: is of iteration {checkpoint.iteration}, and the directory of {int(named[1])}")
    found = _present(checkpoint.directory) - checkpoint.files.keys() - {dense.MANIFEST}
    for name in sorted(found):
        if checkpoint.format == DENSE or not name.startswith(".rank_"):  # of a kill after the manifest was written
            say(f"{name}: is not listed in {dense.MANIFEST}")


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


def _read_state(checkpoint: Checkpoint) -> None:
    path = checkpoint.directory / dense.STATE
    if dense.STATE in checkpoint.broken or not path.is_file():
        return  # said already
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        checkpoint.broken.add(dense.STATE)
        checkpoint.problems.append(f"{dense.STATE}: cannot be read ({error})")
        return
    checkpoint.state = state
    if state.get("iteration") != checkpoint.iteration:
        checkpoint.problems.append(
            f"{dense.STATE}: is of iteration {state.get('iteration')}, {dense.MANIFEST} of {checkpoint.iteration}"
        )
    if state.get("optimizer") and not checkpoint.region_files:
        checkpoint.problems.append(f"{dense.MANIFEST}: lists no file with the state of optimizer {state['optimizer']}")


def read_regions(checkpoint: Checkpoint) -> tuple[list[StoredBox], list[str]]:
    """Boxes of all files of regions that can be read, and a problem for each of the other files.

    Files that are missing are among the checkpoint's own problems.
    """
    boxes, problems = [], []
    for name in checkpoint.region_files:
        try:
            boxes += read_boxes(checkpoint.directory, name)
        except CheckpointError as error:
            if name not in checkpoint.broken:
                problems.append(str(error))
            checkpoint.broken.add(name)
    return boxes, problems


def read_boxes(directory: Path, name: str) -> list[StoredBox]:
    """What the header of a file of regions describes.

    Raises:
        CheckpointError: the header makes no sense, or the file does not hold what it describes.
    """
    try:
        header, room = _header(directory / name)
        index = json.loads(header.pop("__metadata__")["regions"])
        begin = (directory / name).stat().st_size - room
        boxes = [_box(name, begin, header[key], entry) for key, entry in index.items()]
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


def _box(file: str, begin: int, tensor: dict, entry: list) -> StoredBox:
    name, slot, global_shape, offset, *digest = entry
    shape = tensor["shape"]
    if not all(isinstance(n, int) for n in (*global_shape, *offset, *shape)) or not isinstance(name, str):
        raise TypeError("a box has no place")
    if not len(global_shape) == len(offset) == len(shape):
        raise ValueError(f"{slot} of {name} has {len(global_shape)} axes, and a box of it {len(shape)}")
    start, stop = tensor["data_offsets"]
    element = _ELEMENT_BYTES.get(tensor["dtype"])
    if element and math.prod(shape) * element != stop - start:
        raise ValueError(f"a box of {slot} of {name} has {stop - start} bytes instead of {math.prod(shape) * element}")
    region = Region(tuple(offset), tuple(shape))
    return StoredBox(file, name, slot, tuple(global_shape), region, stop - start, begin + start, *digest[:1])


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
