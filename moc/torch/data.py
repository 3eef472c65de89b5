"""Provides the batches of a loop from any position, and encodes the state of users' objects without pickle.

    DataLoader, Sampler    batch ``k`` of epoch ``e`` follows from the seed, ``set_epoch(e)`` and ``k``
    list, tuple            batch ``position % len``
    a function             ``data(position)`` returns an iterable that begins with the batch of this position
    None                   a batch is its position, for loops without a data set
    state_dict             a loader with ``state_dict`` and ``load_state_dict``, such as torchdata's
                           ``StatefulDataLoader``; each worker's state is saved with every snapshot

A position is the number of batches that a worker has read.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from moc.errors import UserError
from moc.runtime.child_processes import begin_reader
from moc.runtime.collectives import ObjectDecodeError, decode_object, encode_object
from moc.session.settings import SettingsError
from moc.state.operators import UnsupportedStateError

MAX_BYTES = 1 << 24
"""Most bytes of encoded state; larger tensors belong to the saved tensors."""

_TENSOR, _ARRAY = "moc.tensor", "moc.array"


class PositionError(UserError, ValueError):
    """Data without a position; the message has the remedy."""


@runtime_checkable
class Stateful(Protocol):
    """An object with a state; torch's and torchdata's protocol."""

    def state_dict(self) -> Any:
        """Returns the state."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores a state."""
        ...


def derived_seed(seed: int, *position: int) -> int:
    """Returns a seed that depends on a position: iteration, rank, and so on."""
    return xxhash.xxh3_64_intdigest(repr((seed, *position)).encode()) >> 1


def set_seed(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch.

    ``torch.manual_seed`` would record a stack trace for each call while CUDA is not initialized: 1 ms.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        return 0


def _positions(position: int) -> Iterable[int]:
    return itertools.count(position)


class Batches:
    """Batches of one worker, in order.

    Args:
        data: one of the kinds above.
        seed: seed of the order of samples, and of random numbers in a data set.
        rank: data-parallel rank of this worker.

    Raises:
        PositionError: the data have no position.
    """

    def __init__(self, data: Any, seed: int, rank: int):
        data = _positions if data is None else data
        self._data, self._seed, self._rank = data, seed, rank
        self._first_state = None
        self._iterator: Iterator | None = None
        self._position = 0
        self.is_stateful = isinstance(data, Stateful) and isinstance(data, Iterable)
        if self.is_stateful:
            self._first_state = data.state_dict()
            loader: Any = data
            if getattr(data, "num_workers", 0):
                loader.worker_init_fn = functools.partial(begin_reader, getattr(data, "worker_init_fn", None))
            return
        is_iterable_set = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
        is_known = isinstance(data, DataLoader | Sampler | list | tuple) or callable(data)
        if is_iterable_set or not is_known or isinstance(data, type):
            kind = data if isinstance(data, type) else type(data)
            raise PositionError(
                f"data of {kind.__name__} have no position, so a replacement could not read the same batches. "
                "Fix: give a DataLoader of a map-style data set, a loader with state_dict and load_state_dict, or a "
                "function that returns the batches from a position on",
                code="data-without-position",
            )
        if not callable(data) and not _length(data):
            raise PositionError(
                "data have no batches, or no length. Fix: give at least one batch, and a sampler with a length",
                code="data-without-position",
            )

    @property
    def epoch(self) -> int:
        """Number of batches of an epoch.

        Raises:
            SettingsError: it is unknown.
        """
        try:
            return len(self._data)
        except TypeError:
            raise SettingsError(
                "the data have no length. Fix: give iterations to protect()", code="setting-invalid"
            ) from None

    def begin(self, position: int, state: Any = None) -> None:
        """Moves to a position; ``state`` is this worker's state there, of stateful data."""
        self._position, self._iterator = position, None
        if self.is_stateful:
            self._data.load_state_dict(self._first_state if state is None else state)

    def state(self) -> Any:
        """Returns this worker's state of stateful data; None otherwise."""
        return self._data.state_dict() if self.is_stateful else None

    def take(self) -> Any:
        """Returns the next batch; random numbers that the data draw here follow from the position.

        Raises:
            PositionError: there is none.
        """
        set_seed(derived_seed(self._seed, self._position, self._rank))
        for _ in range(2):  # an iterator may end with its epoch
            if self._iterator is None:
                self._iterator = iter(self._from(self._position))
            for batch in self._iterator:
                self._position += 1
                return batch
            self._iterator = None
        raise PositionError(
            f"data have no batch at position {self._position}. Fix: let the function return batches from each "
            "position on, or train for fewer iterations",
            code="data-without-position",
        )

    def _from(self, position: int) -> Iterable:
        data: Any = self._data
        if self.is_stateful:
            return data
        if isinstance(data, list | tuple):
            return itertools.islice(data, position % len(data), None)
        if not isinstance(data, DataLoader | Sampler):
            return data(position)
        epoch, offset = divmod(position, _length(data))
        if isinstance(data, Sampler):
            return self._epoch_of([getattr(data, "sampler", None), data], data, epoch)[offset:]
        return self._loader(data, epoch, offset)

    def _epoch_of(self, objects: Sequence[Any], order: Iterable, epoch: int) -> list:
        """Returns an order of samples, after telling all objects the epoch and seeding all generators."""
        seed = derived_seed(self._seed, epoch, self._rank)
        for source in objects:
            if (set_epoch := getattr(source, "set_epoch", None)) is not None:
                set_epoch(epoch)
            if isinstance(generator := getattr(source, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        set_seed(seed)
        return list(order)

    def _loader(self, loader: DataLoader, epoch: int, offset: int) -> DataLoader:
        """Returns a loader of the rest of an epoch, with the workers and functions of the given one."""
        batch_sampler, sampler = loader.batch_sampler, loader.sampler
        objects = [loader.dataset, sampler, batch_sampler]
        keys = self._epoch_of(objects, sampler if batch_sampler is None else batch_sampler, epoch)
        seeded: Any = _SeededDataset(loader.dataset, derived_seed(self._seed, epoch, self._rank))
        remaining = [
            [(offset + number, place, index) for place, index in enumerate(key)]
            if batch_sampler is not None
            else (offset + number, 0, key)
            for number, key in enumerate(keys[offset:])
        ]
        order: dict[str, Any] = (
            {"batch_sampler": remaining} if batch_sampler is not None else {"sampler": remaining, "batch_size": None}
        )
        return reordered(loader, seeded, **order)


def reordered(loader: DataLoader, dataset: Any, **order: Any) -> DataLoader:
    """Returns a loader of a data set in another order, with the options of an existing loader.

    Args:
        loader: loader whose options are used.
        dataset: data set of the new loader.
        order: ``batch_sampler``, or ``sampler`` and ``batch_size``, as for ``DataLoader``.
    """
    if loader.num_workers:
        order["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(
        dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(begin_reader, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
    )


class _SeededDataset:
    """A data set whose random numbers depend on the position of the batch and the sample's place in it."""

    def __init__(self, dataset: Any, seed: int):
        self._dataset, self._seed = dataset, seed
        if hasattr(dataset, "__getitems__"):
            self.__getitems__: Callable = self._get_items

    def __getitem__(self, key: tuple[int, int, Any]) -> Any:
        position, place, index = key
        set_seed(derived_seed(self._seed, position, place))
        return self._dataset[index]

    def _get_items(self, keys: Sequence[tuple[int, int, Any]]) -> Any:
        set_seed(derived_seed(self._seed, keys[0][0]))
        return self._dataset.__getitems__([index for _, _, index in keys])


class DealtBatches:
    """Batches of one worker: all workers have the same order of batches, and each takes every ``size``-th.

    Args:
        batches: sampler of the batches of all workers.
        seed: seed of their order.
        rank: data-parallel rank of this worker.
        size: number of workers that read different batches.
        accumulate: batches of an iteration; batches of an epoch that do not make up an iteration are left out.
    """

    def __init__(self, batches: Sampler, seed: int, rank: int, size: int, accumulate: int = 1):
        self._batches, self._seed, self._rank, self._size, self._epoch = batches, seed, rank, size, 0
        self._accumulate = accumulate

    def __len__(self) -> int:
        """Returns the batches of this worker in an epoch."""
        batches: Any = self._batches
        return len(batches) // (self._size * self._accumulate) * self._accumulate

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator:
        """Yields the batches of this worker."""
        seed = derived_seed(self._seed, self._epoch)
        for source in (self._batches, getattr(self._batches, "sampler", None)):
            if (set_epoch := getattr(source, "set_epoch", None)) is not None:
                set_epoch(self._epoch)
            if isinstance(generator := getattr(source, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        set_seed(seed)
        yield from itertools.islice(self._batches, self._rank, len(self) * self._size, self._size)


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
        return {key: _to_plain(item) for key, item in value.items()}
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
        return {key: _from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_from_plain, value))
    return value
