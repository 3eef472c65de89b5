"""Spare room is given up from a file of this package alone."""

import os

import pytest

from moc.store.spare import NAME, SpareRoom


def test_room_is_given_up_until_there_is_too_little(tmp_path):
    room = SpareRoom(tmp_path / NAME)
    assert not room.spend(1)
    room.fill(3 * 4096)
    room.fill(4096)
    assert room.spend(1) and not room.spend(1)
    assert (tmp_path / NAME).stat().st_size == 4096


@pytest.mark.parametrize("plant", ["link", "hard link", "FIFO"])
def test_a_file_of_others_is_not_shortened(tmp_path, plant):
    precious, planted = tmp_path / "precious", tmp_path / "memory" / NAME
    precious.write_bytes(bytes(1 << 16))
    planted.parent.mkdir()
    {"link": planted.symlink_to, "hard link": planted.hardlink_to}.get(plant, lambda _: os.mkfifo(planted))(precious)
    room = SpareRoom(planted)
    assert not room.spend(1)
    room.fill(1 << 17)
    assert precious.read_bytes() == bytes(1 << 16) and precious.stat().st_nlink == 1
    assert planted.is_file() and not planted.is_symlink() and planted.stat().st_size == 1 << 17
