"""Reads optimizer state, schedule and position of Megatron-LM's checkpoints without building the model.

Arguments, position and schedule are in the common state.  Optimizer state is in ``optimizer/``, or in one tensor per
weight.  Scripts of Megatron-LM write the latter without a distributed optimizer, or with
``--dist-ckpt-optim-fully-reshardable``.  Flat buffers of a distributed optimizer (``dp_reshardable``) can only be read
in the layout of the run.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.pretraining.process import cpu

cpu.install()  # must precede megatron.core
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.safe_globals import register_safe_globals  # noqa: E402

from megatron.pretraining.checkpoint.unpickling import nothing_runs  # noqa: E402
from megatron.pretraining.convert.contents import MASTER, shape_by_operator  # noqa: E402
from megatron.pretraining.convert.torch_dist import StockPlace  # noqa: E402
from megatron.pretraining.entry.configuration import described  # noqa: E402
from megatron.pretraining.entry.model import tokenizer_of  # noqa: E402
from moc.runtime.collectives import first_line  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402

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
        with nothing_runs():
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


def training_state(common: Mapping[str, Any], places: Mapping[str, StockPlace]) -> dict:
    """Returns the contents of a ``training_state.json``, as this program's loop would have saved it.

    Args:
        common: the common state of a checkpoint with optimizer state in Megatron-LM's format.
        places: positions of the weights, by name in the unpartitioned model.
    """
    values = described(common["args"])
    return {
        "iteration": common["iteration"],
        "consumed_samples": values.get("consumed_train_samples", 0),
        "skipped_iterations": 0,
        "optimizer": values.get("optimizer") if "optimizer" in common else None,
        **_of_optimizer(common.get("optimizer")),
        "params_dtype": values.get("params_dtype"),
        "main_params_dtype": values.get("main_params_dtype", "fp32"),
        "moments": [values.get(name, "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")],
        "scheduler": common.get("opt_param_scheduler"),
        "grad_norm": "stock",
        "sample_order": {},
        "shape": shape_by_operator({name: place.shape for name, place in places.items()}),
        "model": values,
        "tokenizer": tokenizer_of(values),
    }


def optimizer_places(
    shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, StockPlace]
) -> dict[str, dict[str, StockPlace]]:
    """Returns the optimizer-state tensors of single weights by key and by name in the unpartitioned model.

    Args:
        shapes: shapes of all tensors of the checkpoint, by key.
        weights: positions of the weights.
    """
    found: dict[str, dict[str, StockPlace]] = {}
    of_key: dict[str, list[str]] = {}
    for name, place in weights.items():
        of_key.setdefault(place.key, []).append(name)
    for key in shapes:
        if (match := _OF_WEIGHT.fullmatch(key)) and shapes[key] == shapes.get(match["key"]):
            slot = _SLOTS.get(match["slot"], match["slot"])
            for name in of_key.get(match["key"], ()):
                at = weights[name]
                found.setdefault(slot, {})[name] = StockPlace(key, at.global_shape, at.region, at.stacked)
    return found


def _of_optimizer(state: Any) -> dict[str, Any]:
    """Returns update count and loss scale in a common state's optimizer part; chained optimizers count together."""
    steps = [int(step) for name in ("common_step", "step") for step in _found(state, name)]
    scalers = [_plain(scaler) for scaler in _found(state, "grad_scaler") if isinstance(scaler, dict)]
    return {"optimizer_step": max(steps, default=0), "grad_scaler": scalers[0] if scalers else None}


def _found(state: Any, name: str) -> Iterator[Any]:
    """Yields the values of a key at any depth."""
    if isinstance(state, dict) and name in state:
        yield state[name]
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _found(value, name)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in state.items()}
