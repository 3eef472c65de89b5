"""Slots: what has no other name is written again."""

import os

import pytest

from moc.store.reserved_memory import allocate_file, find_free_file, reserve_files
from moc.store.storage import RESERVE_FILE, SpaceReserve
from tests.cases import each_row


def test_buffer_is_free_only_without_name(tmp_path):
    first = find_free_file(tmp_path / "slots", "rank_00000", 100)
    assert first.stat().st_size == 100 and find_free_file(tmp_path / "slots", "rank_00000", 80) == first
    os.link(first, tmp_path / "named")
    second = find_free_file(tmp_path / "slots", "rank_00000", 100)
    assert second != first and find_free_file(tmp_path / "slots", "rank_00001", 100) not in (first, second)
    (tmp_path / "named").unlink()
    inode = first.stat().st_ino
    assert find_free_file(tmp_path / "slots", "rank_00000", 100) == first and first.stat().st_ino == inode


def test_too_small_file_is_replaced(tmp_path):
    small = find_free_file(tmp_path, "rank_00000", 10)
    assert find_free_file(tmp_path, "rank_00000", 11) == small and small.stat().st_size == 11
    assert list(tmp_path.iterdir()) == [small]


def test_each_size_has_a_buffer_and_others_are_removable(tmp_path):
    reserve_files(tmp_path, "rank_00000", [10, 30, 20])
    os.link(tmp_path / "rank_00000.2", tmp_path / "named")  # of 10 bytes
    reserve_files(tmp_path, "rank_00000", [25, 15])
    sizes = lambda: sorted(path.stat().st_size for path in tmp_path.glob("rank_*"))  # noqa: E731
    assert sizes() == [10, 20, 30]
    reserve_files(tmp_path, "rank_00000", [40, 25], removes_others=True)
    assert sizes() == [10, 30, 40]


def test_allocated_file_is_private_to_its_owner(tmp_path):
    for nbytes in (0, 5):
        os.close(allocate_file(tmp_path / str(nbytes), nbytes))
        assert (tmp_path / str(nbytes)).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        allocate_file(tmp_path / "5", 5)


def test_failed_allocation_leaves_no_file(tmp_path):
    with pytest.raises(OSError):
        allocate_file(tmp_path / "slots" / "rank_00000.0", 1 << 62)
    assert not list((tmp_path / "slots").iterdir())


def test_reserve_is_released_while_large_enough(tmp_path):
    room = SpaceReserve(tmp_path / RESERVE_FILE)
    assert not room.release(1)
    room.allocate(3 * 4096)
    room.allocate(4096)
    assert room.release(1) and not room.release(1)
    assert (tmp_path / RESERVE_FILE).stat().st_size == 4096


@each_row("plant", ["link", "hard link", "FIFO"])
def test_foreign_file_is_not_truncated(tmp_path, plant):
    precious, planted = tmp_path / "precious", tmp_path / "memory" / RESERVE_FILE
    precious.write_bytes(bytes(1 << 16))
    planted.parent.mkdir()
    {"link": planted.symlink_to, "hard link": planted.hardlink_to}.get(plant, lambda _: os.mkfifo(planted))(precious)
    room = SpaceReserve(planted)
    assert not room.release(1)
    room.allocate(1 << 17)
    assert precious.read_bytes() == bytes(1 << 16) and precious.stat().st_nlink == 1
    assert planted.is_file() and not planted.is_symlink() and planted.stat().st_size == 1 << 17
