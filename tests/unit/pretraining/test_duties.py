"""What is due after an iteration, and what was missed."""

from megatron.pretraining.duties import Done, Duties, due, duties_after, missed
from tests.cases import each_row
from tests.unit.pretraining.flags import parse

EVERY = parse("--eval-interval 3 --save s --save-interval 4 --exit-interval 6")


@each_row(("interval", "iteration", "is_due"), [(None, 3, False), (3, 0, False), (3, 6, True), (3, 7, False)])
def test_action_is_due_at_multiples_of_interval(interval, iteration, is_due):
    assert due(interval, iteration) is is_due


def test_duties_after_iteration_follow_intervals():
    assert duties_after(EVERY, 6, stops=False) == Duties(evaluates=True, ends=True)
    assert duties_after(EVERY, 4, stops=True) == Duties(saves=True, stops=True)


@each_row(
    ("done", "duties"),
    [
        (Done(by_run=True, by_job=True, by_workers=True), Duties(True, True, True, True)),
        (Done(evaluated=12, saved=12, by_run=True, by_job=True), Duties(ends=True)),
        (Done(evaluated=9, saved=8, by_run=True), Duties(evaluates=True, saves=True)),
        (Done(saved=16, evaluated=15, by_run=True), Duties()),
        (Done(), Duties()),
    ],
)
def test_missed_duties_follow_from_completed_ones(done, duties):
    assert missed(EVERY, 12, True, done) == duties


def test_abandoned_save_is_overdue():
    assert missed(EVERY, 10, False, Done(saved=4, by_run=True)) == Duties(saves=True)
    assert missed(EVERY, 10, False, Done(saved=8, by_run=True)) == Duties()
