"""Encodes the plain state of schedulers, scalers, loaders and users' objects as text, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from moc.runtime.host_group import ObjectDecodeError, decode_object, encode_object
from moc.state.operators import UnsupportedStateError

MAX_BYTES = 1 << 24
"""Most bytes of encoded state; larger tensors belong to the saved tensors."""

_TENSOR, _ARRAY = "moc.tensor", "moc.array"


def encode_plain(owner: str, value: Any) -> str:
    """Returns the text of a state: None, numbers, text, bytes, tensors, arrays, and containers of them.

    Raises:
        UnsupportedStateError: the state of ``owner`` contains something else, or is too large.
    """
    try:
        text = encode_object(_to_plain(value)).decode()
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"the state of {owner} cannot be saved: {error}. Fix: let its state_dict return numbers, text, tensors and "
            "containers of them",
            code="state-not-plain",
        ) from None
    if len(text) > MAX_BYTES:
        raise UnsupportedStateError(
            f"the state of {owner} takes {len(text) >> 20} MiB besides its tensors. Fix: let its state_dict return the "
            "same tensors each time, which are then saved like the model",
            code="state-not-plain",
        )
    return text


def decode_plain(text: Any) -> Any:
    """Returns the state that :func:`encode_plain` has encoded.

    Raises:
        ValueError: the text is no such state.
    """
    if not isinstance(text, str):
        raise ObjectDecodeError("it is no text")
    return _from_plain(decode_object(text.encode()))


def _to_plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        raise TypeError("it has a new DTensor each time")
    if isinstance(value, torch.Tensor):
        local = value.detach().cpu().contiguous()
        data = local.view(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
        return {_TENSOR: [str(local.dtype), list(local.shape), data]}
    if isinstance(value, np.ndarray):
        return {_ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
    if isinstance(value, Mapping):
        return {key: _to_plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_to_plain, value))
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            name, shape, data = value[_TENSOR]
            dtype = getattr(torch, name.removeprefix("torch."))
            return (
                torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
            )
        if value.keys() == {_ARRAY}:
            name, shape, data = value[_ARRAY]
            return np.frombuffer(bytearray(data), dtype=np.dtype(name)).reshape(shape)
        return {key: _from_plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_from_plain, value))
    return value
