"""However a local tensor is cut into owned ranges, its fragments hold each element once, in the right place."""

import random

import torch

from moc.state.operators import OwnedSlice, Piece, Region, fragments_of
from tests.cases import each_row


def pieces_of_halves(whole: torch.Tensor, local: torch.Tensor, first_row: int) -> list[Piece]:
    """A local tensor that holds rows of two tensors, as gate and value of an expert stand together."""
    rows = local.shape[0] // 2
    region = Region((first_row, 0, 0), (rows, *whole.shape[1:]))
    return [
        Piece(name, tuple(whole.shape), region, local[i * rows :][:rows], i * rows * whole[0].numel(), (0, 0, 0), False)
        for i, name in enumerate(("w", "v"))
    ]


@each_row("seed", range(20))
def test_random_ranges_cover_each_element_once(seed):
    choose = random.Random(seed)
    shape = [choose.randint(1, 5) for _ in range(3)]
    whole = {"w": torch.rand(2 * shape[0], *shape[1:]), "v": torch.rand(2 * shape[0], *shape[1:])}
    seen = {name: torch.zeros(values.shape, dtype=torch.int) for name, values in whole.items()}
    for first_row in (0, shape[0]):  # two tensor-parallel slices
        local = torch.cat([values[first_row:][: shape[0]] for values in whole.values()])
        cuts = sorted(choose.randint(0, local.numel()) for _ in range(3))
        for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            owned = OwnedSlice(local, start, stop, {"master": local.view(-1)[start:stop].clone()}, sharded=True)
            for fragment in fragments_of(owned, pieces_of_halves(whole["w"], local, first_row)):
                box = fragment.region.slices()
                seen[fragment.name][box] += 1
                assert torch.equal(fragment.view, whole[fragment.name][box].reshape(-1))
                assert torch.equal(fragment.view, local.view(-1)[fragment.start :][: fragment.region.numel])
    assert all((count == 1).all() for count in seen.values())


@each_row("replica, sharded, first", [
    ((0, 0, 0), False, True), ((0, 0, 1), False, False), ((0, 0, 1), True, True), ((0, 1, 0), True, False),
    ((1, 0, 0), False, False),
])  # fmt: skip
def test_only_one_copy_is_first(replica, sharded, first):
    local = torch.zeros(4)
    piece = Piece("w", (4,), Region((0,), (4,)), local, 0, replica, False)
    (fragment,) = fragments_of(OwnedSlice(local, 0, 4, {"param": local}, sharded), [piece])
    assert fragment.first_copy == first
