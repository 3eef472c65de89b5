"""The benchmark of reserved memory allocates what a start allocates, and leaves nothing."""

from benchmarks.reserve_cost import allocations, measured


def test_every_way_allocates_all_bytes(tmp_path):
    for action in allocations(tmp_path, 1 << 20).values():
        kept = action()
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        assert file.stat().st_blocks * 512 >= 1 << 20
        del kept
        file.unlink()


def test_every_way_is_measured_equally_often_and_nothing_is_left(tmp_path):
    found = measured(tmp_path, 1 << 12, 3)
    assert [len(samples) for samples in found.values()] == [3, 3]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
