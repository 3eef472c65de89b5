"""Random ranks that hold random fragments, made by the code that makes the live ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from moc.state.operators import Detail, Fragment, OwnedSlice, Piece, Region, fragments_of

NAMES = {
    "layers.0.attention": ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.input_layernorm.w"),
    "layers.1.mlp": ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.pre_mlp_layernorm.weight"),
    "layers.1.router": ("decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.expert_bias"),
    "layers.1.expert.0": ("decoder.layers.1.mlp.experts.experts.0.a", "decoder.layers.1.mlp.experts.experts.0.b"),
    "layers.1.expert.7": ("decoder.layers.1.mlp.experts.experts.7.a", "decoder.layers.1.mlp.experts.experts.7.b"),
    "output": ("output_layer.weight", "decoder.final_layernorm.weight"),
}
SLOTS = {Detail.FULL: ("master", "exp_avg", "exp_avg_sq"), Detail.COMPUTE: ("param",)}


@dataclass(frozen=True)
class Tensor:
    """One of the unpartitioned model: ``sliced`` along its first axis, or a copy on every tensor-parallel rank."""

    name: str
    values: torch.Tensor
    sliced: bool
    places: tuple[int, ...]
    """Data-parallel places that hold it."""
    cuts: tuple[float, ...]
    """Where ZeRO cuts, as fractions."""


@dataclass(frozen=True)
class World:
    """Ranks of one stage: tensor-parallel neighbours beside each other."""

    tp: int
    dp: int
    zero: bool
    tensors: tuple[Tensor, ...]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.tp * self.dp)

    def fragments(self, rank: int, plan: dict[str, Detail]) -> list[Fragment]:
        """What lives on a rank of the operators of a plan."""
        return [f for t in self.tensors for f in self._of(t, rank) if plan.get(f.operator) in _details(f)]

    def _of(self, tensor: Tensor, rank: int) -> Iterator[Fragment]:
        tp, dp = rank % self.tp, rank // self.tp
        if dp not in tensor.places:
            return
        place, rows = tensor.places.index(dp), len(tensor.values) // (self.tp if tensor.sliced else 1)
        first = tp * rows if tensor.sliced else 0
        local = tensor.values[first : first + rows].clone()
        region = Region((first,) + (0,) * (local.dim() - 1), tuple(local.shape))
        replica = (0, 0 if tensor.sliced else tp, place)
        piece = Piece(tensor.name, tuple(tensor.values.shape), region, local, 0, replica, False)
        is_bias = tensor.name.endswith("expert_bias")
        bounds = [0, *(int(cut * local.numel()) for cut in tensor.cuts), local.numel()]
        for detail, slots in SLOTS.items():
            start, stop = bounds[place : place + 2] if self.zero and not is_bias else (0, local.numel())
            if self.zero and is_bias and place:
                continue  # the first place owns them
            if is_bias:
                slots = ("param",) if detail is Detail.FULL else ()  # the same fragment in both details
            held = {slot: slot_values(local, slot).view(-1)[start:stop] for slot in slots}
            yield from fragments_of(OwnedSlice(local, start, stop, held, self.zero), [piece])


def slot_values(values: torch.Tensor, slot: str) -> torch.Tensor:
    """What a slot of a tensor holds."""
    number = ("param", "master", "exp_avg", "exp_avg_sq").index(slot)
    return (values + number).to(torch.bfloat16 if slot == "param" else torch.float32)


def _details(fragment: Fragment) -> tuple[Detail, ...]:
    if fragment.name.endswith("expert_bias"):
        return Detail.FULL, Detail.COMPUTE
    return (Detail.COMPUTE,) if fragment.slot == "param" else (Detail.FULL,)


@st.composite
def worlds(draw) -> World:
    """Small ones, with tensors of up to some 100 kB."""
    tp, dp, zero = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.booleans())
    tensors = []
    for operator, names in NAMES.items():
        places = tuple(sorted(draw(st.sets(st.integers(0, dp - 1), min_size=1)))) if "expert" in operator else range(dp)
        for name in names[: draw(st.integers(0, 2))]:
            sliced = draw(st.booleans()) and "router" not in name
            shape = (tp * draw(st.sampled_from([1, 3, 20, 65])), *draw(st.sampled_from([(), (1,), (7, 5), (129,)])))
            values = torch.arange(torch.Size(shape).numel()).view(shape) % 251
            cuts = sorted(draw(st.lists(st.floats(0, 1), min_size=len(places) - 1, max_size=len(places) - 1)))
            tensors.append(Tensor(name, values, sliced, tuple(places), tuple(cuts)))
    return World(tp, dp, zero, tuple(tensors))


def plans() -> st.SearchStrategy[dict[str, Detail]]:
    """Some operators, each at some detail."""
    return st.dictionaries(st.sampled_from(sorted(NAMES)), st.sampled_from(sorted(SLOTS, key=str)))
