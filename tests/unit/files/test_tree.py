"""Nothing outside of a directory is read, written or deleted, whatever the directory contains."""

import os
import socket
import subprocess

import pytest

from moc.files import tree as trees
from moc.files.tree import RefusedFileError, Tree, empty

OURS = "iter_0000100"


@pytest.fixture
def outside(tmp_path):
    """A directory with a file, beside the one under test."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return tmp_path / "outside"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree").mkdir()
    return Tree(tmp_path / "tree")


def test_a_link_is_deleted_and_its_target_is_not(tree, outside):
    (tree.root / OURS).symlink_to("../outside")
    (tree.root / "iter_0000200").mkdir()
    (tree.root / "iter_0000200" / "inner").symlink_to("../../outside")
    tree.remove(OURS)
    tree.remove("iter_0000200")
    assert tree.names() == [] and (outside / "precious").read_text() == "precious"


def test_nothing_is_read_or_written_through_a_link(tree, outside):
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
    assert tree.names(OURS) == [] and tree.refused() == [OURS]
    assert (outside / "precious").read_text() == "precious" and tree.read("link", 3) == b"new"


@pytest.mark.parametrize(
    "path", ["../outside/precious", "/etc/passwd", "a/../../outside/precious", "..", "a//b", "a\0b"]
)
def test_no_path_leads_out(tree, outside, path):
    for action in (lambda: tree.read(path, 100), lambda: tree.write(path, [b""]), lambda: tree.remove(path)):
        with pytest.raises(ValueError):
            action()
    assert (outside / "precious").read_text() == "precious"


def test_only_regular_files_within_their_limit_are_read(tree):
    os.mkfifo(tree.root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree.root / "socket"))
    (tree.root / "directory").mkdir()
    with open(tree.root / "sparse", "wb") as file:
        file.truncate(1 << 40)
    for name in ("fifo", "socket", "directory", "sparse"):
        with pytest.raises(RefusedFileError):
            tree.read(name, trees.MANIFEST)
    (tree.root / "exact").write_bytes(b"x" * 10)
    assert tree.read("exact", 10) == b"x" * 10
    with pytest.raises(RefusedFileError):
        tree.read("exact", 9)


def test_only_names_that_this_package_makes_are_deleted(tree):
    kept = ["notes.txt", "data", "iter_5", ".git", "latest_checkpointed_iteration.txt"]
    gone = [OURS, ".iter_0000100.job-0-1.incomplete", ".fence", ".lock.job-0-1", ".manifest.json.0123456789abcdef.tmp"]
    for name in kept + gone:
        (tree.root / name).mkdir()
    for name in kept:
        with pytest.raises(RefusedFileError):
            tree.remove(name)
    for name in gone:
        tree.remove(name)
    assert tree.names() == sorted(kept)
    Tree(tree.root, ours=True).remove("data")
    assert "data" not in tree.names()


def test_a_directory_that_is_replaced_by_a_link_is_not_followed(tree, outside, monkeypatch):
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_another_mount_is_not_entered(tree, outside):
    (tree.root / OURS / "mounted").mkdir(parents=True)
    mounted = subprocess.run(["mount", "--bind", outside, tree.root / OURS / "mounted"], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine cannot bind-mount: {mounted.stderr}")
    try:
        with pytest.raises(RefusedFileError):
            tree.remove(OURS)
        assert (outside / "precious").read_text() == "precious"
    finally:
        subprocess.run(["umount", tree.root / OURS / "mounted"], check=True)


def test_deep_directories_are_refused(tree):
    deep = tree.root / OURS
    for _ in range(40):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(RefusedFileError):
        tree.remove(OURS)


def test_the_order_of_deletions(tree, monkeypatch):
    for name in ("a", "first", "last", "z"):
        tree.write(f"{OURS}/{name}", [b""])
    order, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name, **how: (order.append(name), unlink(name, **how)))
    with tree.directory(OURS) as directory:
        empty(directory, "first", "last")
    assert order[0] == "first" and order[-1] == "last" and len(order) == 4


def test_a_new_root_is_durable_in_its_parent(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: (synced.append(os.readlink(f"/proc/self/fd/{one}")), fsync(one)))
    Tree(tmp_path / "a" / "b").write("file", [b""])
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]
