"""The picture of a recovery, from what a job tells."""

from benchmarks import recovery_picture
from tests.cases import each_row

KILLED = 110.0


def event(kind, time, **fields):
    return {"type": kind, "time": time, **fields}


def iteration(number, time):
    return event("iteration", time, iteration=number, elapsed_s=1.0, loss=1.0 / number, grad_norm=0.5)


EVENTS = [
    *(iteration(number, 100.0 + number) for number in range(1, 10)),
    event("generation", 110.6, met_s=0.5),
    event("resume", 110.8),
    *(iteration(number, 102.0 + number) for number in range(10, 14)),
]
SAID = [(90.0, "mocrun: worker 2 is process 1"), (110.1, "mocrun: worker 2 is process 2")]


@each_row("same", [True, False])
def test_recovery_picture_is_drawn(tmp_path, same):
    recovery_picture.draw(tmp_path / "r.png", EVENTS, SAID, KILLED, same)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_compared_by_iteration():
    history = recovery_picture.history(EVENTS)
    assert list(history) == [*range(1, 14)] and history[4] == (0.25, 0.5)
    assert recovery_picture.history(EVENTS[:-1]) != history
