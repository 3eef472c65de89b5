"""Injected faults in a worker: whom the flags may name, and what is told."""

import json
import shlex

import pytest

from megatron.pretraining.entry.offline import config_of_words
from megatron.pretraining.process import cpu
from moc.fault_points import on_reach, reach
from moc.runtime.job import Job
from tests.errors import raises
from tests.unit.pretraining.flags import BASE

cpu.install()
from megatron.pretraining.process.initialize import inject_faults  # noqa: E402


@pytest.fixture(autouse=True)
def nobody_listens_afterwards():
    yield
    on_reach(None)


def armed(tmp_path, fault):
    inject_faults(config_of_words([*shlex.split(BASE), "--log-dir", str(tmp_path), "--inject", fault], None), Job())


def test_fault_for_absent_worker_is_refused(tmp_path):
    with raises("fault-without-target", "--inject kill ranks=0,1"):
        armed(tmp_path, "kill ranks=0,1 iteration=2")


def test_fault_is_logged_as_event_and_line(tmp_path, capsys):
    armed(tmp_path, "slow rank=0 iteration=2 seconds=0.001")
    for iteration in (1, 2, 3):
        reach("start", iteration)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event.pop("time") > 0
    assert event == dict(type="inject", action="slow", rank=0, iteration=2, point="start")
    assert capsys.readouterr().out == "injected: slow of worker 0 in iteration 2, start\n"
