"""Nothing outside of a directory is read, written or deleted, whatever the directory contains."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moc.files import safe_directory
from moc.files import safe_directory as trees
from moc.files.safe_directory import (
    RefusedFileError,
    SafeDirectory,
    delete_contents,
    open_without_links,
    temporary_name,
    write_durably,
)
from moc.store.storage import LocalStorage
from tests.cases import each_row

OURS = "iter_0000100"
ROOT = Path(__file__).parents[3]
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@pytest.fixture
def outside(tmp_path):
    """A directory with a file, beside the one under test."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return tmp_path / "outside"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree").mkdir()
    return SafeDirectory(tmp_path / "tree")


def test_link_is_deleted_but_not_its_target(tree, outside):
    (tree.root / OURS).symlink_to("../outside")
    (tree.root / "iter_0000200").mkdir()
    (tree.root / "iter_0000200" / "inner").symlink_to("../../outside")
    tree.remove(OURS)
    tree.remove("iter_0000200")
    assert tree.list_names() == [] and (outside / "precious").read_text() == "precious"


def test_links_are_not_followed_for_reads_or_writes(tree, outside):
    (tree.root / OURS).symlink_to("../outside")
    (tree.root / "link").symlink_to("../outside/precious")
    for path in (f"{OURS}/precious", "link"):
        with pytest.raises(RefusedFileError):
            tree.read(path, 100)
    with pytest.raises(RefusedFileError):
        tree.write(f"{OURS}/precious", [b"overwritten"])
    with pytest.raises(RefusedFileError):
        tree.remove(f"{OURS}/precious")
    tree.write("link", [b"new"])  # replaces the link
    assert tree.list_names(OURS) == [] and tree.list_refused() == [OURS]
    assert (outside / "precious").read_text() == "precious" and tree.read("link", 3) == b"new"


@each_row("path", ["../outside/precious", "/etc/passwd", "a/../../outside/precious", "..", "a//b", "a\0b"])
def test_path_outside_directory_is_refused(tree, outside, path):
    for action in (lambda: tree.read(path, 100), lambda: tree.write(path, [b""]), lambda: tree.remove(path)):
        with pytest.raises(ValueError):
            action()
    assert (outside / "precious").read_text() == "precious"


def test_only_regular_files_within_limit_are_read(tree):
    os.mkfifo(tree.root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree.root / "socket"))
    (tree.root / "directory").mkdir()
    with open(tree.root / "sparse", "wb") as file:
        file.truncate(1 << 40)
    for name in ("fifo", "socket", "directory", "sparse"):
        with pytest.raises(RefusedFileError):
            tree.read(name, trees.MAX_MANIFEST_BYTES)
    (tree.root / "exact").write_bytes(b"x" * 10)
    assert tree.read("exact", 10) == b"x" * 10
    with pytest.raises(RefusedFileError):
        tree.read("exact", 9)


def test_only_package_made_names_are_deleted(tree):
    kept = ["notes.txt", "data", "iter_5", ".git", "latest_checkpointed_iteration.txt"]
    gone = [OURS, ".iter_0000100.job-0-1.incomplete", ".fence", ".lock.job-0-1", ".manifest.json.0123456789abcdef.tmp"]
    for name in kept + gone:
        (tree.root / name).mkdir()
    for name in kept:
        with pytest.raises(RefusedFileError):
            tree.remove(name)
    for name in gone:
        tree.remove(name)
    assert tree.list_names() == sorted(kept)
    SafeDirectory(tree.root, is_owned=True).remove("data")
    assert "data" not in tree.list_names()


def test_directory_replaced_by_link_is_not_followed(tree, outside, monkeypatch):
    (tree.root / OURS / "inner").mkdir(parents=True)
    opened = os.open

    def swapped(name, flags, *args, **how):
        if name == "inner":
            os.rename(tree.root / OURS / "inner", tree.root / "moved")
            (tree.root / OURS / "inner").symlink_to(outside)
        return opened(name, flags, *args, **how)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(OSError):
        tree.remove(OURS)
    assert (outside / "precious").read_text() == "precious"


MOUNTS = """
import subprocess, sys
from moc.files.safe_directory import RefusedFileError, SafeDirectory, delete_contents, remove_owned
root, outside = sys.argv[1:]
tree, refused = SafeDirectory(root), []
for target in ("iter_0000100", "iter_0000200/inner", "iter_0000300/a/b", "iter_0000400/file"):
    source = f"{outside}/precious" if target.endswith("file") else outside
    subprocess.run(["mount", "--bind", source, f"{root}/{target}"], check=True)
with tree.directory("iter_0000200") as opened:
    actions = [lambda name=name: tree.remove(name) for name in sorted(tree.list_names())]
    for action in (*actions, lambda: delete_contents(opened), lambda: remove_owned(tree.root / "iter_0000300")):
        try:
            action()
        except OSError as error:
            refused.append(type(error).__name__)
print(len(refused))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_other_mount_is_not_entered(tree, outside):
    """Bind mounts of the same file system: of a directory, of one below it, and of a file."""
    for name in (OURS, "iter_0000200/inner", "iter_0000300/a/b", "iter_0000400"):
        (tree.root / name).mkdir(parents=True)
    (tree.root / "iter_0000400" / "file").touch()
    if subprocess.run(["unshare", "--mount", "mount", "--bind", outside, tree.root / OURS]).returncode:
        pytest.skip("this machine cannot bind-mount")
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTS, tree.root, outside]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout == "6\n"
    assert (outside / "precious").read_text() == "precious"


def exchange(one, other):
    """Swaps two names atomically; leaves them if one is missing."""
    ctypes.CDLL(None).renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


@pytest.mark.parametrize("swapped", [OURS, f"{OURS}/inner", f"{OURS}/inner/deeper"])
@pytest.mark.parametrize("action", ["remove", "empty", "write", "link"])
def test_swapped_directory_changes_nothing_outside(tree, outside, swapped, action):
    (outside / "inner" / "deeper").mkdir(parents=True)
    for directory in (outside / "inner", outside / "inner" / "deeper"):
        (directory / "precious").write_text("precious")
    tree.write("source", [b"x"])
    before = {path: path.lstat().st_ctime_ns for path in (outside, *outside.rglob("*"))}
    path, aside, over = tree.root / swapped, tree.root / "aside", threading.Event()
    leads_to = outside / os.path.relpath(path, tree.root / OURS)

    def swaps():
        while not over.is_set():
            exchange(path, aside)

    def acts():
        if action == "remove":
            tree.remove(OURS)
        elif action == "empty":
            with tree.directory(OURS) as directory:
                delete_contents(directory)
        elif action == "write":
            tree.write(f"{OURS}/inner/deeper/precious", [b"overwritten"])
        else:
            tree.link("source", f"{OURS}/inner/deeper/precious")

    thread = threading.Thread(target=swaps)
    thread.start()
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                (tree.root / OURS / "inner" / "deeper").mkdir(parents=True)
            if not aside.is_symlink():
                shutil.rmtree(aside, ignore_errors=True)
                with contextlib.suppress(OSError):
                    aside.symlink_to(leads_to)
            with contextlib.suppress(OSError):
                acts()
    finally:
        over.set()
        thread.join()
    assert {path: path.lstat().st_ctime_ns for path in (outside, *outside.rglob("*"))} == before


def test_hard_link_replaces_target_and_follows_no_link(tree, outside):
    tree.write("slots/0", [b"new"])
    for kind in ("nothing", "file", "link", "hard link", "directory"):
        path = tree.root / OURS / kind
        path.parent.mkdir(exist_ok=True)
        if kind == "file":
            path.write_text("old")
        elif kind == "link":
            path.symlink_to(outside / "precious")
        elif kind == "hard link":
            os.link(outside / "precious", path)
        elif kind == "directory":
            (path / "inner").mkdir(parents=True)
        tree.link("slots/0", f"{OURS}/{kind}")
        assert path.samefile(tree.root / "slots" / "0")
    (tree.root / "iter_0000200").symlink_to(outside)
    with pytest.raises(RefusedFileError):
        tree.link("slots/0", "iter_0000200/precious")
    (tree.root / "slots" / "link").symlink_to(outside / "precious")
    tree.link("slots/link", f"{OURS}/linked")  # the link itself
    assert (outside / "precious").read_text() == "precious" and (tree.root / OURS / "linked").is_symlink()


def test_foreign_hard_linked_file_is_never_changed(tree, outside):
    """Its content, mode and times stay, whatever is written under its name here, or deleted."""
    precious = outside / "precious"
    precious.chmod(0o4751)
    before = precious.stat()
    os.link(precious, tree.root / "file")
    tree.write("file", [b"overwritten"])
    (tree.root / OURS).mkdir()
    os.link(precious, tree.root / OURS / "file")
    tree.remove(OURS)
    after = precious.stat()
    assert precious.read_text() == "precious"
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert not (tree.root / "file").stat().st_mode & 0o7000  # a new file inherits no setuid bit


def test_root_replaced_while_open_is_still_used(tree, outside):
    with tree.directory(OURS, creates=True) as opened:
        tree.root.rename(tree.root.with_name("moved"))
        tree.root.symlink_to(outside)
        trees.write_in(opened, "file", [b"x"])
        delete_contents(opened)
    assert os.listdir(outside) == ["precious"]


def test_deep_directories_are_refused(tree):
    deep = tree.root / OURS
    for _ in range(40):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(RefusedFileError):
        tree.remove(OURS)


def test_deletion_ends_while_other_process_adds_files(tree, monkeypatch):
    """The stranger makes a file whenever the directory has been listed."""
    tree.write(f"{OURS}/file", [b""])
    listdir, made = os.listdir, iter(range(100_000))

    def filled(directory):
        names = listdir(directory)
        (tree.root / OURS / f"{next(made)}").touch()
        return names

    monkeypatch.setattr(os, "listdir", filled)
    with pytest.raises(OSError) as caught:
        tree.remove(OURS)
    assert caught.value.errno == errno.ENOTEMPTY


def test_named_files_are_deleted_first_and_last(tree, monkeypatch):
    for name in ("a", "first", "last", "z"):
        tree.write(f"{OURS}/{name}", [b""])
    order, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name, **how: (order.append(name), unlink(name, **how)))
    with tree.directory(OURS) as directory:
        delete_contents(directory, "first", "last")
    assert order[0] == "first" and order[-1] == "last" and len(order) == 4


def test_new_root_directory_is_durable_in_parent(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: (synced.append(os.readlink(f"/proc/self/fd/{one}")), fsync(one)))
    SafeDirectory(tmp_path / "a" / "b").write("file", [b""])
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]


@each_row(
    "target",
    ["../../blobs/../secret", "../../../secret", "../../blobs/sub/file", "/etc/passwd", "../../blobs", "other"],
)
def test_hub_snapshot_link_may_only_lead_to_own_blobs(tmp_path, target):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "1234", repository / "blobs"
    (snapshot / "sub").mkdir(parents=True), (blobs / "sub").mkdir(parents=True)
    for secret in (repository / "secret", tmp_path / "secret", snapshot / "other", blobs / "sub/file", blobs / "good"):
        secret.write_text("content")
    (snapshot / "file").symlink_to(target)
    with pytest.raises(RefusedFileError):
        SafeDirectory(snapshot).read("file", 100)
    (snapshot / "good").symlink_to("../../blobs/good")
    (snapshot / "sub/good").symlink_to("../../../blobs/good")
    (snapshot / "absolute").symlink_to(blobs / "good")
    (blobs / "again").symlink_to("good")
    (snapshot / "again").symlink_to("../../blobs/again")
    for name in ("good", "sub/good", "absolute"):
        assert SafeDirectory(snapshot).read(name, 100) == b"content"
    assert SafeDirectory(snapshot / "sub").read("good", 100) == b"content"
    with pytest.raises(RefusedFileError):
        SafeDirectory(snapshot).read("again", 100)
    repository.rename(tmp_path / "own")
    with pytest.raises(RefusedFileError):
        SafeDirectory(tmp_path / "own/snapshots/1234").read("good", 100)


def test_linked_hub_blob_directory_is_refused(tmp_path, outside):
    """Who has packed a repository may have packed a link in place of its directory of blobs."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (repository / "blobs").symlink_to(outside)
    (snapshot / "config.json").symlink_to("../../blobs/precious")
    with pytest.raises(RefusedFileError):
        SafeDirectory(snapshot).read("config.json", 100)


def test_line_length_is_limited(tmp_path):
    (tmp_path / "log").write_bytes(b"ab\n\ncd")
    assert list(SafeDirectory(tmp_path).read_lines("log", 3)) == [b"ab\n", b"\n", b"cd"]
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RefusedFileError):
        list(SafeDirectory(tmp_path).read_lines("sparse", 1000))


@each_row("plant", [Path.symlink_to, Path.hardlink_to])
def test_only_file_with_single_name_is_changed_in_place(tmp_path, plant):
    (tmp_path / "precious").write_text("precious")
    plant(tmp_path / "log", tmp_path / "precious")
    os.mkfifo(tmp_path / "fifo")
    for name in ("log", "fifo"):
        with pytest.raises(RefusedFileError):
            open_without_links(tmp_path / name, os.O_RDWR | os.O_CREAT)
    os.close(open_without_links(tmp_path / "new", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "new").is_file()


def test_large_directory_is_listed_and_deleted_linearly(tree):
    def seconds(many):
        directory = tree.root / "iter_0000001"
        directory.mkdir()
        for number in range(many):
            (directory / f"{number}").touch()
        began = time.process_time()
        assert len(tree.list_names("iter_0000001")) == many
        tree.remove("iter_0000001")
        return time.process_time() - began

    assert seconds(20_000) < 60 * seconds(2000)


def test_growing_file_is_read_up_to_limit(tree, monkeypatch):
    path = tree.root / "file"
    path.write_bytes(bytes(10))
    opened = tree.open

    def grows(name, most):
        descriptor = opened(name, most)
        os.truncate(path, 1 << 30)
        return descriptor

    monkeypatch.setattr(tree, "open", grows)
    assert len(tree.read("file", 100)) <= 100


@pytest.fixture
def synced(tmp_path, monkeypatch):
    """By name below ``tmp_path``, in the order of syncs: the bytes of a file, or the names in a directory, by then."""
    seen, fsync = [], os.fsync

    def watched(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        held = sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()
        seen.append((str(path.relative_to(tmp_path)), held))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return seen


def test_contents_are_durable_before_name(tmp_path, synced):
    write_durably(tmp_path / "file", "hello")
    SafeDirectory(tmp_path).write("parts", [b"he", memoryview(b"llo")], syncs_name=False, tag="job-1-2")
    (temporary, hello), (there, names), (tagged, again) = synced
    assert (hello, there, names, again) == (b"hello", ".", ["file"], b"hello")
    assert temporary.startswith(".file.") and tagged.startswith(".parts.job-1-2.")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "parts").read_bytes() == b"hello"


def test_temporary_file_name_is_hidden_and_random():
    for tag, begin in (("", r"\.file\."), ("job-1-2", r"\.file\.job-1-2\.")):
        names = {temporary_name("file", tag) for _ in range(100)}
        assert len(names) == 100 and all(re.fullmatch(rf"{begin}[0-9a-f]{{16}}\.tmp", name) for name in names)


def test_planted_link_is_not_followed_on_write(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("precious")
    monkeypatch.setattr(safe_directory, "temporary_name", lambda name, tag: "foreseen")
    for link in (os.symlink, os.link):
        link(tmp_path / "precious", tmp_path / "foreseen")
        with pytest.raises(FileExistsError):
            write_durably(tmp_path / "file", "text")
        (tmp_path / "foreseen").unlink(missing_ok=True)
    os.symlink(tmp_path / "precious", tmp_path / "file")  # under the final name: the link is replaced
    monkeypatch.undo()
    write_durably(tmp_path / "file", "text")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "file").is_symlink()


def test_file_is_not_renamed_if_check_refuses(tmp_path):
    (tmp_path / "file").write_text("before")

    def superseded():
        (temporary,) = tmp_path.glob(".file.job.*.tmp")
        assert temporary.read_text() == "after"  # all is written by then
        raise RuntimeError("superseded")

    with pytest.raises(RuntimeError, match="superseded"):
        SafeDirectory(tmp_path).write("file", [b"after"], tag="job", check=superseded)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_storage_makes_new_directories_durable(tmp_path, synced):
    place = LocalStorage(tmp_path / "place", in_memory=True)
    place.write("iter/part", [b"x"], is_durable=False)
    place.write("iter/manifest", [b"y"])
    place.write("run", [b"z"])
    assert [where for where, _ in synced if ".tmp" not in where] == [".", "place/iter", "place", "place"]
    assert synced[3] == ("place/iter", ["manifest", "part"])
    del synced[:]
    assert place.create("one", [b"1"]) and not place.create("one", [b"2"]) and place.read("one") == b"1"
    assert ("place", ["iter", "one", "run"]) in synced
    del synced[:]
    place.remove("iter")
    assert synced == [("place", ["one", "run"])]
    place.remove("iter")
    assert len(synced) == 1  # it was not there
