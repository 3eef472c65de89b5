"""The files of a run are open on rank 0 alone, whoever that is."""

import json
from dataclasses import replace

from megatron.pretraining.process import cpu
from moc.state.record import StepRecord
from tests.replicas import replicas_world
from tests.unit.pretraining.flags import parse

cpu.install()

from megatron.pretraining.logging.records import EventRecorder  # noqa: E402


class Log(EventRecorder):
    """Shows nothing."""

    def _show(self, *_):
        pass

    def _plot_event(self, *_):
        pass


def test_log_files_follow_rank_0(tmp_path, capsys):
    second = replicas_world(1, 2)
    log = Log(parse(f"--log-dir {tmp_path}"), second)
    for place in (second, replace(second, rank=0, size=1), replace(second, rank=0), second):
        log.move(place)
        log.message(f"rank {place.rank} of {place.size}")
        log.events.write("save", iteration=place.rank, elapsed_s=place.size)
    log.close()
    written = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in written] == [0, 0]
    assert [json.loads(line)["elapsed_s"] for line in written] == [1, 2]
    assert [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()] == ["rank 0 of 1", "rank 0 of 2"]


def test_new_reporter_does_not_repeat_reported_iterations(tmp_path):
    """A worker that comes opens the files when it is built; the others train on until they take it in."""
    first = replicas_world(0, 2)
    before, comes = (Log(parse(f"--log-dir {tmp_path}"), first) for _ in range(2))
    records = {i: StepRecord(i, 2.0, 1.0, 1.0, False, 4, 1e-3, 4) for i in (1, 2, 3)}
    before.iteration(records[1], 4, {})
    before.iteration(records[2], 8, {})
    comes.catch_up(records[2], 8, {})
    assert told(tmp_path) == [1, 2]
    comes.catch_up(records[3], 12, {})  # which its reporter was lost before it told
    comes.catch_up(records[3], 12, {})
    assert told(tmp_path) == [1, 2, 3]
    before.close()
    comes.close()


def told(directory):
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event["iteration"] for event in events if event["type"] == "iteration"]
