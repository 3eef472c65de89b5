"""Reads ``torch_dist`` checkpoints of others without running what is in them.

torch unpickles ``.metadata``, and objects beside the tensors; a pickle may call any function.  Inside
:func:`nothing_runs`, only the types that ``.metadata`` needs are unpickled, objects only as ``weights_only`` allows,
and no file outside the checkpoint is opened.  Hashes in a manifest do not help here: whoever makes a pickle can make
the manifest to it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from moc import private_interfaces
from moc.errors import code_of
from moc.files import tree
from moc.files.text import shown
from moc.files.tree import Tree
from moc.store.errors import CheckpointError

_NEEDED = {
    "torch.distributed.checkpoint.metadata": """
        BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
        TensorStorageMetadata _MEM_FORMAT_ENCODING
    """,
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath",
}
_ALLOWED = {(module, name) for module, names in _NEEDED.items() for name in names.split()}
_ALLOWED |= {("torch", name) for name, each in vars(torch).items() if isinstance(each, torch.dtype)}

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_CHANGES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_CONTAINERS = {"EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "EMPTY_SET"}
_MOST_STEPS = 256
_MOST_NUMBER = 1 << 60
_LEAST_OPERATIONS, _BYTES_OF_OPERATION = 1000, 1.5

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable of torch: ``torch.load`` is ``weights_only``, whatever its caller says."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 calls it
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f".metadata asks for {ascii(module)[1:-1]}.{ascii(name)[1:-1]}, which no torch_dist checkpoint needs "
                "and which could run any code. Fix: use a checkpoint from a source that you trust",
                code="metadata-refused",
            )
        return super().find_class(module, name)


class _Pickle:
    """In place of the module ``pickle``, where torch reads ``.metadata``."""

    def load(self, file, **_) -> Any:
        try:
            data = file.read()
            _check_cost(data)
            read = _Unpickler(io.BytesIO(data)).load()
            _check_paths(read)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(
                f".metadata cannot be read as torch_dist ({type(error).__name__}: {error}). Fix: use another "
                "checkpoint of format torch_dist",
                code="checkpoint-damaged",
            ) from None
        return read

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


class _Node:
    """An object that a pickle makes.

    Attributes:
        steps: steps that its hash takes; those of a list or a dict, which have none, count as one.
        inner: sum of the steps of its elements.
        shared: the pickle has used the object a second time.
    """

    __slots__ = ("inner", "shared", "steps")

    def __init__(self, steps: int, inner: int = 0):
        self.steps, self.inner, self.shared = 0, inner, False
        self.grow(steps)

    def grow(self, steps: int) -> None:
        """Adds steps; raises CheckpointError if they are too many."""
        self.steps += steps
        if self.steps > _MOST_STEPS:
            raise CheckpointError(
                f".metadata has an object whose hash takes more than {_MOST_STEPS} steps. Fix: use a checkpoint from "
                "a source that you trust",
                code="metadata-refused",
            )


def _check_cost(data: bytes) -> None:
    """Checks that unpickling takes linear time and memory, by following the pickle's stack without making objects.

    A tuple that holds the one before twice, 60 levels deep, has a hash of 2^60 steps.  Numbers that are negative or
    large may have equal hashes, and slow down dicts.  Python makes room for the largest number that an object is
    remembered by.

    Raises:
        CheckpointError: it may take more.
        Exception: the pickle is damaged.
    """
    stack: list[_Node | None] = []  # None is a mark
    memo: dict[Any, _Node | None] = {}
    atom = _Node(1)

    def popped(operation) -> list[_Node]:
        if operation.stack_before[-1:] != [pickletools.stackslice]:
            count = sum(one is not pickletools.markobject for one in operation.stack_before)
            found = stack[len(stack) - count :]
            del stack[len(stack) - count :]
        else:
            found = []
            while (top := stack.pop()) is not None:
                found.append(top)
            if operation.stack_before[0] is not pickletools.markobject:
                found.append(stack.pop())
            found.reverse()
        return [one for one in found if one is not None]

    for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if number > _LEAST_OPERATIONS + len(data) / _BYTES_OF_OPERATION:
            raise CheckpointError(
                ".metadata has more operations than torch_dist checkpoints have. Fix: use a checkpoint from a source "
                "that you trust",
                code="metadata-refused",
            )
        name = operation.name
        if name in _PUTS:
            place = len(memo) if argument is None else argument
            if place > len(data):
                raise CheckpointError(
                    f".metadata numbers an object {place}, and is of {len(data)} bytes. Fix: use a checkpoint from a "
                    "source that you trust",
                    code="metadata-refused",
                )
            memo[place] = stack[-1]
        elif name in _GETS or name == "DUP":
            node = stack[-1] if name == "DUP" else memo[argument]
            if node is not None:
                node.shared = True
            stack.append(node)
        elif name == "MARK":
            stack.append(None)
        elif name in _CHANGES:
            target, *added = popped(operation)
            if name != "BUILD":
                target.inner += sum(one.steps for one in added)
            elif target.shared:
                raise CheckpointError(
                    ".metadata changes an object after its use. Fix: use a checkpoint from a source that you trust",
                    code="metadata-refused",
                )
            else:
                target.grow(sum(one.inner or one.steps for one in added))
            stack.append(target)
        elif operation.stack_after:
            parts = popped(operation)
            inner = sum(one.steps for one in parts)
            if name in _CONTAINERS:
                stack.append(_Node(1, inner))
            elif parts:
                stack.append(_Node(1 + inner, sum(one.inner or one.steps for one in parts)))
            else:
                if type(argument) is int and not 0 <= argument < _MOST_NUMBER:
                    raise CheckpointError(
                        f".metadata has the number {shown(argument)}, which no size can be. Fix: use a checkpoint "
                        "from a source that you trust",
                        code="metadata-refused",
                    )
                stack.append(atom)
        elif operation.stack_before:
            popped(operation)


def _check_paths(metadata: Any) -> None:
    if not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(
            ".metadata describes no tensors by name, as torch_dist checkpoints do. Fix: use a checkpoint of format "
            "torch_dist",
            code="metadata-refused",
        )
    for stored in (metadata.storage_data or {}).values():
        name = stored.relative_path
        if not isinstance(name, str) or not name or PurePath(name).name != name or name == "..":
            raise CheckpointError(
                f".metadata names the file {name!r}, which is not in the checkpoint's directory. Fix: use a "
                "checkpoint from a source that you trust",
                code="metadata-refused",
            )
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(
                f".metadata describes {name} as compressed, which torch_dist checkpoints are not. Fix: use a "
                "checkpoint of format torch_dist",
                code="metadata-refused",
            )


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Inside, torch and megatron-core read checkpoints, and unpickle nothing that could run code.

    Raises:
        CheckpointError: from torch's reader, which may wrap it; :func:`check_metadata` raises it before.  Also if torch
            reads ``.metadata`` in another way than this context changes.
    """
    for mismatch in private_interfaces.check({"reading checkpoints"}):
        raise CheckpointError(str(mismatch), code="release-unknown")
    torchs: Any = filesystem  # which declares no such thing as its module pickle
    before, forced = torchs.pickle, os.environ.get(_WEIGHTS_ONLY)
    torchs.pickle = _Pickle()
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        torchs.pickle = before
        if forced is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = forced


def check_metadata(directory: Path) -> list[str]:
    """Returns the keys in the ``.metadata`` of a checkpoint; none if there is no such file.

    Raises:
        CheckpointError: it is none, could run code, or there is a link or a special file in the directory.
    """
    try:
        return list(read_metadata(directory).state_dict_metadata)
    except FileNotFoundError:
        return []  # another format: megatron-core says what it misses


def read_metadata(directory: Path) -> Any:
    """The content of ``.metadata``, torch's class ``Metadata``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is none, could run code, or there is a link or a special file in the directory.
    """
    if others := Tree(directory).refused():
        raise CheckpointError(
            f"{directory / others[0]} is no regular file and no directory. Fix: remove it",
            code="file-refused",
        )
    try:
        return _Pickle().load(io.BytesIO(Tree(directory).read(".metadata", tree.METADATA)))
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/{error}", code=code_of(error)) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{directory / '.metadata'} cannot be read ({error.strerror}). Fix: correct its permissions, or use "
            "another checkpoint",
            code="checkpoint-unreadable",
        ) from None
