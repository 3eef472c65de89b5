"""Exchanges values among all workers in host memory, as JSON, and shares the result or error of one with all.

On a GPU an operation is only enqueued when the call returns.  After an abort the stream continues over undefined
memory.  A peer's abort may even complete this worker's operation with undefined memory, before this worker receives
the abort.  gloo's operations are complete when they return, or raise: no result is ambiguous.

So workers agree over gloo, after each has copied its contribution to the host.  A completed commit all-reduce proves
that no worker's generation was over when its contribution reached the host.  Everything before the contribution is
therefore valid on all workers.  A gather proves nothing about work enqueued on a device.

Decoding JSON runs no code, unlike a pickle.  JSON has no tuples, sets or records of ours, so these are objects with one
tag:

    {"tuple": [...]}   {"set": [...]}   {"frozenset": [...]}   {"dict": [[key, value], ...]}   {"bytes": "base64"}
    {"enum": ["module:name", member]}   {"record": ["module:name", value, ...]}, a dataclass or named tuple of ours
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moc.errors import code_of, with_code
from moc.files.decode import parse
from moc.runtime.device import copy_to_host, synchronize_and_check
from moc.store.errors import CheckpointError, TakenError

TRUSTED_PREFIXES = ("moc.", "megatron.pretraining.")
"""Prefixes of modules whose records are decoded."""

_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}

_group: dist.ProcessGroup | None = None

MAX_BYTES = 1 << 30
"""Most bytes that a worker sends in one exchange."""


class ObjectDecodeError(ValueError):
    """The data is no value that a worker of this job sends."""


def encode_object(value: object) -> bytes:
    """Encodes None, numbers, text, bytes, lists, tuples, sets, dicts, enums, and records of them.

    Raises:
        TypeError: the value contains something else.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode_object(data: bytes) -> object:
    """Decodes data from :func:`encode_object` to an equal value, except that mappings become dicts.

    Raises:
        ObjectDecodeError: the data is not from :func:`encode_object`.
    """
    try:
        return _from_json(parse(data))
    except ObjectDecodeError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ObjectDecodeError(f"{type(error).__name__}: {error}") from None


def _to_json(value: object) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [*map(_to_json, value)]  # pyright: ignore[reportArgumentType]  # it is a list
    if kind in _CONTAINERS:
        return {_CONTAINERS[kind]: [*map(_to_json, value)]}  # pyright: ignore[reportArgumentType]  # it is iterable
    if isinstance(value, enum.Enum):
        return {"enum": [_type_name(kind), value.name]}
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if dataclasses.is_dataclass(value):
        return {
            "record": [_type_name(kind), *(_to_json(getattr(value, item.name)) for item in dataclasses.fields(value))]
        }
    if isinstance(value, tuple):
        return {"record": [_type_name(kind), *map(_to_json, value)]}
    for plain in (int, float, str):  # numpy's numbers are subclasses, or look like them
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"workers cannot exchange a {kind.__module__}.{kind.__qualname__}")


def _from_json(value):
    if isinstance(value, list):
        return [*map(_from_json, value)]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "dict":
        return {_from_json(key): _from_json(item) for key, item in content}
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    for kind, name in _CONTAINERS.items():
        if tag == name:
            return kind(map(_from_json, content))
    if tag == "enum" and issubclass(kind := _find_type(content[0]), enum.Enum):
        return kind[content[1]]
    if tag == "record":
        return _make_record(_find_type(content[0]), [*map(_from_json, content[1:])])
    raise ObjectDecodeError(f"it has an unknown {tag}")


def _make_record(kind: type, values: list):
    """Fills a record without calling its class, so that none of its code runs."""
    if not dataclasses.is_dataclass(kind):
        if not (issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(values)):
            raise ObjectDecodeError(f"{kind.__qualname__} is no record, or another version's")
        return tuple.__new__(kind, values)
    record = object.__new__(kind)
    for record_field, value in zip(dataclasses.fields(kind), values, strict=True):
        object.__setattr__(record, record_field.name, value)
    return record


def _type_name(kind: type) -> str:
    if not f"{kind.__module__}.".startswith(TRUSTED_PREFIXES):
        raise TypeError(f"workers cannot exchange a {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_type(name: str) -> type:
    if not isinstance(name, str):
        raise ObjectDecodeError(f"{name!r} is no name of a record")
    module, _, path = name.partition(":")
    kind: object = sys.modules.get(module) if f"{module}.".startswith(TRUSTED_PREFIXES) else None
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or f"{kind.__module__}:{kind.__qualname__}" != name:
        raise ObjectDecodeError(f"there is no record {name} here")
    return kind


def host_group() -> dist.ProcessGroup | None:
    """Returns the group; None for the world's own, whose backend is gloo."""
    return _group


def set_host_group(group: object) -> None:
    """Sets the group; None if the world's own backend is gloo, or the world is destroyed."""
    global _group
    assert group is None or isinstance(group, dist.ProcessGroup)  # every worker is a member
    _group = group


def group_for(values: torch.Tensor) -> dist.ProcessGroup | None:
    """Returns the group of all workers that transfers values of this device: NCCL transfers no host memory.

    None for the world's own group.
    """
    world: Any = dist.group.WORLD
    return None if values.device.type in {device.type for device in world._device_types} else host_group()


def gather(value, group=None) -> list:
    """Returns the values of all ranks of a group (default: all), by group rank.  Collective over the group.

    Each value must be accepted by :func:`moc.runtime.collectives.encode_object`.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return _gather_among(ranks, value)
    encoded, size = _to_tensor(encode_object(value)), len(ranks)
    lengths = encoded.new_empty(size, dtype=torch.int64)
    _all_gather(lengths, encoded.new_tensor([len(encoded)], dtype=torch.int64), group=host_group())
    padded = encoded.new_zeros(longest := _check_size(max(lengths.tolist())))
    padded[: len(encoded)] = encoded
    gathered = encoded.new_empty(size * longest)
    _all_gather(gathered, padded, group=host_group())
    data = gathered.numpy().tobytes()
    return [_decode(data[i * longest : i * longest + length]) for i, length in enumerate(lengths.tolist())]


def _all_gather(output: torch.Tensor, values: torch.Tensor, group: object) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    getattr(dist, name)(output, values, group=group)


def _gather_among(ranks: Sequence[int], value) -> list:
    """Gathers values of some workers through the first of them; other workers need not call it."""
    first, *other_ranks = ranks
    if dist.get_rank() != first:
        _send(value, first)
        return _receive(first)
    values = [value, *map(_receive, other_ranks)]
    for rank in other_ranks:
        _send(values, rank)
    return values


def _send(value, rank: int) -> None:
    data = _to_tensor(encode_object(value))
    dist.send(data.new_tensor([len(data)], dtype=torch.int64), rank, group=host_group())
    dist.send(data, rank, group=host_group())


def _receive(rank: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, rank, group=host_group())
    data = torch.empty(_check_size(int(length)), dtype=torch.uint8)
    dist.recv(data, rank, group=host_group())
    return _decode(data.numpy().tobytes())


def broadcast_from_rank0(value) -> Any:
    """Returns rank 0's value on all ranks.  Collective."""
    encoded = _to_tensor(encode_object(value))
    length = encoded.new_tensor([len(encoded)], dtype=torch.int64)
    dist.broadcast(length, src=0, group=host_group())
    data = encoded if dist.get_rank() == 0 else encoded.new_empty(_check_size(int(length)))
    dist.broadcast(data, src=0, group=host_group())
    return _decode(data.numpy().tobytes())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_size(nbytes: int) -> int:
    if not 0 <= nbytes <= MAX_BYTES:
        raise RuntimeError(f"a worker announced a message of {nbytes} bytes: the limit is {MAX_BYTES}")
    return nbytes


def _decode(data: bytes) -> Any:
    try:
        return decode_object(data)
    except ObjectDecodeError as error:
        raise RuntimeError(f"a worker sent data that no worker of this job sends: {error}") from None


class OnDevice(Protocol):
    """A worker's position, such as :class:`moc.runtime.job.World`."""

    @property
    def device(self) -> torch.device:
        """Device of the worker."""
        ...


def run_on_rank0(action: Callable, failure: str):
    """Runs ``action`` on rank 0; each rank returns its result or raises its error.  Collective.

    Args:
        action: returns a JSON-serializable value; a ``Path`` becomes None.
        failure: prefix of the message if the file system fails.

    Raises:
        CheckpointError: on all ranks, if the action raised it (also as :class:`TakenError`) or an OSError.
    """
    outcome = [None, None, False]
    if dist.get_rank() == 0:
        try:
            result = action()
            outcome[0] = None if isinstance(result, Path) else result
        except CheckpointError as error:
            outcome[1:] = with_code(error), isinstance(error, TakenError)
        except OSError as error:
            outcome[1] = f"{failure}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
    result, error, is_owned_by_other = broadcast_from_rank0(outcome)
    if error:
        raise (TakenError if is_owned_by_other else CheckpointError)(error)
    return result


def run_on_all(action: Callable[[], None], failure: str) -> None:
    """Runs ``action`` on every rank; raises CheckpointError on all if any raises it or OSError.  Collective.

    ``failure`` is as in :func:`run_on_rank0`.
    """
    problem = None
    try:
        action()
    except CheckpointError as error:
        problem = with_code(error)
    except OSError as error:
        problem = f"{failure}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
    if problem := first_reported(problem):
        raise CheckpointError(problem)


def first_reported(value: Any) -> Any:
    """Returns the first value over all ranks that is not None, or None.  Collective."""
    return next((v for v in gather(value) if v is not None), None)


def sum_over_workers(values: Mapping[str, torch.Tensor | float], world: OnDevice) -> dict[str, Any]:
    """Sums each value over all ranks in one float64 all-reduce; a 1-D tensor yields a list of element sums.

    Tensors may be on this worker's device.  They are copied to the host first, which waits for everything they depend
    on.  The sum is computed in host memory.

    Raises:
        Aborted, PeerFailure: as for any operation of our groups, also if the device's groups are aborted meanwhile.
    """
    tensors = [torch.as_tensor(v, dtype=torch.float64) for v in values.values()]
    contribution = _concatenate_on_host([tensor.reshape(-1) for tensor in tensors], world.device)
    dist.all_reduce(contribution, group=host_group())  # raises if the generation is over and values may be undefined
    sums = iter(contribution.tolist())
    return {
        name: [next(sums) for _ in range(tensor.numel())] if tensor.dim() else next(sums)
        for name, tensor in zip(values, tensors, strict=True)
    }


def _concatenate_on_host(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenates parts in order, with a single copy for all parts on the device."""
    on_device = [part for part in tensors if part.device.type == device.type]
    if not on_device or device.type == "cpu":
        return torch.cat(tensors)
    copied = iter(copy_to_host(torch.cat(on_device)).split([part.numel() for part in on_device]))
    return torch.cat([next(copied) if part.device.type == device.type else part for part in tensors])


def synchronize_all(world: OnDevice) -> None:
    """Waits until all work that the workers have enqueued on their devices is complete and valid.  Collective.

    Raises:
        Aborted, PeerFailure: this is not confirmed.
    """
    synchronize_group(None, world.device)


def synchronize_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits until all work enqueued by a group's workers (default: all) is complete and valid.  Collective over it.

    Raises:
        Aborted, PeerFailure: this is not confirmed.
    """
    synchronize_and_check(device)
    gather(None, group)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type name; at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
