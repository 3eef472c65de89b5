"""Reads untrusted ``torch_dist`` checkpoints without running code from them.

torch unpickles ``.metadata``, and objects that are stored with the tensors; a pickle may call any function.  Inside
:func:`restricted_unpickling`, only the types that ``.metadata`` needs are unpickled, objects only as ``weights_only``
allows, and no file outside the checkpoint is opened.  Hashes in a manifest do not help here: the author of a malicious
pickle can also write a matching manifest.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from moc import private_interfaces
from moc.errors import code_of
from moc.files import decode, safe_directory
from moc.files.decode import Count, Name, short_repr
from moc.files.safe_directory import SafeDirectory
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
_MAX_STEPS = 256
_MAX_NUMBER = 1 << 60
_MAX_STEPS_OF_FLAGS = 1 << 16  # an object in common.pt has all flags of a run
_MAX_STACK = 1 << 16  # a pickle writes containers in groups of a thousand elements
_MIN_HASHED, _HASHED_OF_BYTE = 1_000_000, 16
_MIN_OPERATIONS, _BYTES_OF_OPERATION = 1000, 1.5

_CONFIG = "metadata.json"
"""Name of the file that identifies megatron-core's checkpoint directories."""
_DTYPES = {
    "BFloat16Storage": torch.bfloat16, "BoolStorage": torch.bool, "ByteStorage": torch.uint8,
    "CharStorage": torch.int8, "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "IntStorage": torch.int32, "LongStorage": torch.int64, "ShortStorage": torch.int16,
}  # fmt: skip
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable of torch that forces ``weights_only`` for ``torch.load``, overriding its caller."""


@dataclass(frozen=True)
class _Format:
    """Content of :data:`_CONFIG` that megatron-core uses: the format of the tensors."""

    sharded_backend: Name
    sharded_backend_version: Count = 1


class _UntrustedError(CheckpointError):
    code = "metadata-refused"
    remedy = "use a checkpoint from a source that you trust"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # the module's name in Python 3.13
        if (module, name) not in _ALLOWED:
            raise _UntrustedError(
                f".metadata asks for {ascii(module)[1:-1]}.{ascii(name)[1:-1]}, which no torch_dist "
                "checkpoint needs and which could run any code"
            )
        return super().find_class(module, name)


class _Pickle:
    """Replacement of the module ``pickle`` where torch reads ``.metadata``."""

    def load(self, file, **_) -> Any:
        try:
            data = file.read()
            _check_cost(data)
            read = _Unpickler(io.BytesIO(data)).load()
            _check_paths(read)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise any exception
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
        steps: number of steps to compute its hash; a list or a dict, which has no hash, counts as one.
        inner: sum of the steps of its elements.
        shared: the pickle has used the object a second time.
        has_invalid_size: it is, or contains, a number that is invalid as a size.

    Args:
        max_steps: largest number of steps.
    """

    __slots__ = ("has_invalid_size", "inner", "max_steps", "shared", "steps")

    def __init__(self, steps: int, max_steps: int, inner: int = 0):
        self.steps, self.inner, self.shared, self.has_invalid_size, self.max_steps = 0, inner, False, False, max_steps
        self.grow(steps)

    def grow(self, steps: int) -> None:
        """Adds steps; raises CheckpointError if they are too many."""
        self.steps += steps
        if self.steps > self.max_steps:
            raise _UntrustedError(f".metadata has an object whose hash takes more than {self.max_steps} steps")


class _CostCheck:
    """Follows a pickle's stack without making objects, and counts what unpickling would cost; see :func:`_check_cost`.

    Attributes:
        stack: objects on the stack; None is a mark.
        memo: objects by their number in the pickle.
        hashed: sum of the steps of the hashes of all keys.
    """

    def __init__(self, nbytes: int, most_steps: int, any_number: bool):
        self._nbytes, self._most_steps, self._any_number = nbytes, most_steps, any_number
        self.stack: list[_Node | None] = []
        self.memo: dict[Any, _Node | None] = {}
        self.hashed = 0
        self._atom, self._invalid_size = _Node(1, most_steps), _Node(1, most_steps)
        self._invalid_size.has_invalid_size = True

    def apply(self, operation: Any, argument: Any) -> None:
        """Follows one operation of :mod:`pickletools`."""
        name = operation.name
        if len(self.stack) > _MAX_STACK:
            raise _UntrustedError(".metadata has more objects in one another than torch_dist checkpoints have")
        if name in ("POP", "POP_MARK"):  # which a pickle has only for a tuple that contains itself
            raise _UntrustedError(".metadata drops an object, which no torch_dist checkpoint does")
        if name in _PUTS:
            index = len(self.memo) if argument is None else argument
            if index > self._nbytes:
                raise _UntrustedError(f".metadata numbers an object {index}, and is of {self._nbytes} bytes")
            self.memo[index] = self.stack[-1]
        elif name in _GETS or name == "DUP":
            node = self.stack[-1] if name == "DUP" else self.memo[argument]
            if node is not None:
                node.shared = True
            self.stack.append(node)
        elif name == "MARK":
            self.stack.append(None)
        elif name in _CHANGES:
            self._change(name, *self._pop(operation))
        elif operation.stack_after:
            self.stack.append(self._made(name, self._pop(operation), argument))
        elif operation.stack_before:
            self._pop(operation)

    def _change(self, name: str, target: _Node, *added: _Node) -> None:
        """Adds elements or attributes to an object, which stays on the stack."""
        keys = {"SETITEM": added[::2], "SETITEMS": added[::2], "ADDITEMS": added}.get(name, ())
        self.hashed += sum(key.steps for key in keys)
        if self.hashed > _MIN_HASHED + _HASHED_OF_BYTE * self._nbytes:
            raise _UntrustedError(".metadata has keys whose hashes take long")
        if any(key.has_invalid_size for key in keys):
            raise _UntrustedError(".metadata has a number as a key that no size can be")
        if name != "BUILD":
            target.inner += sum(element.steps for element in added)
        elif target.shared:
            raise _UntrustedError(".metadata changes an object after its use")
        else:
            target.grow(sum(element.inner or element.steps for element in added))
        self.stack.append(target)

    def _made(self, name: str, parts: list[_Node], argument: Any) -> _Node:
        """Returns the object that an operation makes of the parts that it has taken from the stack."""
        inner = sum(part.steps for part in parts)
        if name == "DICT":
            raise _UntrustedError(".metadata makes a dict in a way that torch_dist checkpoints do not")
        if name in _CONTAINERS:
            return _Node(1, self._most_steps, inner)
        if parts:
            node = _Node(1 + inner, self._most_steps, sum(part.inner or part.steps for part in parts))
            node.has_invalid_size = any(part.has_invalid_size for part in parts)
            return node
        is_invalid_size = type(argument) is int and not 0 <= argument < _MAX_NUMBER
        if is_invalid_size and not self._any_number:
            raise _UntrustedError(f".metadata has the number {short_repr(argument)}, which no size can be")
        return self._invalid_size if is_invalid_size else self._atom

    def _pop(self, operation: Any) -> list[_Node]:
        """Takes the operands of an operation from the stack."""
        stack = self.stack
        if operation.stack_before[-1:] != [pickletools.stackslice]:
            count = sum(kind is not pickletools.markobject for kind in operation.stack_before)
            operands = stack[len(stack) - count :]
            del stack[len(stack) - count :]
        else:
            operands = []
            while (top := stack.pop()) is not None:
                operands.append(top)
            if operation.stack_before[0] is not pickletools.markobject:
                operands.append(stack.pop())
            operands.reverse()
        return [operand for operand in operands if operand is not None]


def _check_cost(data: bytes, most_steps: int = _MAX_STEPS, any_number: bool = False) -> None:
    """Checks that unpickling takes linear time and memory.

    A tuple that contains the previous one twice, 60 levels deep, has a hash of 2^60 steps.  Negative or large numbers
    may have equal hashes, and slow down dicts.  Python allocates the memo for the largest number in it.

    Args:
        data: the pickle.
        most_steps: maximum number of steps of the hash of an object.
        any_number: accept numbers that are invalid as sizes, except as keys.

    Raises:
        CheckpointError: unpickling may take more.
        Exception: the pickle is damaged.
    """
    check = _CostCheck(len(data), most_steps, any_number)
    for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
        if number > _MIN_OPERATIONS + len(data) / _BYTES_OF_OPERATION:
            raise _UntrustedError(".metadata has more operations than torch_dist checkpoints have")
        check.apply(operation, argument)


class _Described:
    """Stand-in for any object that a pickle of tensors makes; its methods do nothing."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Does nothing; a pickle calls it on lists."""

    def __call__(self, *_, **__) -> _Described:
        return self


class _Storages(pickle.Unpickler):
    """Finds the storages that a pickle of tensors needs; makes only plain values and stand-ins.

    Attributes:
        needed: bytes of the storage, by record.
    """

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))
        self.needed: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name == "bytearray":
            raise _UntrustedError("has an array of bytes, which no torch_dist checkpoint needs")
        return type(name, (_Described,), {})

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, record, _, count = pid
        dtype = _DTYPES.get(storage.__name__, torch.uint8)  # untyped storages count bytes
        if kind != "storage" or type(count) is not int or count < 0:
            raise ValueError("its storages are not of torch")
        self.needed[record] = max(count * dtype.itemsize, self.needed.get(record, 0))
        return _Described()


class _Part:
    """The rest of a stream, read in chunks of bounded size.

    Torch's own view of a part of a file cannot seek from its end.
    """

    def __init__(self, stream: Any):
        self._stream, self._begin, self._at = stream, stream.tell(), 0
        self.size = stream.seek(0, os.SEEK_END) and stream.tell() - self._begin

    def seekable(self) -> bool:
        """Always True."""
        return True

    def tell(self) -> int:
        """Returns the position in the part."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position in the part."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if self._at < 0:
            raise OSError("a position before the start")
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Reads up to ``size`` bytes, or to the end; raises CheckpointError if that is too much at a time."""
        remaining = max(0, self.size - self._at)
        size = remaining if size < 0 else min(size, remaining)
        if size > safe_directory.MAX_MANIFEST_BYTES:
            raise _UntrustedError(
                f"has a list of records of {size} bytes, more than {safe_directory.MAX_MANIFEST_BYTES}"
            )
        self._stream.seek(self._begin + self._at)
        data = b""
        while len(data) < size and (chunk := self._stream.read(size - len(data))):
            data += chunk
        self._at += len(data)
        return data


def _check_saved(stream: Any) -> None:
    """Checks that torch reads a file of ``torch.save`` in bounded memory and time, and reads no other memory.

    Torch expands compressed records, and does not check the sizes of storages in the pickle.

    Raises:
        CheckpointError: reading may take more, or the file is damaged.
    """
    begin = stream.tell()
    try:
        part = _Part(stream)
        with zipfile.ZipFile(part) as archive:
            records = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in records):
                raise _UntrustedError("has compressed records, which torch does not write")
            if sum(entry.file_size for entry in records) > part.size:
                raise _UntrustedError("has records that are larger than the file")
            sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in records}
            for entry in records:
                if entry.filename.endswith(".pkl"):
                    if entry.file_size > safe_directory.MAX_MANIFEST_BYTES:
                        raise _UntrustedError(
                            f"has {entry.file_size} bytes of objects, more than {safe_directory.MAX_MANIFEST_BYTES}"
                        )
                    data = archive.read(entry)
                    _check_cost(data, _MAX_STEPS_OF_FLAGS, any_number=True)
                    storages = _Storages(data)
                    storages.load()
                    for record, needed in storages.needed.items():
                        if sizes[f"data/{record}"] < needed:
                            raise _UntrustedError(f"has a tensor of {needed} bytes in a record that is shorter")
    except CheckpointError as error:
        raise CheckpointError(str(error).removeprefix(".metadata "), code=code_of(error)) from None
    except Exception as error:  # a damaged file may raise any exception
        raise CheckpointError(
            f"cannot be read as torch wrote it ({type(error).__name__}: {error}). Fix: use another checkpoint",
            code="checkpoint-damaged",
        ) from None
    finally:
        stream.seek(begin)


def _checked_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``torch.load`` to check its input, and to open only regular files; any number of tensors is accepted."""

    def checked(file: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, (str, os.PathLike)):
            _check_saved(file)
            return load(file, *arguments, **options)
        path = Path(file)
        with open(SafeDirectory(path.parent).open(path.name), "rb") as opened:
            try:
                _check_saved(opened)
            except CheckpointError as error:
                raise CheckpointError(f"{path} {error}", code=code_of(error)) from None
            return load(opened, *arguments, **options)

    return checked


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
            raise _UntrustedError(f".metadata names the file {name!r}, which is not in the checkpoint's directory")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(
                f".metadata describes {name} as compressed, which torch_dist checkpoints are not. Fix: use a "
                "checkpoint of format torch_dist",
                code="metadata-refused",
            )


@contextlib.contextmanager
def restricted_unpickling() -> Iterator[None]:
    """Prevents torch and megatron-core from unpickling anything that could run code, as a context manager.

    Raises:
        CheckpointError: torch's reader, which may wrap the error, reads a refused file; :func:`check_metadata` raises
            it earlier.  Or torch's private interface differs from the one that this context changes.
    """
    for mismatch in private_interfaces.check({"reading checkpoints"}):
        raise CheckpointError(str(mismatch), code="release-unknown")
    torch_filesystem: Any = filesystem  # its type has no declared attribute ``pickle``
    original_pickle, load, previous_setting = torch_filesystem.pickle, torch.load, os.environ.get(_WEIGHTS_ONLY)
    torch_filesystem.pickle, torch.load = _Pickle(), _checked_load(load)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        torch_filesystem.pickle, torch.load = original_pickle, load
        if previous_setting is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = previous_setting


def check_metadata(directory: Path) -> list[str]:
    """Returns the keys in the ``.metadata`` of a checkpoint; empty if there is no such file.

    Raises:
        CheckpointError: the file is invalid or could run code, or the directory has a link or a special file.
    """
    try:
        keys = list(read_metadata(directory).state_dict_metadata)
    except FileNotFoundError:
        return []  # another format: megatron-core reports the missing file
    try:
        decode.decode(SafeDirectory(directory).read(_CONFIG, safe_directory.MAX_SMALL_FILE_BYTES), _Format)
    except FileNotFoundError:
        pass  # the same
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory / _CONFIG} cannot be read ({error}). Fix: use another checkpoint", code="checkpoint-damaged"
        ) from None
    return keys


def read_metadata(directory: Path) -> Any:
    """Returns the content of ``.metadata``, torch's class ``Metadata``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is invalid or could run code, or the directory has a link or a special file.
    """
    if refused := SafeDirectory(directory).list_refused():
        raise CheckpointError(
            f"{directory / refused[0]} is no regular file and no directory. Fix: remove it",
            code="file-refused",
        )
    try:
        return _Pickle().load(io.BytesIO(SafeDirectory(directory).read(".metadata", safe_directory.MAX_METADATA_BYTES)))
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
