"""On how many workers a run has trained, from events that a run could have written."""

from moc.report.figures import Moves, Period, seconds_by_workers
from moc.report.report import draw_report, table_sections
from tests.unit.report.test_program import Story


def elastic() -> Story:
    """A run that loses one of four nodes after 10 iterations, and gets it back."""
    story = Story().start(after=4.0).usual(10)
    story.generation(2.0).tell("migration", 1.0, nodes=3, experts=4, bytes=4096, elapsed_s=1.0).start(0.5, workers=3)
    story.train(2.0, 2.0).generation(0.5)
    story.tell("migration", 0.5, nodes=4, experts=6, bytes=8192, elapsed_s=0.5).start(0.5)
    return story.usual(5)


def test_time_is_reported_by_number_of_workers():
    run = elastic().report
    assert run.periods == (Period(4, 4.0, 14.0, 10), Period(3, 17.5, 21.5, 2), Period(4, 23.0, 28.0, 5))
    assert seconds_by_workers(run.periods) == {4: 15.0, 3: 4.0}
    assert run.moves == Moves(count=2, bytes=12288, seconds=0.75, fallbacks=0)
    told = dict(dict(table_sections([run]))["members"])
    assert told["trained on so many workers"] == ["4: 15.00 s, 78.9 %\n3: 4.00 s, 21.1 %"]
    assert told["moves of experts, when they changed"] == ["2 of 6.1 kB in 750 ms"]
    assert told["checkpoints read, since experts were lost"] == ["0"]


def test_start_without_progress_is_no_period():
    run = Story().start().usual(3).generation(1.0).start(1.0, workers=3).generation(1.0).start(1.0, workers=2)
    assert [period.workers for period in run.usual(2).report.periods] == [4, 2]


def test_run_with_fixed_members_has_no_members_section():
    assert "members" not in dict(table_sections([Story().start().usual().report]))


def test_workers_are_drawn_if_their_number_changes(tmp_path):
    for name, story in {"fixed": Story().start().usual(), "elastic": elastic()}.items():
        draw_report(str(tmp_path / f"{name}.png"), [story.report], [story.events])
    heights = {}
    for name in ("fixed", "elastic"):
        data = (tmp_path / f"{name}.png").read_bytes()
        heights[name] = int.from_bytes(data[20:24], "big")
    assert heights["elastic"] > heights["fixed"]  # one panel more
