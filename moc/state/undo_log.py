"""Undo log of an iteration: restores the mutable state of modules after the iteration is discarded.

Forward and backward change more than gradients: router counts, running statistics, FP8 scales, counters of user
modules.  The log records these values before an iteration, and restores them if the iteration is not committed.
Parameters and gradients are excluded: an update changes the former after the commit, and each iteration clears the
latter before it starts.

The first iterations record every value.  Later ones record only the values that have changed so far, so caches such as
rotary embeddings are not copied in each iteration.  A part of the other values is checked before each iteration.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

from moc.errors import UserError
from moc.state.module_bytes import flat_bytes

FULL_RECORDS = 2
"""Iterations that record every value."""
SCANS = 128
"""Number of iterations that check every other value once for a first change."""
_LONGEST = 1024
"""Containers with more entries are data rather than state, and are not recorded."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, numpy.generic)
_OPAQUE = ("transformer_engine.",)
"""Packages whose modules keep interdependent flags and registrations: none of their attributes is restored."""
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))  # `training` and the registries of parameters and hooks

Holder = Callable[[], Any]
"""Returns a global object that collects values during an iteration, such as a tracker of losses."""


class UntrackedChangeError(UserError, RuntimeError):
    """A discarded iteration was the first to change a value, and no copy of the old value exists."""

    code = "untracked-change"


class Location(NamedTuple):
    """Location of a value: a dictionary of a module, and a key."""

    owner: MutableMapping[str, Any]
    key: str

    @property
    def id(self) -> tuple[int, str]:
        """A hashable identifier."""
        return id(self.owner), self.key

    @property
    def value(self) -> Any:
        """The current value."""
        return self.owner[self.key]


@dataclass(eq=False)
class SavedValue:
    """The record of a value: the object and its content.

    Attributes:
        value: the object itself.
        content: a copy of its content; None for immutable values, and for tensors that are not copied.
        parts: records of the values inside, by key, position or attribute.
        version: torch's counter of changes in place, for tensors.
    """

    value: Any
    content: Any = None
    parts: dict[Any, SavedValue] = field(default_factory=dict)
    version: int = 0

    @property
    def was_changed_in_place(self) -> bool:
        """Whether the content of the recorded object has changed; True for values that are not tensors."""
        value = self.value
        if not isinstance(value, torch.Tensor):
            return True
        if value._version != self.version:
            return True
        return self.content is not None and not _equal(value, self.content)


def is_state(value: Any) -> bool:
    """Return whether an attribute may be state: tensor, number, text, generator, array, or small container of these."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
        return plain and not value.is_inference()
    if isinstance(value, (torch.Generator, numpy.ndarray, *_NUMBERS)):
        return True
    if isinstance(value, (dict, list, tuple, set, collections.deque)) and len(value) <= _LONGEST:
        return all(map(is_state, value.values() if isinstance(value, dict) else value))
    return False


def locations(modules: Iterable[torch.nn.Module]) -> Iterator[Location]:
    """Yield the locations of the modules' own state: each buffer, and each attribute that may be state.

    A class lists attributes that the runtime sets between iterations in ``not_module_state``.
    """
    for module in modules:
        skipped = _skipped(type(module))
        for name, buffer in module._buffers.items():
            if is_state(buffer):
                yield Location(module._buffers, name)
        for name, value in vars(module).items():
            if name not in skipped and is_state(value):
                yield Location(vars(module), name)


@functools.cache
def _skipped(kind: type) -> frozenset[str]:
    """Return names that are not state: attributes of every module, of opaque packages, and of the class's list."""
    opaque = (base for base in kind.__mro__ if base.__module__.startswith(_OPAQUE) and "__init__" in vars(base))
    named = {name for base in opaque for name in base.__init__.__code__.co_names}
    return _OF_EVERY_MODULE | getattr(kind, "not_module_state", frozenset()) | named


def record(value: Any, copies: bool = True, is_holder: bool = False) -> SavedValue:
    """Record a value; for a holder, also the attributes of its nested objects."""
    if isinstance(value, torch.Tensor):
        return SavedValue(value, value.detach().clone() if copies else None, version=value._version)
    if isinstance(value, torch.Generator):
        return SavedValue(value, value.get_state())
    if isinstance(value, numpy.ndarray):
        return SavedValue(value, value.copy())
    if isinstance(value, (set, collections.deque)):
        return SavedValue(value, list(value))
    parts = {key: record(part, copies, is_holder and _is_object(part)) for key, part in _parts(value, is_holder)}
    return SavedValue(value, parts=parts)


def _parts(value: Any, is_holder: bool = False) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif is_holder:
        yield from ((name, part) for name, part in vars(value).items() if is_state(part) or isinstance(part, dict))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) or dataclasses.is_dataclass(value)


def _restore(saved: SavedValue) -> Any:
    """Restore the content of a recorded value, and return the value."""
    value = saved.value
    if isinstance(value, torch.Tensor):
        if saved.was_changed_in_place:
            if saved.content is None:
                raise UntrackedChangeError
            value.detach().copy_(saved.content)
    elif isinstance(value, torch.Generator):
        value.set_state(saved.content)
    elif isinstance(value, numpy.ndarray):
        if value.flags.writeable:
            value[...] = saved.content
    elif isinstance(value, (set, collections.deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(saved.content)
    elif isinstance(value, list):
        value[:] = [_restore(part) for part in saved.parts.values()]
    elif isinstance(value, dict):
        for key in [key for key in value if key not in saved.parts]:
            del value[key]
        value.update({key: _restore(part) for key, part in saved.parts.items()})
    elif isinstance(value, tuple):
        for part in saved.parts.values():
            _restore(part)
    else:
        for name, part in saved.parts.items():
            setattr(value, name, _restore(part))
    return value


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same bits."""
    return torch.equal(flat_bytes(first), flat_bytes(second))


def differs(saved: SavedValue, value: Any) -> bool:
    """Return whether a value differs from its record; tensors without a copy are compared by their version counter."""
    if value is not saved.value:
        is_same_number = type(value) is type(saved.value) and isinstance(value, _NUMBERS)
        return not (is_same_number and repr(value) == repr(saved.value))
    if isinstance(value, torch.Tensor):
        return saved.was_changed_in_place
    if isinstance(value, torch.Generator):
        return not torch.equal(value.get_state(), saved.content)
    if isinstance(value, numpy.ndarray):
        return value.tobytes() != saved.content.tobytes()
    if isinstance(value, (set, collections.deque)):
        return list(value) != saved.content
    current_parts = dict(_parts(value))
    return current_parts.keys() != saved.parts.keys() or any(
        differs(saved.parts[key], part) for key, part in current_parts.items()
    )


class UndoLog:
    """Records values before an iteration, and restores them unless the iteration is committed.

    An interrupted worker may hold the reduced gradients of the iteration, so that it may still be completed:
    :meth:`suspend` restores the state before it, and keeps the values after it until :meth:`commit`, :meth:`begin` or
    :meth:`forget`.

    Args:
        modules: bare modules, without wrappers that hold gradients.
        holders: global objects that collect values in an iteration.
        excluded: tensors that the caller restores.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        holders: Iterable[Holder] = (),
        excluded: Iterable[torch.Tensor] = (),
    ):
        self._modules, self._holders = list(modules), list(holders)
        self._excluded = {id(tensor) for tensor in excluded}
        self._commits, self._slices = 0, itertools.cycle(range(SCANS))
        self._recorded: dict[tuple[int, str], SavedValue] = {}  # every value when it was last checked, without copies
        self._changing: dict[tuple[int, str], Location] = {}
        self._in_place: set[tuple[int, str]] = set()  # changing tensors that need copies
        self._copies: dict[tuple[int, str], torch.Tensor] = {}  # memory for these, reused in each iteration
        self._before: dict[tuple[int, str], tuple[Location, SavedValue]] | None = None
        self._of_holders: list[SavedValue] = []
        self._after: list[tuple[Location, SavedValue]] = []
        self._is_full = True

    @property
    def changing(self) -> list[Location]:
        """Locations of values that an iteration has changed so far."""
        return list(self._changing.values())

    def begin(self, full: bool = False) -> None:
        """Record the values before an iteration, and discard the previous one unless it was committed.

        Args:
            full: record every value, including values that have not changed so far.
        """
        self.discard()
        self._after = []
        self._is_full = full or self._commits < FULL_RECORDS
        if self._is_full:
            self._before = {
                location.id: (location, record(location.value)) for location in self._locations(self._modules)
            }
        else:
            self._scan(self._modules[next(self._slices) :: SCANS])
            self._before = self._record_changing()
        self._of_holders = [record(holder(), is_holder=True) for holder in self._holders]

    def commit(self) -> None:
        """Keep the values of the iteration, including a suspended one."""
        for location, saved in self._after:
            location.owner[location.key] = _restore(saved)
        self._after = []
        if self._before is None:
            return
        if self._is_full:
            self._note_changes(self._before)
        self._commits, self._before = self._commits + 1, None

    def discard(self) -> None:
        """Restore the values before the iteration, and remove values that appeared in it.

        Raises:
            UntrackedChangeError: the iteration is the first to change a value, and is not among the first iterations.
        """
        if self._before is None:
            return
        before, self._before = self._before, None
        for location in list(self._locations(self._modules)):
            if location.id not in before:
                self._remove_or_refuse(location)
        for location, saved in before.values():
            try:
                location.owner[location.key] = _restore(saved)
            except UntrackedChangeError:
                raise self._untracked(location) from None
            if location.id in self._recorded:
                self._recorded[location.id] = record(location.value, copies=False)
        for saved in self._of_holders:
            _restore(saved)

    def suspend(self) -> None:
        """Discard the iteration, but keep its values for a later commit; does nothing between iterations."""
        if self._before is None:
            return
        after = self._locations(self._modules) if self._is_full else self.changing
        kept = [(location, record(location.value)) for location in after if location.key in location.owner]
        self.discard()
        self._after = kept

    def forget(self) -> None:
        """Drop the values of a suspended iteration, because the state was loaded from elsewhere."""
        self._after = []

    def _locations(self, modules: Iterable[torch.nn.Module]) -> Iterator[Location]:
        return (location for location in locations(modules) if id(location.value) not in self._excluded)

    def _record_changing(self) -> dict[tuple[int, str], tuple[Location, SavedValue]]:
        """Record the changing values; tensors are copied together, which on a GPU is one launch for each dtype."""
        before, batches = {}, collections.defaultdict(lambda: ([], []))
        for name, location in self._changing.items():
            if location.key not in location.owner:
                continue
            value = location.value
            if isinstance(value, torch.Tensor):
                saved = record(value, copies=False)
                if name in self._in_place:
                    saved.content = self._memory(name, value)
                    copies, values = batches[value.dtype, value.device]
                    copies.append(saved.content)
                    values.append(value.detach())
            else:
                saved = record(value)
            before[name] = location, saved
        for copies, values in batches.values():
            torch._foreach_copy_(copies, values)  # pyright: ignore[reportPrivateImportUsage]  # no other
        return before

    def _memory(self, name: tuple[int, str], like: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (like.shape, like.dtype, like.device):
            copy = self._copies[name] = torch.empty_like(like, requires_grad=False)
        return copy

    def _note_changes(self, before: dict[tuple[int, str], tuple[Location, SavedValue]]) -> None:
        """Add the values that have changed or appeared in the iteration."""
        for location in self._locations(self._modules):
            _, saved = before.get(location.id, (location, None))
            if saved is None or differs(saved, location.value):
                self._changing[location.id] = location
                if saved is not None and saved.was_changed_in_place:
                    self._in_place.add(location.id)
            self._recorded[location.id] = record(location.value, copies=False)

    def _scan(self, modules: Iterable[torch.nn.Module]) -> None:
        """Add the values of these modules that have changed or appeared since they were checked last."""
        for location in self._locations(modules):
            if location.id not in self._changing:
                recorded = self._recorded.get(location.id)
                if recorded is None or differs(recorded, location.value):
                    self._changing[location.id] = location
                    self._in_place.add(location.id)

    def _remove_or_refuse(self, location: Location) -> None:
        """Remove a value that appeared in the iteration; refuse one that was not recorded and has changed."""
        if self._is_full or location.id in self._changing:
            del location.owner[location.key]
        elif location.id not in self._recorded or differs(self._recorded[location.id], location.value):
            raise self._untracked(location)

    def _untracked(self, location: Location) -> UntrackedChangeError:
        kinds = (type(m).__name__ for m in self._modules if location.owner is m._buffers or location.owner is vars(m))
        return UntrackedChangeError(
            f"{next(kinds, 'a module')}.{location.key} changed for the first time in an iteration that is discarded, "
            "and no copy of its old value exists: this worker ends, and its replacement loads a snapshot. Fix: none is "
            "needed; register the value as a buffer to keep the worker"
        )
