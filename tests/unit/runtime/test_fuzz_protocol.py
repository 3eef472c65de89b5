"""Two seconds of random attacks on the wire; ``fuzz_protocol.py`` does it for longer."""

from tests.unit.runtime.fuzz_protocol import fuzz


def test_fuzzed_protocol_neither_crashes_nor_admits_peers():
    counts = fuzz(seconds=2, seed=5)
    assert set(counts) >= {"between, all", "between, refused", "stranger, refused", "server, served", "server, refused"}
