"""Dense checkpoints to be converted: weights as ``torch_dist``, and optimizer state of ours where there is some."""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from _contents import (
    COMPUTE,
    DTYPE_NAMES,
    FULL,
    MASTER,
    Contents,
    Facts,
    iteration_of,
    read_region,
    whole_of,
    whole_tensors,
)
from _coverage import PARAM, operator_or_other
from _stock_names import Place, unpartitioned_places
from _torch_dist import WeightsReader

from megatron.pretraining.checkpoint import files
from megatron.pretraining.checkpoint.writer import OPTIMIZER
from moc.state.region import Region
from moc.store.errors import CheckpointError
from moc.store.regions import Entry, RegionReader

_OPTIMIZER_KEYS = ("optimizer.", "chained_")  # stock checkpoints hold its state beside weights; it is left out
_COUNTING = ("adam",)  # optimizers whose moments count updates


class DenseContents(Contents):
    """A dense checkpoint.

    Args:
        directory: its ``iter_*`` directory.
        trust: whether to read it although no manifest of ours says that it is what was written.
        advance: is told the bytes that were compared with their hashes.

    Raises:
        CheckpointError: it is damaged, or not to be trusted.
    """

    def __init__(self, directory: Path, trust: bool = False, advance: Callable[[int], None] = lambda count: None):
        listed = _verified_files(directory, trust, advance)
        self._weights = WeightsReader(directory)
        stock = {k: found for k, found in self._weights.tensors().items() if not k.startswith(_OPTIMIZER_KEYS)}
        self._places = unpartitioned_places({key: shape for key, (shape, _) in stock.items()})
        if strangers := [name for name in self._places if operator_or_other(name) == "other"]:
            raise CheckpointError(f"{directory} holds {strangers[0]}, which is no part of a model of this program")
        self._dtypes = {name: stock[place.key][1] for name, place in self._places.items()}
        regions = sorted(name for name in listed if name.startswith(f"{OPTIMIZER}/"))
        self._regions = RegionReader((directory / name for name in regions), verify=True)
        self.facts = self._facts(directory, bool(listed), len(regions))
        owned = whole_tensors(self._regions)
        self.tensors = owned + list(self._without_owner({tensor.name for tensor in owned}))
        step = self.facts.state.get("optimizer_step")
        self.operators = _operators(self.tensors, step if self.facts.state.get("optimizer") in _COUNTING else None)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the weights; the biases of routers, which are fp32, are few."""
        return Counter(self._dtypes.values()).most_common(1)[0][0]

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """See :class:`Contents`."""
        if slot == PARAM:
            return self.weight(name, region)
        return read_region(self._regions, name, slot, region)

    def weight(self, name: str, region: Region) -> torch.Tensor:
        """A box of a weight, as the model computes with it.

        Raises:
            CheckpointError: there is none.
        """
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"there is optimizer state of {name}, but no weight: this is no whole checkpoint")
        return self._weights.read(place.key, place.box(region)).view(region.shape)

    def check_masters(self, advance: Callable[[int], None]) -> None:
        """Compares every weight with its master, which is what is kept of both.

        Raises:
            CheckpointError: a weight is not its master rounded; or one of them is missing.
        """
        for tensor in self.tensors:
            if tensor.slot == MASTER:
                weight = self.weight(tensor.name, tensor.region)
                master = self.read(tensor.name, MASTER, tensor.region).to(weight.dtype)
                if not torch.equal(master.view(torch.uint8), weight.view(torch.uint8)):
                    raise CheckpointError(
                        f"the weight {tensor.name} is not its master rounded to {weight.dtype}: something else than a "
                        "save of this program has changed one of them; --no-optim takes the weights alone"
                    )
                advance(tensor.nbytes)

    def weights(self, dtype: torch.dtype | None) -> Contents:
        """See :class:`Contents`; they are stored, so none is rounded."""
        alone = copy.copy(self)
        alone.tensors = list(self._without_owner(set()))
        alone.operators = _operators(alone.tensors, None)
        alone.facts = replace(self.facts, state=dict(self.facts.state) | {"optimizer": None})
        return alone

    def _without_owner(self, owned: set[str]) -> Iterable[Entry]:
        """The weights that no optimizer owns: all where there is none, else the biases of routers."""
        for name, place in self._places.items():
            if name not in owned:
                yield Entry(name, PARAM, place.shape, whole_of(place.shape), self._dtypes[name])

    def _facts(self, directory: Path, ours: bool, writers: int) -> Facts:
        if ours:
            state = json.loads((directory / files.STATE).read_text(encoding="utf-8"))
        else:
            state = {"iteration": iteration_of(directory), "optimizer": None, "shape": _layers(self._places)}
        state = {"interval": None, **state}  # which a policy has not adapted yet
        state["params_dtype"] = state.get("params_dtype") or DTYPE_NAMES.get(self.compute_dtype)
        return Facts(state["iteration"], "full", {}, state, writers or 1)


def _verified_files(directory: Path, trust: bool, advance: Callable[[int], None]) -> Mapping[str, dict]:
    """What our manifest lists, nothing where there is none; hashes are compared before anything is unpickled."""
    manifest = files.read_manifest(directory)
    if manifest is None and not trust:
        raise CheckpointError(
            f"{directory} has no {files.MANIFEST}, so it is not known who wrote it, and torch unpickles its .metadata: "
            "pass --trust if you know that it is harmless"
        )
    listed = manifest["files"] if manifest else {}
    for name, entry in listed.items():
        if damage := files.damage_in(directory, {name: entry}):
            raise CheckpointError(f"{damage}; convert another checkpoint with --iteration")
        advance(entry["bytes"])
    return listed


def _operators(tensors: Iterable[Entry], step: int | None) -> dict[str, tuple[str, int | None]]:
    tensors = list(tensors)
    full = {operator_or_other(tensor.name) for tensor in tensors if tensor.slot == MASTER}
    names = dict.fromkeys(operator_or_other(tensor.name) for tensor in tensors)
    return {name: (FULL, step) if name in full else (COMPUTE, None) for name in names}


def _layers(places: Mapping[str, Place]) -> dict:
    """As much of a model's shape as the names of its weights tell."""
    kinds, experts = defaultdict(set), set()
    for name in places:
        parts = operator_or_other(name).split(".")
        if parts[0] == "layers":
            kinds[int(parts[1])].add(parts[2])
            experts.update(map(int, parts[3:]))
    alike = not any(place.key.split(".")[2].isdigit() for place in places.values() if "decoder.layers." in place.key)
    pattern = [int("router" in kinds[layer]) for layer in sorted(kinds)]
    return {"num_layers": len(kinds), "num_experts": len(experts) or None, "moe_layer_freq": 1 if alike else pattern}
