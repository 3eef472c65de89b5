"""Files in directories of unknown origin, and durable writes.

Every access starts at a descriptor of the root, and follows no link below it.

Large files are written past the page cache.  Copying bytes to the cache and writing them back takes processor time and
memory bandwidth from training.  Direct writes (``O_DIRECT``) avoid this (``docs/results/saving.md``).  Their buffers,
lengths and offsets must be multiples of a block, so all bytes pass through an aligned buffer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moc.errors import FIX
from moc.files.decode import short_repr

_DIRECT_FILE_SYSTEMS = frozenset({"ext3", "ext4", "overlay", "xfs"})
"""Of local disks.  Other file systems may forbid direct writes, or send each one over a network before the next."""
_BLOCK = 4096
_BUFFER = 8 << 20
_MAX_PYTHON_COPY_BYTES = 1 << 16
_MOUNT = re.compile(r"\S+ \S+ (?P<device>\d+:\d+) .* - (?P<kind>\S+) ")

MAX_SMALL_FILE_BYTES = 1 << 20
"""Limit in bytes of a file with a few values: a fence, the name of a run, a tracker, the configuration of a model."""
MAX_MANIFEST_BYTES = 64 << 20
"""Limit in bytes of a manifest, a report, an index or a training state: half a million operators."""
MAX_HEADER_BYTES = 64 << 20
"""Limit in bytes of the header of a safetensors file: a quarter of a million boxes."""
MAX_METADATA_BYTES = 1 << 30
"""Limit in bytes of ``.metadata`` of torch_dist: some million shards."""
MAX_CONFIG_BYTES = 64 << 10
"""Limit in bytes of a file of flags, whose YAML takes long to read."""
MAX_LINE_BYTES = 1 << 20
"""Limit in bytes of a line of a log of events."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_NO_FOLLOW = {"follow_symlinks": False}
_MAX_DEPTH = 32  # levels of directories that are deleted
_MAX_EMPTYING_ROUNDS = 100  # of emptying a directory while other processes write into it
_HUB_REPOSITORY = re.compile(
    r"(models|datasets|spaces)--.+"
)  # directory of a repository in the cache of the Hugging Face hub
_DELETABLE_NAMES = re.compile(
    r"\.?iter_\d{7,}[\w.-]*"  # checkpoints and their staging directories
    r"|\.(fence|run\.json|lock|spare)(\.[\w.-]*)?"
    r"|\.[\w.-]+\.tmp(\.given-up)?"
)


def write_buffers(file: int, buffers: Iterable) -> None:
    """Writes buffers to an empty file, one after the other; past the page cache if they are many bytes.

    Raises:
        OSError: the file system is full, or the file cannot be written.
    """
    staging, staged_bytes, is_direct = memoryview(mmap.mmap(-1, _BUFFER)), 0, None
    for part in buffers:
        data = memoryview(part)
        if not data.nbytes:
            continue  # an empty array cannot be cast
        data = data.cast("B")
        while data.nbytes and is_direct is not False:
            size = min(data.nbytes, _BUFFER - staged_bytes)
            _copy_bytes(data[:size], staging[staged_bytes : staged_bytes + size])
            data, staged_bytes = data[size:], staged_bytes + size
            if staged_bytes == _BUFFER:
                is_direct = _enable_direct_writes(file) if is_direct is None else is_direct
                _write_all(file, staging)
                staged_bytes = 0
        _write_all(file, data)
    blocks = staged_bytes // _BLOCK * _BLOCK
    _write_all(file, staging[:blocks])
    if is_direct:
        _set_direct(file, False)
    _write_all(file, staging[blocks:staged_bytes])


def _copy_bytes(data: memoryview, target: memoryview) -> None:
    if data.nbytes < _MAX_PYTHON_COPY_BYTES:
        target[:] = data
        return
    import numpy as np  # copies without Python's lock; programs that write small files only need not import it

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def _write_all(file: int, data: memoryview) -> None:
    while data.nbytes:
        try:
            written = os.write(file, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(file):
                raise
            _set_direct(file, False)  # the device has larger blocks
            continue
        data = data[written:]
        if written % _BLOCK and _is_direct(file):  # the file system is nearly full
            _set_direct(file, False)


def _enable_direct_writes(file: int) -> bool:
    """Turns direct writes on, if the file system is known to gain from them; returns whether they are on."""
    if _file_system_of(file) not in _DIRECT_FILE_SYSTEMS:
        return False
    try:
        _set_direct(file, True)
    except OSError:
        return False
    return True


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(file: int, direct: bool) -> None:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _file_system_of(file: int) -> str | None:
    """Returns the type of the file system of an open file; None if it is not known."""
    device = os.fstat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            matches = (_MOUNT.match(line) for line in mounts)
            return next((match["kind"] for match in matches if match is not None and match["device"] == name), None)
    except OSError:
        return None


class RefusedFileError(OSError):
    """An entry of a directory has the wrong type, is a link, or is larger than its type may be.

    Attributes:
        remedy: the part of the sentence that is not in ``strerror``.
    """

    code = "file-refused"

    def __init__(self, message: str, path: object):
        problem, _, self.remedy = message.partition(FIX)
        super().__init__(errno.EINVAL, problem, str(path))


class SafeDirectory:
    """A directory and its contents; paths are relative, use slashes, and cannot leave the directory.

    The caller chooses the path of the root, which may contain links.  Methods raise OSError, and its subclass
    :class:`RefusedFileError` for entries that are neither regular files nor directories.

    One kind of link is read: in the cache of the Hugging Face hub, the files of a snapshot are links to the ``blobs``
    of the same repository (``models--ORG--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH``).

    Args:
        root: the directory.
        is_owned: this package has made the directory for its own use: any name in it may be deleted.
    """

    def __init__(self, root: str | Path, is_owned: bool = False):
        self.root, self._is_owned = Path(root), is_owned

    @contextlib.contextmanager
    def directory(self, path: str = "", creates: bool = False) -> Iterator[int]:
        """Yields a descriptor of a directory; with ``creates``, it is made if it does not exist, a root durably."""
        names = self._path_parts(path)
        if creates:
            _create_root(self.root)
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in names:
                if creates:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                inner = self._open_entry(name, _DIRECTORY, descriptor, path)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: str, max_bytes: int | None = None) -> int:
        """Opens a regular file for reading; returns its descriptor.

        Args:
            path: path of the file.
            max_bytes: largest size in bytes; None for any.
        """
        descriptor = self._open_file(path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RefusedFileError(
                    "it is not a regular file. Fix: replace it by one, or name another", self.root / path
                )
            if max_bytes is not None and status.st_size > max_bytes:
                raise RefusedFileError(
                    f"it has {status.st_size} bytes, more than {max_bytes}. Fix: restore it from a copy, or name "
                    "another",
                    self.root / path,
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, path: str, max_bytes: int) -> bytes:
        """Returns the contents of a regular file of at most ``max_bytes`` bytes."""
        with open(self.open(path, max_bytes), "rb") as file:
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size))  # a larger size would be allocated

    def read_lines(self, path: str, max_bytes: int) -> Iterator[bytes]:
        """Yields the lines of a regular file; raises :class:`RefusedFileError` at a line above ``max_bytes`` bytes."""
        with open(self.open(path), "rb") as file:
            while line := file.readline(max_bytes + 1):
                if len(line) > max_bytes:
                    raise RefusedFileError(
                        f"a line has more than {max_bytes} bytes. Fix: correct it, or name another file",
                        self.root / path,
                    )
                yield line

    def list_names(self, path: str = "") -> list[str]:
        """Returns the names in a directory, sorted; empty if it does not exist, or is a link or a file."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, RefusedFileError),
            self.directory(path) as directory,
        ):
            return sorted(os.listdir(directory))
        return []

    def list_refused(self) -> list[str]:
        """Returns the names of the root's entries that are not directories or regular files; empty without a root."""
        return self._entries(lambda entry: not (entry.is_dir(**_NO_FOLLOW) or entry.is_file(**_NO_FOLLOW)))

    def list_directories(self) -> list[str]:
        """Returns the names of the root's directories, without links to directories; empty if there is no root."""
        return self._entries(lambda entry: entry.is_dir(**_NO_FOLLOW))

    def _entries(self, predicate: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.directory() as root:
            with os.scandir(root) as entries:
                return sorted(entry.name for entry in entries if predicate(entry))
        return []

    def write(
        self,
        path: str,
        buffers: Iterable,
        syncs_name: bool = True,
        tag: str = "",
        check: Callable[[], None] | None = None,
        replaces: bool = True,
    ) -> None:
        """Writes a file atomically and durably as the concatenation of buffers.

        Concurrent writers of a file use separate temporary files, which are removed on failure.

        Args:
            path: path of the file; its directory is made.
            buffers: buffers to write.
            syncs_name: sync the directory too; without it, the name is durable only at the next sync.
            tag: tag of the writer's claim, part of the temporary file's name.
            check: called after the write, right before the rename; may raise.
            replaces: replace an existing file; otherwise raises FileExistsError.
        """
        parent, name = self._split_path(path)
        with self.directory(parent, creates=True) as directory:
            write_in(directory, name, buffers, syncs_name, tag, check, replaces)

    def remove(self, path: str) -> None:
        """Deletes a file, a link, or a directory with its contents, durably; a missing one is no error.

        It follows no link, enters no other mounted file system,
        and of the root's entries deletes only those with a name that this package gives.
        """
        parent, name = self._split_path(path)
        self.remove_entries(parent, [name])

    def remove_entries(self, path: str, names: Iterable[str]) -> None:
        """Like :meth:`remove`, for several entries of a directory, which is synced once."""
        for name in (names := list(names)):
            entry = f"{path}/{name}" if path else name
            if not (self._is_owned or _DELETABLE_NAMES.fullmatch(self._path_parts(entry)[0])):
                raise RefusedFileError(
                    "no program of this package makes such a name, so none deletes it. Fix: remove it yourself",
                    self.root / entry,
                )
        with contextlib.ExitStack() as opened:
            try:
                directory = opened.enter_context(self.directory(path))
            except (FileNotFoundError, NotADirectoryError):
                return
            mount, is_changed = _mount_id(directory), False
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    _delete(directory, name, mount, _MAX_DEPTH)
                    is_changed = True
            if is_changed:
                os.fsync(directory)

    def link(self, source: str, path: str) -> None:
        """Gives a file another name in this directory, and replaces an existing file; the name's directory is made.

        The second name is not synced.
        """
        parent, name = self._split_path(path)
        with self.directory(self._split_path(source)[0]) as origin, self.directory(parent, creates=True) as target:
            with contextlib.suppress(FileNotFoundError):
                _delete(target, name, _mount_id(target), _MAX_DEPTH)
            source_name = self._split_path(source)[1]
            os.link(source_name, name, src_dir_fd=origin, dst_dir_fd=target, follow_symlinks=False)

    def remove_if_empty(self, path: str) -> None:
        """Deletes a directory without contents; one that another process still writes into stays."""
        parent, name = self._split_path(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.directory(parent) as directory:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=directory)
            os.fsync(directory)

    def sync(self, path: str = "") -> None:
        """Syncs the names in a directory to disk."""
        with self.directory(path) as descriptor:
            os.fsync(descriptor)

    def _split_path(self, path: str) -> tuple[str, str]:
        """Splits the path of an entry into the path of its directory and its name."""
        self._path_parts(path)
        parent, _, name = path.rpartition("/")
        return parent, name

    def _path_parts(self, path: str) -> list[str]:
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"{short_repr(path)} is outside of {self.root}")
        return parts

    def _open_file(self, path: str) -> int:
        parent, name = self._split_path(path)
        with self.directory(parent) as directory:
            try:
                return self._open_entry(name, _FILE, directory, path)
            except RefusedFileError:
                blob = _hub_blob(self.root, parent, _link_target(directory, name))
                if blob is None:
                    raise
        with SafeDirectory(blob.parent.parent).directory(blob.parent.name) as directory:
            return self._open_entry(blob.name, _FILE, directory, path)

    def _open_entry(self, name: str, flags: int, directory: int, path: str) -> int:
        self._path_parts(name)
        try:
            return os.open(name, flags, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _link_target(directory, name) is not None:
                raise RefusedFileError(
                    "it is a symbolic link. Fix: replace it by its target", self.root / path
                ) from None
            if error.errno == errno.ENXIO:
                raise RefusedFileError(
                    "it is not a regular file. Fix: replace it by one, or name another", self.root / path
                ) from None
            error.filename = str(self.root / path)
            raise


def open_user_file(path: str | os.PathLike[str], max_bytes: int) -> int:
    """Opens a regular file that the user names, through links too; returns its descriptor."""
    real = Path(os.path.realpath(path))
    return SafeDirectory(real.parent).open(real.name, max_bytes)


def open_without_links(path: str | Path, flags: int) -> int:
    """Opens a file to change or to lock it; returns its descriptor.

    A file with a second name may belong to something outside of its directory.

    Args:
        path: the file.
        flags: as for ``os.open``; with ``O_CREAT``, a missing file is made.

    Raises:
        RefusedFileError: it is a link, no regular file, or has a second name.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise RefusedFileError("it is not a regular file. Fix: remove it", path) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise RefusedFileError("it is not a regular file with one name. Fix: remove it", path)


def write_in(
    directory: int,
    name: str,
    buffers: Iterable,
    syncs_name: bool = True,
    tag: str = "",
    check: Callable[[], None] | None = None,
    replaces: bool = True,
) -> None:
    """Like :meth:`SafeDirectory.write`, into an open directory, which is given by its descriptor."""
    temporary = temporary_name(name, tag)
    file = open(os.open(temporary, _NEW, 0o666, dir_fd=directory), "wb", buffering=0)
    try:
        with file:
            write_buffers(file.fileno(), buffers)
            os.fsync(file.fileno())
        if check is not None:
            check()
        if replaces:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        else:
            os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            os.unlink(temporary, dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    if syncs_name:
        os.fsync(directory)


def remove_owned(path: Path) -> None:
    """Like :meth:`SafeDirectory.remove`, for an entry that this program has made, in a trusted directory."""
    SafeDirectory(path.parent, is_owned=True).remove(path.name)


def delete_contents(directory: int, first: str = "", last: str = "") -> None:
    """Deletes the contents of an open directory, as :meth:`SafeDirectory.remove` does.

    Args:
        directory: its descriptor.
        first: entry to delete before all others.
        last: entry to delete after all others.
    """
    _delete_contents(directory, _mount_id(directory), _MAX_DEPTH, first, last)


def temporary_name(name: str, tag: str = "") -> str:
    """Returns a name for a file before the rename; it is random, so that an attacker cannot plant a link there."""
    own = f"{secrets.token_hex(8)}.tmp"
    return f".{name}.{tag}.{own}" if tag else f".{name}.{own}"


def _delete_contents(directory: int, mount: str | int, levels: int, first: str = "", last: str = "") -> None:
    names = [name for name in os.listdir(directory) if name not in (first, last)]
    for name in filter(None, (first, *names, last)):
        with contextlib.suppress(FileNotFoundError):  # another worker deletes there, too
            _delete(directory, name, mount, levels)


def _delete(directory: int, name: str, mount: str | int, levels: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
        return
    if levels == 0:
        raise RefusedFileError(f"it has more than {_MAX_DEPTH} levels of directories. Fix: remove it yourself", name)
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        if _mount_id(descriptor) != mount:
            raise RefusedFileError("another file system is mounted there. Fix: unmount it", name)
        for _ in range(_MAX_EMPTYING_ROUNDS):  # another worker may still write into it, and an attacker without end
            if not os.listdir(descriptor):
                break
            _delete_contents(descriptor, mount, levels - 1)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=directory)


def _mount_id(descriptor: int) -> str | int:
    """Identifies the mount of an open directory; a bind mount has another mount, but the same device."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as lines:
            return next(line for line in lines if line.startswith("mnt_id:"))
    except (OSError, StopIteration):
        return os.fstat(descriptor).st_dev


def _link_target(directory: int, name: str) -> str | None:
    """Returns the target of a symbolic link; None if the entry is none."""
    with contextlib.suppress(OSError):
        return os.readlink(name, dir_fd=directory)
    return None


def _hub_blob(root: Path, parent: str, target: str | None) -> Path | None:
    """Returns the blob that a link of a hub snapshot leads to; None for all other links.

    Args:
        root: root of a tree, which is the snapshot or a directory in it.
        parent: path of the link's directory in the tree.
        target: target of the link.
    """
    real_root = Path(os.path.realpath(root))
    snapshot = next((path for path in (real_root, *real_root.parents) if path.parent.name == "snapshots"), None)
    if target is None or snapshot is None or not _HUB_REPOSITORY.fullmatch(snapshot.parent.parent.name):
        return None
    blob = Path(os.path.normpath(real_root / parent / target))
    return blob if blob.parent == snapshot.parent.parent / "blobs" else None


def _create_root(root: Path) -> None:
    """Makes a directory and those above it, and syncs the name of each that is new."""
    if root.is_dir():
        return
    _create_root(root.absolute().parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    with contextlib.suppress(PermissionError):  # a directory that this user may not read cannot be synced
        SafeDirectory(root.absolute().parent).sync()


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file atomically and durably."""
    SafeDirectory(path.parent).write(path.name, [text.encode()])


def create_file(path: Path) -> int:
    """Makes a file, and returns its descriptor; never opens an existing file, nor follows a link.

    Raises:
        FileExistsError: the name exists.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Syncs the names in a directory to disk."""
    SafeDirectory(path).sync()
