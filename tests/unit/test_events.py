"""events.jsonl: every line is whole, whatever ended the run before."""

import json
import math
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moc.errors import codes_in
from moc.events import EventLog, event_directory
from moc.files.event_log import SCHEMA, append_event
from moc.runtime import environment
from tests.cases import each_row
from tests.errors import only_code


def lines(directory):
    return (directory / "events.jsonl").read_text().splitlines()


def test_events_have_type_and_time(tmp_path):
    log = EventLog(tmp_path / "new" / "directory")
    log.write("save", iteration=3, elapsed_s=0.5)
    event = json.loads(lines(tmp_path / "new" / "directory")[0])
    assert list(event)[:2] == ["type", "time"]
    assert event["type"] == "save" and event["iteration"] == 3 and event["time"] > 1e9


def test_numbers_missing_in_json_are_null(tmp_path):
    EventLog(tmp_path).write("iteration", loss=math.nan, grad_norm=math.inf, tokens=5)
    event = json.loads(lines(tmp_path)[0])
    assert (event["loss"], event["grad_norm"], event["tokens"]) == (None, None, 5)


def test_values_missing_in_json_do_not_end_training(tmp_path):
    number, loads = np.float32(0.5), {"0": math.nan, "1": 1.0}
    EventLog(tmp_path).write("iteration", gauge=number, max_violation_by_layer=loads, other={1, 2})
    event = json.loads(lines(tmp_path)[0], parse_constant=pytest.fail)
    assert (event["gauge"], event["max_violation_by_layer"], event["other"]) == (0.5, {"0": None, "1": 1.0}, "{1, 2}")


def test_event_that_violates_schema_is_reported_once(tmp_path):
    said = []
    log = EventLog(tmp_path, said.append)
    log.write("save", iteration=3, elapsed_s=0.5)
    for _ in range(2):
        log.write("save", iteration=3, colour="red")
        log.write("unknown")
    assert [only_code(text) for text in said] == ["event-deviates"] * 2 and "colour" in said[0]
    assert len(lines(tmp_path)) == 5


def test_start_event_has_schema_version(tmp_path):
    EventLog(tmp_path).write("start", iteration=0)
    assert json.loads(lines(tmp_path)[0])["schema"] == SCHEMA


def test_torn_line_is_not_continued(tmp_path):
    first = EventLog(tmp_path)
    first.write("start")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"type": "iter')
    EventLog(tmp_path).write("start")
    assert [line for line in lines(tmp_path) if line.endswith("}")] == [lines(tmp_path)[0], lines(tmp_path)[-1]]
    assert json.loads(lines(tmp_path)[-1])["type"] == "start"


def test_newest_event_of_type_is_found_for_any_writer(tmp_path):
    log = EventLog(tmp_path)
    assert log.newest("iteration") == {}
    for iteration in (1, 2):
        log.write("iteration", iteration=iteration)
    log.write("save", iteration=7)
    log.close()
    with open(tmp_path / "events.jsonl", "a") as torn:
        torn.write('{"type": "iteration", "iter')
    assert EventLog(tmp_path).newest("iteration")["iteration"] == 2
    assert EventLog(None).newest("iteration") == {}


def test_log_without_directory_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog(None)
    log.write("start")
    log.close()
    assert not list(tmp_path.iterdir())


def test_events_after_close_are_dropped(tmp_path):
    log = EventLog(tmp_path)
    log.close()
    log.write("start")
    assert lines(tmp_path) == []


def told_by(log: EventLog, directory) -> list[str]:
    """What was said is appended, and the kinds of the events that are there."""
    log.close()
    return [json.loads(line)["type"] for line in lines(directory)]


def test_missing_directory_is_harmless_and_events_are_kept(tmp_path):
    """Neither its removal nor a file in its place ends a run; what was to be written is, when that works again."""
    directory, said = tmp_path / "log", []
    log = EventLog(directory, said.append)
    log.write("fallback", reason="x", experts=0)
    shutil.rmtree(directory)
    log.write("save", iteration=1, elapsed_s=0)  # it is made again
    assert len(lines(directory)) == 1 and not said
    shutil.rmtree(directory)
    directory.write_text("in its place")
    log.write("save", iteration=2, elapsed_s=0)
    log.write("save", iteration=3, elapsed_s=0)
    assert len(said) == 1 and str(directory) in said[0] and only_code(said[0]) == "log-unwritable"
    directory.unlink()
    assert told_by(log, directory) == ["save", "save", "log_failed"]
    assert len(said) == 2 and not codes_in(said[1])


@each_row("plant", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_nothing_is_appended_through_planted_link(tmp_path, plant):
    """It is as if it could not be written, until the link is gone."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "log").mkdir()
    plant(tmp_path / "log" / "events.jsonl", tmp_path / "precious")
    said = []
    log = EventLog(tmp_path / "log", said.append)
    log.write("fallback", reason="x", experts=0)
    assert len(said) == 1 and (tmp_path / "precious").read_text() == "precious"
    (tmp_path / "log" / "events.jsonl").unlink()
    assert told_by(log, tmp_path / "log") == ["fallback", "log_failed"]


def test_line_without_room_is_harmless_and_completed_later(tmp_path):
    """A line of which a part was written goes on where it ended, when there is room again."""
    said = []
    log = EventLog(tmp_path, said.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
        log.write("save", iteration=1, elapsed_s=0.123456789)
        log.write("save", iteration=2, elapsed_s=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(said) == 1
    log.close()
    told = [json.loads(line) for line in lines(tmp_path) if line.endswith("}")]
    assert [event.get("iteration") for event in told] == [1, 2, None]
    assert (told[2]["type"], told[2]["what"], told[2]["lost"]) == ("log_failed", "events", 0)


def test_hanging_write_is_waited_for_once(tmp_path, monkeypatch):
    log, hangs, opened = EventLog(tmp_path), threading.Event(), EventLog._open
    monkeypatch.setattr(EventLog, "_open", lambda log: (hangs.wait(), opened(log)))
    begun = time.monotonic()
    log.write("save", iteration=1, elapsed_s=0)
    once = time.monotonic() - begun
    for iteration in range(2, 7):
        log.write("save", iteration=iteration, elapsed_s=0)
    assert time.monotonic() - begun < 2 * once
    hangs.set()
    log.write("save")
    log.close()
    assert [json.loads(line).get("iteration") for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, None]


def test_monitor_directory_is_default_and_links_event_file(tmp_path, monkeypatch):
    assert event_directory(None) is None
    monkeypatch.setenv(environment.MONITOR, str(tmp_path))
    assert event_directory("log") == "log" and event_directory(None) == str(tmp_path)
    for directory in (tmp_path / "log", tmp_path):
        log = EventLog(directory)
        log.write("note")
        log.close()
        link = tmp_path / environment.EVENTS_LINK
        assert link.samefile(directory / "events.jsonl") and '"note"' in link.read_text()
    monkeypatch.setenv(environment.MONITOR, str(tmp_path / "removed"))
    log = EventLog(tmp_path)
    log.write("other")
    log.close()
    assert '"other"' in (tmp_path / "events.jsonl").read_text()


def test_listener_receives_events_without_file():
    heard = []
    EventLog(None, listen=lambda event, fields: heard.append((event, fields))).write("note", value=1)
    assert heard == [("note", {"value": 1})]


def test_event_of_other_process_follows_torn_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with pytest.raises(FileNotFoundError):
        append_event(path, "end", reason="r", code=1)
    path.write_text('{"type": "iter')
    append_event(path, "end", reason="worker lost", code=1)
    append_event(path, "end", reason="again", code=1)
    assert [event["reason"] for event in map(json.loads, path.read_text().splitlines()[1:])] == [
        "worker lost",
        "again",
    ]
