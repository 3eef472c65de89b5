"""Writing and reading a training state in files of regions, as tests need it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.pretraining.engine.state import MegatronState
from moc.state.operators import Detail, Fragment, regions_of_range
from moc.store.shard_file import BoxTensor, ShardReader, write_shard_file


def label(fragment: Fragment) -> str:
    """Names a fragment."""
    return f"{fragment.slot} {fragment.name} {fragment.region.offset} {fragment.region.shape}"


def first_copies(state: MegatronState, detail: Detail) -> list[Fragment]:
    """The fragments that this worker is to save."""
    return [f for f in state.fragments(state.operators(), detail) if f.first_copy]


def boxes(state: MegatronState) -> dict[str, list]:
    """Where first copies lie, by detail."""
    return {
        detail.name: [
            [f.slot, f.name, f.global_shape, f.region.offset, f.region.shape] for f in first_copies(state, detail)
        ]
        for detail in Detail
    }


def save_split(state: MegatronState, directory: Path, choose: random.Random) -> None:
    """Each fragment is saved by a random one of the workers that hold a copy, in parts."""
    held = {label(f): f for d in (Detail.FULL, Detail.COMPUTE) for f in state.fragments(state.operators(), d)}
    first = {key for key, fragment in held.items() if fragment.first_copy}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (sorted(first), sorted(held)))
    mine = []
    for key in sorted(key for firsts, _ in everywhere for key in firsts):
        if choose.choice([rank for rank, (_, keys) in enumerate(everywhere) if key in keys]) == dist.get_rank():
            mine.append(held[key])
    write(directory, dist.get_rank(), [part for fragment in mine for part in _parts(fragment)])


def _parts(fragment: Fragment) -> list[Fragment]:
    """The fragment, cut at a random element."""
    size = fragment.region.numel
    cut = random.Random(label(fragment)).randint(0, size)
    parts = []
    for start, stop in ((0, cut), (cut, size)):
        for position, box in regions_of_range(fragment.region.shape, start, stop):
            view, region = fragment.view[position : position + box.numel], box.shifted(fragment.region.offset)
            parts.append(dataclasses.replace(fragment, view=view, region=region))
    return parts


def write(directory: Path, rank: int, fragments: list[Fragment]) -> None:
    """Writes fragments as this worker's file, and waits for the others."""
    distinct = {label(f): f for f in fragments}.values()  # biases of routers are in FULL and COMPUTE
    entries = [BoxTensor(f.name, f.slot, f.global_shape, f.region, f.view.clone()) for f in distinct]
    write_shard_file(directory / f"{rank}.safetensors", entries)
    dist.barrier()


def load(state: MegatronState, directory: Path) -> None:
    """Loads all state that files hold, of which the optimizer has seen two steps."""
    reader = ShardReader(sorted(directory.glob("*.safetensors")))
    for fragment in state.fragments(state.operators(), Detail.FULL):
        values = torch.empty_like(fragment.view)
        reader.read_into(fragment.name, fragment.slot, fragment.region, into=values)
        state.load(fragment, values)
    state.gather_weights()
    state.set_steps(dict.fromkeys(state.operators(), 2))
