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

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable of torch: ``torch.load`` is ``weights_only``, whatever its caller says."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # what Python 3.13 calls it
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f".metadata asks for {ascii(module)[1:-1]}.{ascii(name)[1:-1]}, which no torch_dist checkpoint needs: "
                "it could run any code, and is refused"
            )
        return super().find_class(module, name)


class _Pickle:
    """In place of the module ``pickle``, where torch reads ``.metadata``."""

    def load(self, file, **_) -> Any:
        try:
            data = file.read()
            _check_memo(data)
            read = _Unpickler(io.BytesIO(data)).load()
            _check_paths(read)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(f".metadata cannot be read as torch_dist ({type(error).__name__}: {error})") from None
        return read

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def _check_memo(data: bytes) -> None:
    """Python makes room for the largest number that an object is remembered by, were it 2^32: some 70 GB."""
    for operation, number, _ in pickletools.genops(data):
        if operation.name in ("PUT", "LONG_BINPUT") and isinstance(number, int) and number > len(data):
            raise CheckpointError(f".metadata numbers an object {number}, and is of {len(data)} bytes: it is refused")


def _check_paths(metadata: Any) -> None:
    if not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(".metadata describes no tensors by name, as torch_dist checkpoints do")
    for stored in (metadata.storage_data or {}).values():
        name = stored.relative_path
        if not isinstance(name, str) or not name or PurePath(name).name != name or name == "..":
            raise CheckpointError(f".metadata names the file {name!r}, which is not in the checkpoint's directory")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f".metadata says that {name} is compressed, which torch_dist checkpoints are not")


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Inside, torch and megatron-core read checkpoints, and unpickle nothing that could run code.

    Raises:
        CheckpointError: from torch's reader, which may wrap it; :func:`check_metadata` raises it before.  Also if torch
            reads ``.metadata`` in another way than this context changes.
    """
    for mismatch in private_interfaces.check({"reading checkpoints"}):
        raise CheckpointError(str(mismatch))
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
        CheckpointError: it is none, or could run code.
    """
    try:
        with open(directory / ".metadata", "rb") as file:
            return list(_Pickle().load(file).state_dict_metadata)
    except FileNotFoundError:
        return []  # another format: megatron-core says what it misses
    except CheckpointError as error:
        raise CheckpointError(f"{directory}/{error}") from None
