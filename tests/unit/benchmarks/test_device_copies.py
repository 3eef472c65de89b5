"""The benchmark of copies beside training, on the CPU: its cases are what their names say."""

import torch

from benchmarks import device_copies
from benchmarks.device_copies import MB, Size, measure


def test_cases_have_their_pieces_and_tensors(monkeypatch):
    monkeypatch.setattr(device_copies, "PIECES", {"whole": 1 << 60, "2 MB": 2 * MB})
    monkeypatch.setattr(device_copies, "TENSORS", 30)
    told = measure(torch.device("cpu"), Size(amounts=(6 * MB,), iterations_ms=(1,), side=8))
    seen = [tuple(one[name] for name in ("flat", "piece", "calls", "tensors", "bytes")) for one in told["cases"]]
    few = 30 * (6 * MB // 4 // 30) * 4
    assert seen == [
        (True, "whole", 1, 1, 6 * MB), (True, "2 MB", 3, 1, 6 * MB), (False, "whole", 1, 30, few),
        (False, "2 MB", 3, 30, few),
    ]  # fmt: skip
    assert [one["most_bytes_of_a_call"] <= 2 * MB for one in told["cases"]] == [False, True, False, True]
    assert set(told["limits"]) == {"locked", "not locked"} and all(rate > 0 for rate in told["limits"].values())
