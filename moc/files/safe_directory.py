"""Files in directories of unknown origin, and durable writes.

Every access starts at a descriptor of the root, and follows no link below it.  Large files are written past the page
cache: copying bytes to it and writing them back takes processor time and memory bandwidth from training.  Direct writes
(``O_DIRECT``) avoid this (``docs/results/saving.md``).  Their buffers, lengths and offsets must be multiples of a block,
so all bytes pass through an aligned buffer.
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
from moc.files.text import shown

_FILE_SYSTEMS = frozenset({"ext3", "ext4", "overlay", "xfs"})
"""Of local disks.  Other file systems may forbid direct writes, or send each one over a network before the next."""
_BLOCK = 4096
_BUFFER = 8 << 20
_SMALL = 1 << 16
_MOUNT = re.compile(r"\S+ \S+ (?P<device>\d+:\d+) .* - (?P<kind>\S+) ")


def write_parts(file: int, parts: Iterable) -> None:
    """Writes buffers to an empty file, one after the other; past the page cache if they are many bytes.

    Args:
        file: descriptor of the file.
        parts: the buffers.

    Raises:
        OSError: the file system is full, or the file cannot be written.
    """
    staged, count, direct = memoryview(mmap.mmap(-1, _BUFFER)), 0, None
    for part in parts:
        data = memoryview(part)
        if not data.nbytes:
            continue  # an empty array cannot be cast
        data = data.cast("B")
        while data.nbytes and direct is not False:
            some = min(data.nbytes, _BUFFER - count)
            _copy(data[:some], staged[count : count + some])
            data, count = data[some:], count + some
            if count == _BUFFER:
                direct = _begins_direct(file) if direct is None else direct
                _write(file, staged)
                count = 0
        _write(file, data)
    blocks = count // _BLOCK * _BLOCK
    _write(file, staged[:blocks])
    if direct:
        _set_direct(file, False)
    _write(file, staged[blocks:count])


def _copy(data: memoryview, target: memoryview) -> None:
    if data.nbytes < _SMALL:
        target[:] = data
        return
    import numpy as np  # copies without Python's lock; programs that write small files only need not import it

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def _write(file: int, data: memoryview) -> None:
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


def _begins_direct(file: int) -> bool:
    """Turns direct writes on, if the file system is known to gain from them; returns whether they are on."""
    if _kind_of(file) not in _FILE_SYSTEMS:
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


def _kind_of(file: int) -> str | None:
    """Returns the type of the file system of an open file; None if it is not known."""
    device = os.fstat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            found = (_MOUNT.match(line) for line in mounts)
            return next((one["kind"] for one in found if one is not None and one["device"] == name), None)
    except OSError:
        return None


SMALL = 1 << 20
"""Limit in bytes of a file with a few values: a fence, the name of a run, a tracker, the configuration of a model."""
MANIFEST = 64 << 20
"""Limit in bytes of a manifest, a report, an index or a training state: half a million operators."""
HEADER = 64 << 20
"""Limit in bytes of the header of a safetensors file: a quarter of a million boxes."""
METADATA = 1 << 30
"""Limit in bytes of ``.metadata`` of torch_dist: some million shards."""
CONFIG = 64 << 10
"""Limit in bytes of a file of flags, whose YAML takes long to read."""
LINE = 1 << 20
"""Limit in bytes of a line of a log of events."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_AS_IT_IS = {"follow_symlinks": False}
_DEEPEST = 32  # levels of directories that are deleted
_ROUNDS = 100  # of emptying a directory while other processes write into it
_HUB = re.compile(r"(models|datasets|spaces)--.+")  # directory of a repository in the cache of the Hugging Face hub
_OURS = re.compile(
    r"\.?iter_\d{7,}[\w.-]*"  # checkpoints and their staging directories
    r"|\.(fence|run\.json|lock)(\.[\w.-]*)?"
    r"|\.[\w.-]+\.tmp(\.given-up)?"
)


class RefusedFileError(OSError):
    """An entry of a directory has the wrong type, is a link, or is larger than its type may be.

    Args:
        sentence: the problem with the entry, and the remedy.
        path: path of the entry.

    Attributes:
        remedy: the part of the sentence that is not in ``strerror``.
    """

    code = "file-refused"

    def __init__(self, sentence: str, path: object):
        what, _, self.remedy = sentence.partition(FIX)
        super().__init__(errno.EINVAL, what, str(path))


class Tree:
    """A directory and its contents; paths are relative, use slashes, and cannot leave the directory.

    The caller chooses the path of the root, which may contain links.  Methods raise OSError, and its subclass
    :class:`RefusedFileError` for entries that are neither regular files nor directories.

    One kind of link is read: in the cache of the Hugging Face hub, the files of a snapshot are links to the ``blobs``
    of the same repository (``models--ORG--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH``).

    Args:
        root: the directory.
        ours: this package has made the directory for its own use: any name in it may be deleted.
    """

    def __init__(self, root: str | Path, ours: bool = False):
        self.root, self._ours = Path(root), ours

    @contextlib.contextmanager
    def directory(self, path: str = "", make: bool = False) -> Iterator[int]:
        """Yields a descriptor of a directory; with ``make``, it is made if it does not exist, a root durably."""
        names = self._parts(path)
        if make:
            _make_root(self.root)
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                inner = self._opened(name, _DIRECTORY, descriptor, path)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: str, most: int | None = None) -> int:
        """Opens a regular file for reading; returns its descriptor.

        Args:
            path: path of the file.
            most: largest size in bytes; None for any.
        """
        descriptor = self._opened_file(path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RefusedFileError(
                    "it is not a regular file. Fix: replace it by one, or name another", self.root / path
                )
            if most is not None and status.st_size > most:
                raise RefusedFileError(
                    f"it has {status.st_size} bytes, more than {most}. Fix: restore it from a copy, or name another",
                    self.root / path,
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, path: str, most: int) -> bytes:
        """Returns the contents of a regular file of at most ``most`` bytes."""
        with open(self.open(path, most), "rb") as file:
            return file.read(min(most, os.fstat(file.fileno()).st_size))  # a larger size would be allocated

    def lines(self, path: str, most: int) -> Iterator[bytes]:
        """Yields the lines of a regular file; raises :class:`RefusedFileError` at one of more than ``most`` bytes."""
        with open(self.open(path), "rb") as file:
            while line := file.readline(most + 1):
                if len(line) > most:
                    raise RefusedFileError(
                        f"a line has more than {most} bytes. Fix: correct it, or name another file", self.root / path
                    )
                yield line

    def names(self, path: str = "") -> list[str]:
        """Returns the names in a directory, sorted; empty if it does not exist, or is a link or a file."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, RefusedFileError),
            self.directory(path) as there,
        ):
            return sorted(os.listdir(there))
        return []

    def refused(self) -> list[str]:
        """Returns the names of the root's entries that are not directories or regular files; empty without a root."""
        return self._entries(lambda one: not (one.is_dir(**_AS_IT_IS) or one.is_file(**_AS_IT_IS)))

    def directories(self) -> list[str]:
        """Returns the names of the root's directories, without links to directories; empty if there is no root."""
        return self._entries(lambda one: one.is_dir(**_AS_IT_IS))

    def _entries(self, chosen: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.directory() as root:
            with os.scandir(root) as entries:
                return sorted(one.name for one in entries if chosen(one))
        return []

    def write(
        self,
        path: str,
        parts: Iterable,
        name_too: bool = True,
        tag: str = "",
        check: Callable[[], None] | None = None,
        replace: bool = True,
    ) -> None:
        """Writes a file atomically and durably as the concatenation of buffers.

        Concurrent writers of a file use separate temporary files, which are removed on failure.

        Args:
            path: path of the file; its directory is made.
            parts: buffers to write.
            name_too: sync the directory too; without it, the name is durable only at the next sync.
            tag: tag of the writer's claim, part of the temporary file's name.
            check: called after the write, right before the rename; may raise.
            replace: replace an existing file; otherwise raises FileExistsError.
        """
        above, name = self._split(path)
        with self.directory(above, make=True) as directory:
            write(directory, name, parts, name_too, tag, check, replace)

    def remove(self, path: str) -> None:
        """Deletes a file, a link, or a directory with its contents, durably; a missing one is no error.

        It follows no link, enters no other mounted file system,
        and of the root's entries deletes only those with a name that this package gives.
        """
        above, name = self._split(path)
        if not (self._ours or _OURS.fullmatch(self._parts(path)[0])):
            raise RefusedFileError(
                "no program of this package makes such a name, so none deletes it. Fix: remove it yourself",
                self.root / path,
            )
        with contextlib.ExitStack() as opened:
            try:
                directory = opened.enter_context(self.directory(above))
            except (FileNotFoundError, NotADirectoryError):
                return
            with contextlib.suppress(FileNotFoundError):
                _delete(directory, name, _mount_of(directory), _DEEPEST)
                os.fsync(directory)

    def link(self, source: str, path: str) -> None:
        """Gives a file another name in this directory, and replaces an existing file; the name's directory is made.

        The second name is not synced.
        """
        above, name = self._split(path)
        with self.directory(self._split(source)[0]) as origin, self.directory(above, make=True) as target:
            with contextlib.suppress(FileNotFoundError):
                _delete(target, name, _mount_of(target), _DEEPEST)
            old = self._split(source)[1]
            os.link(old, name, src_dir_fd=origin, dst_dir_fd=target, follow_symlinks=False)

    def remove_if_empty(self, path: str) -> None:
        """Deletes a directory without contents; one that another process still writes into stays."""
        above, name = self._split(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.directory(above) as directory:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=directory)
            os.fsync(directory)

    def sync(self, path: str = "") -> None:
        """Syncs the names in a directory to disk."""
        with self.directory(path) as descriptor:
            os.fsync(descriptor)

    def _split(self, path: str) -> tuple[str, str]:
        """Splits the path of an entry into the path of its directory and its name."""
        self._parts(path)
        above, _, name = path.rpartition("/")
        return above, name

    def _parts(self, path: str) -> list[str]:
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"{shown(path)} is outside of {self.root}")
        return parts

    def _opened_file(self, path: str) -> int:
        above, name = self._split(path)
        with self.directory(above) as directory:
            try:
                return self._opened(name, _FILE, directory, path)
            except RefusedFileError:
                blob = _blob_of(self.root, above, _target(directory, name))
                if blob is None:
                    raise
        with Tree(blob.parent.parent).directory(blob.parent.name) as directory:
            return self._opened(blob.name, _FILE, directory, path)

    def _opened(self, name: str, flags: int, directory: int, path: str) -> int:
        self._parts(name)
        try:
            return os.open(name, flags, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _target(directory, name) is not None:
                raise RefusedFileError(
                    "it is a symbolic link. Fix: replace it by what it leads to", self.root / path
                ) from None
            if error.errno == errno.ENXIO:
                raise RefusedFileError(
                    "it is not a regular file. Fix: replace it by one, or name another", self.root / path
                ) from None
            error.filename = str(self.root / path)
            raise


def open_named(path: str | os.PathLike[str], most: int) -> int:
    """Opens a regular file of at most ``most`` bytes that the user names, through links too; returns its descriptor."""
    real = Path(os.path.realpath(path))
    return Tree(real.parent).open(real.name, most)


def open_single(path: str | Path, flags: int) -> int:
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


def write(
    directory: int,
    name: str,
    parts: Iterable,
    name_too: bool = True,
    tag: str = "",
    check: Callable[[], None] | None = None,
    replace: bool = True,
) -> None:
    """Like :meth:`Tree.write`, into an open directory, which is given by its descriptor."""
    temporary = temporary_name(name, tag)
    file = open(os.open(temporary, _NEW, 0o666, dir_fd=directory), "wb", buffering=0)
    try:
        with file:
            write_parts(file.fileno(), parts)
            os.fsync(file.fileno())
        if check is not None:
            check()
        if replace:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        else:
            os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            os.unlink(temporary, dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    if name_too:
        os.fsync(directory)


def remove_own(path: Path) -> None:
    """Like :meth:`Tree.remove`, for an entry that this program has made, in a directory that the caller trusts."""
    Tree(path.parent, ours=True).remove(path.name)


def empty(directory: int, first: str = "", last: str = "") -> None:
    """Deletes the contents of an open directory, as :meth:`Tree.remove` does.

    Args:
        directory: its descriptor.
        first: entry to delete before all others.
        last: entry to delete after all others.
    """
    _empty(directory, _mount_of(directory), _DEEPEST, first, last)


def temporary_name(name: str, tag: str = "") -> str:
    """Returns a name for a file before the rename; it is random, so that an attacker cannot plant a link there."""
    own = f"{secrets.token_hex(8)}.tmp"
    return f".{name}.{tag}.{own}" if tag else f".{name}.{own}"


def _empty(directory: int, mount: str | int, levels: int, first: str = "", last: str = "") -> None:
    names = [name for name in os.listdir(directory) if name not in (first, last)]
    for name in filter(None, (first, *names, last)):
        with contextlib.suppress(FileNotFoundError):  # another worker deletes there, too
            _delete(directory, name, mount, levels)


def _delete(directory: int, name: str, mount: str | int, levels: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
        return
    if levels == 0:
        raise RefusedFileError(f"it has more than {_DEEPEST} levels of directories. Fix: remove it yourself", name)
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        if _mount_of(descriptor) != mount:
            raise RefusedFileError("another file system is mounted there. Fix: unmount it", name)
        for _ in range(_ROUNDS):  # another worker may still write into it, and an attacker without end
            if not os.listdir(descriptor):
                break
            _empty(descriptor, mount, levels - 1)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=directory)


def _mount_of(descriptor: int) -> str | int:
    """Identifies the mount of an open directory; a bind mount has another mount, but the same device."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as lines:
            return next(line for line in lines if line.startswith("mnt_id:"))
    except (OSError, StopIteration):
        return os.fstat(descriptor).st_dev


def _target(directory: int, name: str) -> str | None:
    """Returns the target of a symbolic link; None if the entry is none."""
    with contextlib.suppress(OSError):
        return os.readlink(name, dir_fd=directory)
    return None


def _blob_of(root: Path, above: str, target: str | None) -> Path | None:
    """Returns the blob that a link of a hub snapshot leads to; None for all other links.

    Args:
        root: root of a tree, which is the snapshot or a directory in it.
        above: path of the link's directory in the tree.
        target: target of the link.
    """
    here = Path(os.path.realpath(root))
    snapshot = next((one for one in (here, *here.parents) if one.parent.name == "snapshots"), None)
    if target is None or snapshot is None or not _HUB.fullmatch(snapshot.parent.parent.name):
        return None
    blob = Path(os.path.normpath(here / above / target))
    return blob if blob.parent == snapshot.parent.parent / "blobs" else None


def _make_root(root: Path) -> None:
    """Makes a directory and those above it, and syncs the name of each that is new."""
    if root.is_dir():
        return
    _make_root(root.absolute().parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root)
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    with contextlib.suppress(PermissionError):  # a directory that this user may not read cannot be synced
        Tree(root.absolute().parent).sync()


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file atomically and durably."""
    Tree(path.parent).write(path.name, [text.encode()])


def new_file(path: Path) -> int:
    """Makes a file, and returns its descriptor; never opens an existing file, nor follows a link.

    Raises:
        FileExistsError: the name exists.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Syncs the names in a directory to disk."""
    Tree(path).sync()
