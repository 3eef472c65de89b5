"""The comparison of a recovered state with the digests of its iteration."""

from moc.session.digests import KnownDigests, LocalPart, compare_digests
from moc.state.digests import MODULE

KEPT = LocalPart("chunks", "a", is_kept=True)
CHANGED = LocalPart("chunks", "b", is_kept=False)
LOADED = LocalPart("chunks", "a")
OTHER = LocalPart("chunks", "b")
REST = LocalPart("others", "c")
RIGHT = {("embedding", "master"): 5}


def compared(*parts: LocalPart, total=RIGHT, reference=None, **more):
    """The result for one operator."""
    return compare_digests(7, [{"embedding": part} for part in parts], total, reference, **more)


def test_known_digests_verify_the_complete_state():
    assert compared(LOADED, REST, reference=RIGHT).verified == 1
    wrong = compared(LOADED, REST, reference={("embedding", "master"): 6})
    assert (wrong.verified, wrong.wrong, wrong.unverified) == (0, ("embedding",), ())


def test_without_them_the_workers_that_keep_their_state_verify_it():
    assert compared(KEPT, LOADED).verified == 1  # a replica of what the other has kept
    assert compared(KEPT, REST).unverified == ("embedding",)  # the rest is loaded, and nothing is known of it
    assert compared(LOADED, LOADED).unverified == ("embedding",)


def test_changed_state_is_named_with_its_worker():
    for parts in ((KEPT, CHANGED), (KEPT, OTHER)):
        found = compared(*parts)
        assert (found.wrong, found.ranks) == (("embedding",), {1})
    assert compared(OTHER, KEPT).ranks == {0}  # the worker that has kept its state is right
    assert compared(CHANGED, REST, reference=RIGHT).wrong == ("embedding",)


def test_stale_experts_have_no_digest():
    found = compared(LOADED, reference={("embedding", "master"): 6}, stale=["embedding"])
    assert (found.verified, found.unverified, found.wrong) == (0, ("embedding",), ())


def test_padding_of_another_layout_is_not_compared():
    found = compared(LOADED, total={("embedding", "master:96"): 5}, reference={("embedding", "master:128"): 6})
    assert found.unverified == ("embedding",)


def test_state_of_user_modules_that_a_conversion_omits_is_not_compared():
    total = RIGHT | {("embedding", MODULE): 7}
    assert compared(LOADED, total=total, reference=RIGHT).unverified == ("embedding",)
    assert compared(LOADED, total=total, reference=RIGHT | {("embedding", MODULE): 8}).wrong == ("embedding",)


def test_few_iterations_are_remembered():
    known = KnownDigests()
    for iteration in range(9):
        known.add(iteration, {})
    assert sorted(known.totals) == [5, 6, 7, 8]
