"""events.jsonl: every line is whole, whatever ended the run before."""

import json
import math

from megatron.training.events import EventLog


def lines(directory):
    return (directory / "events.jsonl").read_text().splitlines()


def test_events_are_typed_and_timed(tmp_path):
    log = EventLog(tmp_path / "new" / "directory")
    log.write("save", iteration=3, elapsed_s=0.5)
    event = json.loads(lines(tmp_path / "new" / "directory")[0])
    assert list(event)[:2] == ["type", "time"]
    assert event["type"] == "save" and event["iteration"] == 3 and event["time"] > 1e9


def test_numbers_that_json_lacks_are_null(tmp_path):
    EventLog(tmp_path).write("iteration", loss=math.nan, grad_norm=math.inf, tokens=5)
    event = json.loads(lines(tmp_path)[0])
    assert (event["loss"], event["grad_norm"], event["tokens"]) == (None, None, 5)


def test_a_torn_line_stays_alone(tmp_path):
    first = EventLog(tmp_path)
    first.write("start")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"type": "iter')
    EventLog(tmp_path).write("start")
    assert [line for line in lines(tmp_path) if line.endswith("}")] == [lines(tmp_path)[0], lines(tmp_path)[-1]]
    assert json.loads(lines(tmp_path)[-1])["type"] == "start"


def test_the_newest_of_a_kind_whoever_wrote_it(tmp_path):
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


def test_without_a_directory_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = EventLog(None)
    log.write("start")
    log.close()
    assert not list(tmp_path.iterdir())


def test_after_close_events_are_dropped(tmp_path):
    log = EventLog(tmp_path)
    log.close()
    log.write("start")
    assert lines(tmp_path) == []
