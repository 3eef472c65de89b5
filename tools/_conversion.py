"""Writes what a checkpoint holds as another one: Format v1, or a dense checkpoint that stock Megatron-LM reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from _contents import DTYPE_NAMES, FULL, Contents, count_elements
from _coverage import BUFFER, PARAM, SLOTS, missing_operators
from _stock_names import Place, extra_states, stacks_layers, stock_places
from _torch_dist import Weight, write_weights

from megatron.pretraining.checkpoint import files
from megatron.pretraining.checkpoint.writer import OPTIMIZER
from moc.state.region import boxes_of_range
from moc.store.durable import sync_directory
from moc.store.errors import CheckpointError
from moc.store.manifest import FileEntry, Manifest, OperatorEntry
from moc.store.places import LocalPlace
from moc.store.regions import Entry, FileLayout, bytes_of, digest_of
from moc.store.store import Store, directory_of, file_of

Advance = Callable[[int], None]
WITH_FLAGS = "give the flags of the run behind --, and the window that this snapshot is part of is computed again"


def write_snapshot(contents: Contents, root: Path, writers: int, advance: Advance) -> Path:
    """Writes Format v1.

    Args:
        contents: what to write.
        root: the directory of checkpoints in which to write it.
        writers: number of files; their sizes differ by no more than their headers and an element.
        advance: is told the bytes that were written.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: there is one of this iteration already, or another job uses the directory.
    """
    facts, store = contents.facts, Store(LocalPlace(root, patience=0.0))
    directory = root / directory_of(facts.iteration)
    store.place.lock()
    refuse_to_replace(directory)
    store.remove(facts.iteration)  # what a killed conversion has left
    directory.mkdir(parents=True)
    written, entries = {}, cut(contents.tensors, writers)
    for rank, part in enumerate(entries):
        written[file_of(rank)] = write_regions(directory / file_of(rank), part, contents, advance)
    sync_directory(directory)
    counts = count_elements(entry for part in entries for entry in part)
    operators = {
        name: OperatorEntry(detail, step, counts[name])
        for name, (detail, step) in contents.operators.items()
        if name in counts
    }
    store.publish(
        Manifest(facts.iteration, facts.policy, writers, written, operators, dict(facts.layout), dict(facts.state))
    )
    return directory


def write_dense(
    contents: Contents, root: Path, writers: int, dtype: torch.dtype | None, file_bytes: int, advance: Advance
) -> Path:
    """Writes weights as ``torch_dist``, optimizer state beside them if there is some, and points the tracker there.

    Args:
        contents: what to write.
        root: the ``--save`` directory in which to write it.
        writers: number of files for the optimizer state.
        dtype: what masters are rounded to; None if that is not known.
        file_bytes: size at which the next file of weights begins.
        advance: is told the bytes that were written.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it does not hold a whole model, there is one of this iteration already, or another save to
            the directory has not ended.
    """
    iteration = contents.facts.iteration
    check_whole(contents)
    state = _training_state(contents) | {"params_dtype": DTYPE_NAMES.get(dtype)}
    weights = contents.weights(dtype)
    places = _places(weights)
    refuse_to_replace(files.directory_of(root, iteration))
    _refuse_to_disturb(root, iteration)
    staging = files.start(root, iteration)
    boxes = [_weight(weights, entry, places[entry.name], advance) for entry in weights.tensors]
    write_weights(staging, boxes, extra_states(places), iteration, file_bytes)
    owned = [tensor for tensor in contents.tensors if tensor.slot != PARAM]
    if owned:
        (staging / OPTIMIZER).mkdir()
    for rank, part in enumerate(cut(owned, writers) if owned else ()):
        write_regions(staging / OPTIMIZER / file_of(rank), part, contents, advance)
    files.write_durably(staging / files.STATE, json.dumps(state, indent=1))
    written = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    return files.publish(root, iteration, {name: files.describe(staging / name) for name in written})


def cut(tensors: Iterable[Entry], parts: int) -> list[list[Entry]]:
    """Cuts tensors, laid end to end, into parts of equal size; each part is a list of boxes."""
    tensors = list(tensors)
    total, position = sum(tensor.nbytes for tensor in tensors), 0
    found: list[list[Entry]] = [[] for _ in range(parts)]
    for tensor in tensors:
        size, start = tensor.dtype.itemsize, 0
        while start < tensor.region.numel:
            part = position * parts // total
            room = -(-total * (part + 1) // parts) - position  # bytes to where the next part begins
            stop = min(tensor.region.numel, start + -(-room // size))
            boxes = boxes_of_range(tensor.global_shape, start, stop)
            found[part] += [replace(tensor, region=box) for _, box in boxes]
            position, start = position + (stop - start) * size, stop
    return found


def write_regions(path: Path, entries: Iterable[Entry], contents: Contents, advance: Advance) -> FileEntry:
    """Writes a file of regions, one box after the other, durably; returns what a manifest says of it."""
    layout, digests = FileLayout(entries), []
    with open(path, "wb") as file:
        file.seek(layout.header_bytes)
        for entry in layout.entries:
            data = bytes_of(contents.read(entry.name, entry.slot, entry.region))
            digests.append(digest_of(data))
            file.write(data)
            advance(len(data))
        header = layout.header(digests)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(layout.nbytes, len(header), digest_of(header))


def check_whole(contents: Contents) -> None:
    """Checks that there is a whole model, with all of its optimizer's state or none.

    Raises:
        CheckpointError: what is missing, and of what.
    """
    state, slots = contents.facts.state, contents.slots()
    window = contents.facts.policy == "sparse"  # of which each snapshot has a part
    if missing := _missing(slots, state.get("shape")):
        others = f", nor are {len(missing) - 1} other operators" if len(missing) > 1 else ""
        remedy = WITH_FLAGS if window else "only a whole model can be converted"
        raise CheckpointError(f"{missing[0]} is not there{others}: {remedy}")
    needed = SLOTS.get(state.get("optimizer"), (PARAM,))
    for name, found in slots.items():
        wanted = (PARAM,) if name.endswith(BUFFER) else needed
        if lacking := sorted(set(wanted) - found.keys()):
            remedy = WITH_FLAGS if window else "--no-optim converts the weights without the state of the optimizer"
            raise CheckpointError(f"there is no {' and no '.join(lacking)} of {name}: {remedy}")


def refuse_to_replace(directory: Path) -> None:
    """Nothing that is there goes, but the files of a conversion or save that was killed before its manifest.

    Raises:
        CheckpointError: there is more.
    """
    there = os.listdir(directory) if directory.exists() else []
    if not all(name.startswith(("rank_", ".rank_")) for name in there):
        raise CheckpointError(f"{directory} is there already: remove it, or name another directory to write to")


def _missing(names: Iterable[str], shape: dict | None) -> list[str]:
    try:
        return missing_operators(names, shape)
    except ValueError as error:
        raise CheckpointError(f"the state of the checkpoint {error}") from None


def _training_state(contents: Contents) -> dict:
    """The content of ``training_state.json``."""
    state = dict(contents.facts.state)
    steps: dict[int, str] = {}
    for name, (detail, step) in contents.operators.items():
        if detail == FULL and step is not None:
            steps.setdefault(step, name)
    if len(steps) > 1:
        told = " and ".join(f"{name} {step}" for step, name in sorted(steps.items())[:2])
        raise CheckpointError(
            f"operators have seen different numbers of updates ({told}), and a dense checkpoint holds one number for "
            "all: --no-optim converts the weights alone"
        )
    return state | {"optimizer_step": next(iter(steps), state.get("optimizer_step") or 0)}


def _places(weights: Contents) -> dict[str, Place]:
    shapes = {tensor.name: tensor.global_shape for tensor in weights.tensors}
    return stock_places(shapes, stacks_layers(weights.facts.state["shape"]))


def _weight(weights: Contents, entry: Entry, place: Place, advance: Advance) -> Weight:
    def values() -> torch.Tensor:
        advance(entry.nbytes)
        return weights.read(entry.name, entry.slot, entry.region).reshape(place.region.shape)

    return Weight(place.key, place.global_shape, place.region, entry.dtype, values)


def _refuse_to_disturb(root: Path, iteration: int) -> None:
    """Starting a save clears all that others have not ended."""
    others = set(_leftovers(root)) - {files.staging_of(root, iteration)}
    if others:
        raise CheckpointError(
            f"{min(others)} is a save that goes on, or was killed: wait for it or remove it, or name another directory"
        )


def _leftovers(root: Path) -> Iterator[Path]:
    return root.glob(".iter_*.incomplete")
