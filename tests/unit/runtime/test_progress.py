"""What a worker tells of its main thread."""

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moc.runtime.progress import HANG_CAPS, HANG_FACTOR, HANG_FLOOR_S, HangLimits, Progress, parse_hang_caps
from tests.cases import each_row


def test_section_time_is_measured_when_next_begins():
    progress = Progress()
    nothing = {"section": None, "since": 0, "waits": False, "longest": {}, "iteration": None}
    assert progress.report() | {"since": 0} == nothing
    progress.enter("step")
    time.sleep(0.01)
    progress.enter("step")
    first = progress.report()
    progress.enter("save")
    second = progress.report()
    assert first["section"] == "step" and 0.01 <= first["longest"]["step"] == second["longest"]["step"]
    assert second["section"] == "save" and "save" not in second["longest"]


def test_discarded_section_is_not_measured():
    progress = Progress()
    progress.enter("step")
    progress.discard()
    assert progress.report()["section"] is None and progress.report()["longest"] == {}
    progress.enter("setup")
    assert progress.report()["longest"] == {}


def test_report_shows_waiting_until_wait_ends():
    progress = Progress()
    try:
        with progress.waiting():
            assert progress.report()["waits"]
            raise RuntimeError
    except RuntimeError:
        assert not progress.report()["waits"]


REPOSITORY = Path(__file__).resolve().parents[3]


@each_row(
    "longest, cap, seconds",
    [
        (None, 1800, 1800),  # nothing was measured
        (0.1, 1800, HANG_FLOOR_S),
        (20, 1800, HANG_FACTOR * 20),
        (500, 1800, 1800),
        (0.1, 5, 5),
    ],
)
def test_limit_follows_measurement_and_cap(longest, cap, seconds):
    limits = HangLimits({"step": cap}, {} if longest is None else {"step": longest})
    assert limits.limit("step", waits=False) == seconds


def test_hang_caps_override_defaults_of_named_sections():
    assert parse_hang_caps("step=600,save=90.5") == HANG_CAPS | {"step": 600.0, "save": 90.5}
    assert parse_hang_caps("") == HANG_CAPS


@each_row(
    "text, complaint",
    [("stop=3", "no section 'stop'"), ("step", "no number"), ("step=soon", "no number"), ("step=0", "no time"),
     ("step=nan", "no time")],
)  # fmt: skip
def test_invalid_hang_cap_error_names_cause(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_hang_caps(text)


def test_only_regular_durations_are_learned():
    limits = HangLimits(dict(HANG_CAPS))
    limits.learn({"step": 30.0, "save": 0.1, "setup": 1.0})
    limits.learn({"step": 8.0})
    assert limits.limit("step", waits=False) == 300.0
    assert (
        limits.limit("save", waits=False) == HANG_CAPS["save"]
        and limits.limit("setup", waits=False) == HANG_CAPS["setup"]
    )


def test_every_progress_section_has_hang_cap():
    sections = {
        call.args[0].value
        for path in (REPOSITORY / "megatron/pretraining").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call).startswith("progress('")
    }
    assert sections == {*HANG_CAPS}


def test_waiting_worker_gets_limit_of_peer_section():
    limits = HangLimits(HANG_CAPS | {"save": 5000.0})
    limits.learn({"step": 1.0})
    assert limits.limit("step", waits=True) == 5000.0
    assert limits.limit("own_section", waits=False) == 5000.0


def test_expired_lease_ends_worker_whose_console_is_full():
    """Otherwise two workers would have its rank, if its agent is stopped."""
    code = "from moc.runtime.progress import Lease; lease = Lease.create(); lease.end = 0.0; lease.watch()"
    with open("/dev/full", "w") as full:
        worker = subprocess.run([sys.executable, "-c", code], stderr=full, check=False)
    assert worker.returncode == -signal.SIGKILL
