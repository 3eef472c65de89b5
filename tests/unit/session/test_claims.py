"""Files that show the owner of memory have room where the file system is full."""

from moc.session.tiers import make_room_for_files
from moc.store.storage import LocalStorage
from tests.cases import each_row


class Left(LocalStorage):
    """A directory in a file system with so many bytes left."""

    def __init__(self, root, free):
        super().__init__(root, in_memory=True)
        self.free = free

    def free_bytes(self):
        return self.free


@each_row(("free", "gives"), [(0, True), (4096, True), (1 << 30, False)])
def test_reserve_is_released_only_on_full_file_system(free, gives, tmp_path):
    place = Left(tmp_path, free)
    place.reserve.allocate(1 << 16)
    make_room_for_files(place)
    assert ((tmp_path / ".spare").stat().st_size < 1 << 16) == gives


def test_new_directory_has_no_spare_memory(tmp_path):
    make_room_for_files(Left(tmp_path / "new", 0))
    assert not (tmp_path / "new").exists()
