"""What a vote tells of snapshots that are under way."""

from concurrent.futures import Future
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from moc.session.peers import Copied
from moc.session.queues import PER_VOTE, Queues, told_of


def future(done: bool, result: object = None) -> Future:
    made = Future()
    if done:
        made.set_result(result)
    return made


def taken(number: int, done: bool) -> SimpleNamespace:
    layout, capture = SimpleNamespace(nbytes=number), SimpleNamespace(seconds=number, bubble_bytes=number)
    facts = dict(layout=layout, capture=capture, seal_s=number, persisted_bytes=number, persist_s=number, retries=0)
    snapshot = SimpleNamespace(sealed=future(done), persisted=future(done), **facts)
    return SimpleNamespace(snapshot=snapshot, copied=future(done, Copied(number, float(number))))


def ballot(*done: bool) -> dict[str, float]:
    queues = Queues()
    for queue in (queues.copying, queues.replicating, queues.writing):
        queue.extend(taken(number, is_done) for number, is_done in enumerate(done, 1))
    return queues.ballot()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_all_have_what_all_have_in_order(workers):
    votes = [ballot(*done) for done in workers]
    tally = {name: sum(vote[name] for vote in votes) for name in votes[0]}
    common = min([*done, False].index(False) for done in workers)
    for place in range(PER_VOTE):
        told = told_of(tally, place)
        for what in ("copied", "replicated", "written"):
            assert (told[f"snapshot_{what}"] == len(workers)) == (place < common)


def test_one_that_was_late_does_not_make_the_next_one_late():
    vote = ballot(True, True)
    assert [told_of(vote, place)["snapshot_copied"] for place in range(2)] == [1, 1]
    assert [told_of(vote, place)["snapshot_bytes"] for place in range(2)] == [1, 2]
    assert [told_of(vote, place)["snapshot_replicated_bytes"] for place in range(2)] == [1, 2]
    assert not any(ballot(False, True).values())
    assert not any(ballot().values())
