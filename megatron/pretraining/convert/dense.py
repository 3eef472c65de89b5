"""Reads and writes dense checkpoints: weights as ``torch_dist``, with or without optimizer state.

Optimizer state of Megatron-LM's checkpoints is read without building the model.  Arguments, position and schedule are
in the common state.  Optimizer state is in ``optimizer/``, or in one tensor per weight.  Scripts of Megatron-LM write
the latter without a distributed optimizer, or with ``--dist-ckpt-optim-fully-reshardable``.  Flat buffers of a
distributed optimizer (``dp_reshardable``) can only be read in the layout of the run.
"""

from __future__ import annotations

import copy
import json
import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.pretraining.process import cpu

cpu.install()  # must precede megatron.core
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.safe_globals import register_safe_globals  # noqa: E402

from megatron.pretraining.checkpoint.digests import StoredDigests, read_digests  # noqa: E402
from megatron.pretraining.checkpoint.state import read_state  # noqa: E402
from megatron.pretraining.checkpoint.unpickling import restricted_unpickling  # noqa: E402
from megatron.pretraining.config.flag import dashed  # noqa: E402
from megatron.pretraining.convert.contents import (  # noqa: E402
    COMPUTE,
    DTYPE_NAMES,
    FULL,
    MASTER,
    Advance,
    ConvertedState,
    DigestSums,
    Facts,
    check_complete,
    check_written,
    complete_bounds,
    complete_tensors,
    cut_tensors,
    in_model_order,
    iteration_of,
    read_region,
    refuse_to_replace,
    shape_by_operator,
    write_regions,
)
from megatron.pretraining.convert.torch_dist import (  # noqa: E402
    StockPosition,
    Weight,
    WeightsReader,
    extra_states,
    stacks_layers,
    stock_positions,
    unpartitioned_positions,
    write_weights,
)
from megatron.pretraining.entry.configuration import described  # noqa: E402
from megatron.pretraining.entry.model import tokenizer_of  # noqa: E402
from moc.files.safe_directory import write_durably  # noqa: E402
from moc.inspect.checkpoint import OPTIMIZER, is_optimizer_file  # noqa: E402
from moc.inspect.coverage import PARAM, operator_or_other  # noqa: E402
from moc.runtime.collectives import first_line  # noqa: E402
from moc.state.digests import digest_slot, to_text, total_of  # noqa: E402
from moc.state.operators import Region  # noqa: E402
from moc.store import dense_files  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from moc.store.shard_file import ShardReader, TensorBox  # noqa: E402
from moc.store.store import shard_file_name  # noqa: E402

OPTIMIZER_KEYS = ("optimizer.", "chained_")
"""Prefixes of the keys of optimizer state."""
_OF_WEIGHT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[a-z0-9_]+)\.(?P<key>.+)")
_SLOTS = {"fp32_param": MASTER, "param": MASTER}
"""Optimizer-state keys that have another name in Megatron-LM."""


def read_common(directory: Path) -> Mapping[str, Any]:
    """Reads the common state of a checkpoint without running code from it.

    Raises:
        CheckpointError: it cannot be read.
    """
    register_safe_globals()
    try:
        with restricted_unpickling():
            common: Any = dist_checkpointing.load_common_state_dict(directory)
        if not isinstance(common.get("args"), Namespace) or type(common.get("iteration")) is not int:
            raise ValueError("it has no arguments, or no iteration")
        return common
    except CheckpointError:
        raise
    except Exception as error:  # the readers of torch and megatron-core may raise anything
        raise CheckpointError(
            f"the common state in {directory} cannot be read ({type(error).__name__}: {first_line(error)}). Fix: "
            "convert another checkpoint with --iteration",
            code="checkpoint-unreadable",
        ) from None


def training_state_contents(common: Mapping[str, Any], positions: Mapping[str, StockPosition]) -> dict:
    """Returns the contents of a ``training_state.json``, as this program's loop would have saved it.

    Args:
        common: the common state of a checkpoint with optimizer state in Megatron-LM's format.
        positions: positions of the weights, by name in the unpartitioned model.
    """
    values = described(common["args"])
    return {
        "iteration": common["iteration"],
        "consumed_samples": values.get("consumed_train_samples", 0),
        "skipped_iterations": 0,
        "optimizer": values.get("optimizer") if "optimizer" in common else None,
        **_optimizer_values(common.get("optimizer")),
        "params_dtype": values.get("params_dtype"),
        "main_params_dtype": values.get("main_params_dtype", "fp32"),
        "moments": [values.get(name, "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")],
        "scheduler": common.get("opt_param_scheduler"),
        "grad_norm": "stock",
        "sample_order": {},
        "shape": shape_by_operator({name: position.shape for name, position in positions.items()}),
        "model": values,
        "tokenizer": tokenizer_of(values),
    }


def optimizer_positions(
    shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, StockPosition]
) -> dict[str, dict[str, StockPosition]]:
    """Returns the optimizer-state tensors of single weights by key and by name in the unpartitioned model."""
    positions: dict[str, dict[str, StockPosition]] = {}
    names_of_key: dict[str, list[str]] = {}
    for name, position in weights.items():
        names_of_key.setdefault(position.key, []).append(name)
    for key in shapes:
        if (match := _OF_WEIGHT.fullmatch(key)) and shapes[key] == shapes.get(match["key"]):
            slot = _SLOTS.get(match["slot"], match["slot"])
            for name in names_of_key.get(match["key"], ()):
                positions.setdefault(slot, {})[name] = replace(weights[name], key=key)
    return positions


def _optimizer_values(state: Any) -> dict[str, Any]:
    """Returns update count and loss scale in a common state's optimizer part; chained optimizers count together."""
    steps = [int(step) for name in ("common_step", "step") for step in _values_of_key(state, name)]
    scalers = [_to_json_values(scaler) for scaler in _values_of_key(state, "grad_scaler") if isinstance(scaler, dict)]
    return {"optimizer_step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}


def _values_of_key(state: Any, name: str) -> Iterator[Any]:
    """Yields the values of a key at any depth."""
    if isinstance(state, dict) and name in state:
        yield state[name]
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _values_of_key(value, name)


def _to_json_values(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in state.items()}


_COUNTING = ("adam",)  # optimizers that count updates


class DenseContents(ConvertedState):
    """Dense checkpoint.

    With ``trust``, it is also read without a manifest of this program.

    Raises:
        CheckpointError: it is damaged or not trusted.
    """

    def __init__(self, directory: Path, trust: bool = False, advance: Advance = lambda count: None):
        manifest = _verified_manifest(directory, trust, advance)
        self._weights = WeightsReader(directory)
        all_tensors = self._weights.tensors()
        stock = {k: shape_and_dtype for k, shape_and_dtype in all_tensors.items() if not k.startswith(OPTIMIZER_KEYS)}
        self._positions = unpartitioned_positions({key: shape for key, (shape, _) in stock.items()})
        if unknown := [name for name in self._positions if operator_or_other(name) == "other"]:
            raise CheckpointError(
                f"{directory} holds {unknown[0]}, which is no part of a model of this program. Fix: convert a "
                "checkpoint that this program or Megatron-LM wrote",
                code="checkpoint-of-another-program",
            )
        self._dtypes = {name: stock[position.key][1] for name, position in self._positions.items()}
        listed = manifest["files"] if manifest else {}
        regions = sorted(filter(is_optimizer_file, listed))
        self._regions = ShardReader((directory / name for name in regions), verifies=True)
        self.facts = self._facts(directory, manifest, len(regions))
        shapes = {key: shape for key, (shape, _) in all_tensors.items()}
        self._slots = {} if regions else optimizer_positions(shapes, self._positions)
        if self._slots and MASTER not in self._slots and self.compute_dtype == torch.float32:  # weights are masters
            self._slots[MASTER] = {name: self._positions[name] for by_name in self._slots.values() for name in by_name}
        stock_tensors = [
            TensorBox(name, slot, position.shape, complete_bounds(position.shape), all_tensors[position.key][1])
            for slot, positions in self._slots.items()
            for name, position in positions.items()
        ]
        owned = complete_tensors(self._regions) + in_model_order(stock_tensors)
        self.tensors = owned + list(self._without_owner({tensor.name for tensor in owned}))
        stored = read_digests(directory, manifest)
        # excludes optimizer state that only the run's layout can read
        stored_slots = {digest_slot(tensor.name, tensor.slot) for tensor in self.stored()}
        totals = total_of([stored.digests] if stored else [])
        self.digests = {key: totals[key] for key in totals if key[1].partition(":")[0] in stored_slots}
        step = self.facts.state.get("optimizer_step")
        self.operators = _operators(self.tensors, step if self.facts.state.get("optimizer") in _COUNTING else None)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of most weights; only router biases are always fp32."""
        return Counter(self._dtypes.values()).most_common(1)[0][0]

    def stored(self) -> Iterable[TensorBox]:
        """Yields all tensors, including weights that have masters."""
        keys = {(tensor.name, tensor.slot) for tensor in self.tensors}
        weights = list(self._without_owner(set()))
        return [*self.tensors, *(tensor for tensor in weights if (tensor.name, tensor.slot) not in keys)]

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads a chunk of any optimizer-state key."""
        if slot == PARAM:
            return self.weight(name, region)
        if (position := self._slots.get(slot, {}).get(name)) is not None:
            return self._weights.read(position.key, position.bounds(region)).view(region.shape)
        return read_region(self._regions, name, slot, region)

    def weight(self, name: str, region: Region) -> torch.Tensor:
        """Reads a chunk of a compute weight; raises CheckpointError if the checkpoint has no such weight."""
        position = self._positions.get(name)
        if position is None:
            raise CheckpointError(
                f"there is optimizer state of {name}, but no weight. Fix: convert another checkpoint with --iteration",
                code="checkpoint-incomplete",
            )
        return self._weights.read(position.key, position.bounds(region)).view(region.shape)

    def check_masters(self, advance: Advance) -> None:
        """Compares every weight with its master, since only the master is converted.

        Raises:
            CheckpointError: a weight is not its rounded master, or one of them is missing.
        """
        for tensor in self.tensors:
            if tensor.slot == MASTER:
                weight = self.weight(tensor.name, tensor.region)
                master = self.read(tensor.name, MASTER, tensor.region).to(weight.dtype)
                if not torch.equal(master.view(torch.uint8), weight.view(torch.uint8)):
                    raise CheckpointError(
                        f"the weight {tensor.name} is not its master rounded to {weight.dtype}: another program "
                        "changed one of them. Fix: pass --no-optim to convert only the weights",
                        code="weight-differs-from-master",
                    )
                advance(tensor.nbytes)

    def weights(self, dtype: torch.dtype | None) -> ConvertedState:
        """Returns the stored weights, without rounding."""
        weights_only = copy.copy(self)
        weights_only.tensors = list(self._without_owner(set()))
        weights_only.operators = _operators(weights_only.tensors, None)
        weights_only.facts = replace(self.facts, state=dict(self.facts.state) | {"optimizer": None})
        return weights_only

    def _without_owner(self, owned: set[str]) -> Iterable[TensorBox]:
        """Yields the weights without optimizer state: all weights, or only the router biases."""
        for name, position in self._positions.items():
            if name not in owned:
                yield TensorBox(name, PARAM, position.shape, complete_bounds(position.shape), self._dtypes[name])

    def _facts(self, directory: Path, manifest: Mapping | None, writers: int) -> Facts:
        if manifest and dense_files.STATE_FILE not in manifest["files"]:
            state = training_state_contents(read_common(directory), self._positions)
        elif manifest:
            state = read_state(directory)
        else:
            state = {"iteration": iteration_of(directory), "optimizer": None, "shape": _layers(self._positions)}
        state = {"interval": None, **state}  # no policy has adapted an interval yet
        state["params_dtype"] = state.get("params_dtype") or DTYPE_NAMES.get(self.compute_dtype)
        return Facts(state["iteration"], "full", {}, state, writers or 1)


def _verified_manifest(directory: Path, trust: bool, advance: Advance) -> Mapping | None:
    """Returns the manifest, or None; verifies the hashes of its files before anything is unpickled."""
    manifest = dense_files.read_manifest(directory)
    if manifest is None and not trust:
        raise CheckpointError(
            f"{directory} has no {dense_files.MANIFEST}, so another program wrote it, and it cannot be "
            "verified. Fix: pass --trust if you know where it is from",
            code="manifest-missing",
        )
    for name, entry in (manifest["files"] if manifest else {}).items():
        if damage := dense_files.find_damage(directory, {name: entry}):
            raise CheckpointError(
                f"{damage}. Fix: convert another checkpoint with --iteration",
                code="checkpoint-damaged",
            )
        advance(entry["bytes"])
    return manifest


def _operators(tensors: Iterable[TensorBox], step: int | None) -> dict[str, tuple[str, int | None]]:
    tensors = list(tensors)
    full = {operator_or_other(tensor.name) for tensor in tensors if tensor.slot == MASTER}
    names = dict.fromkeys(operator_or_other(tensor.name) for tensor in tensors)
    return {name: (FULL, step) if name in full else (COMPUTE, None) for name in names}


def _layers(positions: Mapping[str, StockPosition]) -> dict:
    """Returns the part of a model's shape that the names of its weights determine."""
    kinds, experts = defaultdict(set), set()
    for name in positions:
        parts = operator_or_other(name).split(".")
        if parts[0] == "layers":
            kinds[int(parts[1])].add(parts[2])
            experts.update(map(int, parts[3:]))
    keys = [position.key for position in positions.values()]
    uniform = not any(key.split(".")[2].isdigit() for key in keys if "decoder.layers." in key)
    pattern = [int("router" in kinds[layer]) for layer in sorted(kinds)]
    return {"num_layers": len(kinds), "num_experts": len(experts) or None, "moe_layer_freq": 1 if uniform else pattern}


def write_dense(
    contents: ConvertedState, root: Path, writers: int, dtype: torch.dtype | None, file_bytes: int, advance: Advance
) -> Path:
    """Writes weights as ``torch_dist``, and any optimizer state next to them; updates the tracker.

    Args:
        contents: the state to write.
        root: the ``--save`` directory to write into.
        writers: number of files for the optimizer state.
        dtype: dtype of rounded masters; None if unknown.
        file_bytes: size that starts the next file of weights.
        advance: called with the number of bytes written.

    Raises:
        CheckpointError: the model is incomplete, or its layers have other names in torch_dist; this iteration is
            already saved, or another save to the directory is unfinished.
    """
    iteration = contents.facts.iteration
    _refuse_renamed_layers(contents.facts.state.get("model") or {})
    check_complete(contents)
    state = _training_state(contents) | {"params_dtype": None if dtype is None else DTYPE_NAMES.get(dtype)}
    weights = contents.weights(dtype)
    shapes = {tensor.name: tensor.global_shape for tensor in weights.tensors}
    positions = stock_positions(shapes, stacks_layers(weights.facts.state))
    refuse_to_replace(dense_files.checkpoint_path(root, iteration))
    _refuse_concurrent_save(root, iteration)
    staging = dense_files.begin_save(root, iteration)
    sums = DigestSums(weights), DigestSums(contents)
    weight_chunks = [_weight(sums[0], entry, positions[entry.name], advance) for entry in weights.tensors]
    write_weights(staging, weight_chunks, extra_states(positions), iteration, file_bytes)
    owned = [tensor for tensor in contents.tensors if tensor.slot != PARAM]
    if owned:
        (staging / OPTIMIZER).mkdir()
    for rank, part in enumerate(cut_tensors(owned, writers) if owned else ()):
        write_regions(staging / OPTIMIZER / shard_file_name(rank), part, sums[1], advance)
    digests = check_written(sums, contents, staging)
    if digests and state["params_dtype"]:
        StoredDigests(state["params_dtype"], to_text(digests, digests.values())).write(staging)
    write_durably(staging / dense_files.STATE_FILE, json.dumps(state, indent=1))
    written = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    return dense_files.publish_save(
        root, iteration, {name: dense_files.describe_file(staging / name) for name in written}
    )


def _refuse_renamed_layers(model: Mapping[str, Any]) -> None:
    """Refuses a model whose snapshots do not have Megatron-LM's names (see ``model.parameters.known_name``)."""
    if option := next((name for name in ("mtp_num_layers", "hybrid_layer_pattern") if model.get(name)), None):
        raise CheckpointError(
            f"the model has {dashed(option)} {model[option]}, and its layers have other names in torch_dist than in "
            "snapshots. Fix: resume the run with --save, which writes torch_dist",
            code="target-unsupported",
        )


def _training_state(contents: ConvertedState) -> dict:
    """Returns the contents of ``training_state.json``."""
    state = dict(contents.facts.state)
    steps: dict[int, str] = {}
    for name, (detail, step) in contents.operators.items():
        if detail == FULL and step is not None:
            steps.setdefault(step, name)
    if len(steps) > 1:
        examples = " and ".join(f"{name} {step}" for step, name in sorted(steps.items())[:2])
        raise CheckpointError(
            f"operators had different numbers of updates ({examples}), and a dense checkpoint holds one number for "
            "all. Fix: pass --no-optim to convert only the weights",
            code="update-counts-differ",
        )
    return state | {"optimizer_step": next(iter(steps), state.get("optimizer_step") or 0)}


def _weight(sums: DigestSums, entry: TensorBox, position: StockPosition, advance: Advance) -> Weight:
    def values() -> torch.Tensor:
        advance(entry.nbytes)
        return sums.read(entry).reshape(position.region.shape)

    return Weight(position.key, position.global_shape, position.region, entry.dtype, values)


def _refuse_concurrent_save(root: Path, iteration: int) -> None:
    """Refuses while another save is unfinished, since starting a save deletes all other unfinished ones."""
    unfinished = set(root.glob(".iter_*.incomplete")) - {dense_files.staging_path(root, iteration)}
    if unfinished:
        raise CheckpointError(
            f"{min(unfinished)} is a save under way, or a killed one. Fix: wait for it or remove it, or name another "
            "directory",
            code="save-in-progress",
        )
