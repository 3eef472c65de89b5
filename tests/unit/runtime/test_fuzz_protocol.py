"""Two seconds of random attacks on the wire; ``fuzz_protocol.py`` does it for longer."""

from tests.unit.runtime.fuzz_protocol import fuzz


def test_nothing_falls_over_and_nobody_gets_in():
    counts = fuzz(seconds=2, seed=5)
    assert set(counts) >= {"between, all", "between, refused", "stranger, refused", "server, served", "server, refused"}
