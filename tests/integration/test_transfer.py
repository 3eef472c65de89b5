"""Transfers between workers that hold and want what layouts cut anywhere."""

from tests.worlds import run_world


def test_shards_are_redistributed_in_small_pieces():
    old = [[0, 900], [800, 1680], [0, 900], [1680, 1680]]  # two hold the same, one nothing
    new = [[1680, 1680], [0, 560], [560, 1120], [333, 1680]]
    assert run_world(4, "tests.integration.transfer_bodies:exchange_shards", old=old, new=new, most=64) == [True] * 4
