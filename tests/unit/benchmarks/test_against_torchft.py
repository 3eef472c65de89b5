"""The comparison with torchft counts changed lines and equal weights from its records."""

from benchmarks.against_torchft import PROGRAMS, _updates_after, changed_lines, rows


def test_changed_lines_are_counted_against_plain_pytorch():
    counts = {name: changed_lines(name) for name in PROGRAMS}
    assert counts["plain PyTorch"] == 0 and 10 < counts["moc.torch"] < counts["torchft, 2 replicas needed"]


def test_row_has_ratio_times_and_equal_weights():
    killed = {"first_update_s": 0.5, "all_update_s": None, "repeated": 1, "weights": ["a", "a"]}
    measured = {name: [{"undisturbed": {"iteration_s": 0.01, "weights": ["a", "a"]}}] for name in PROGRAMS}
    measured["moc.torch"] = [{"undisturbed": {"iteration_s": 0.02, "weights": ["a", "a"]}, "killed": killed}]
    of_moc = next(row for row in rows(measured) if row[0] == "moc.torch")
    assert of_moc[2:] == ("20.00", "2.00", "0.50", "", "1", "1 of 1")
    measured["moc.torch"][0]["killed"] = killed | {"weights": ["a", "b"]}
    assert next(row for row in rows(measured) if row[0] == "moc.torch")[-1] == "0 of 1"


def test_iteration_started_before_kill_is_not_useful_work():
    records = [("body", 1.0), ("update", 2.0), ("body", 3.0), ("body", 4.0), ("update", 5.0)]
    assert _updates_after([{"event": event, "time": time} for event, time in records], 1.5) == [3.5]
