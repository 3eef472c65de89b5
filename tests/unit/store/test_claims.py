"""In whose name files are written: what a name tells, and who comes after whom."""

import pytest

from moc.store.errors import SupersededError
from moc.store.ownership import Claim, Holder, refuse_superseded, successors, term_in
from tests.cases import each_row
from tests.errors import raises

OURS = Claim("launch", (1, 2), "run")


def test_claim_is_encoded_in_file_name():
    assert OURS.tag == "launch-1-2" and OURS.generation == "1.2"
    assert term_in(".file.launch-1-2.77-a.tmp") == term_in(".rank_00000.launch-1-2") == ("launch", (1, 2))
    assert term_in(".file.77-a.tmp") is term_in("launch-1-2") is term_in(".x.launch-1") is None
    assert Claim("launch") == Claim("launch", (0, 0), "")
    odd = Claim("not a word")
    assert term_in(f".lock.{odd.tag}") == (odd.tag.partition("-")[0], (0, 0)) and odd.made(f".lock.{odd.tag}")
    one, other = Claim.of_process(), Claim.of_process()
    assert one.job != other.job and len(one.job) == 16


@each_row(
    ("tag", "superseded", "made"),
    [
        ("launch-1-1", True, True),
        ("launch-1-2", False, True),
        ("launch-1-3", False, True),
        ("launch-0-9", True, True),
        ("launch-2-0", False, True),
        ("other-9-9", True, False),
        ("none", False, False),
    ],
)
def test_older_generations_and_other_launches_are_superseded(tag, superseded, made):
    assert (OURS.supersedes(f".file.{tag}.x.tmp"), OURS.made(f".file.{tag}.x.tmp")) == (superseded, made)


def test_rank_assignment_reads_own_and_older_format():
    holder = Holder.this(OURS, ("first", "second"))
    assert Holder.from_json(holder.to_json()) == holder
    old = Holder.from_json('{"job": "first"}')
    assert (old.claim, old.pid, old.before) == (Claim("first", (0, 0), ""), 0, ())


def test_older_claim_is_refused_by_newer_owner():
    refuse_superseded(OURS, None, "here")
    for term in ((0, 9), (1, 1), (1, 2)):
        refuse_superseded(OURS, Holder(Claim("launch", term), "host", 7), "here")
    for term in ((1, 3), (2, 0)):
        with raises("directory-taken-over", f"generation {term[0]}.{term[1]}", "process 7"):
            refuse_superseded(OURS, Holder(Claim("launch", term), "host", 7), "here")
    with raises("directory-taken-over", "process 7 on host", "here", "--ckpt-dir"):
        refuse_superseded(OURS, Holder(Claim("other", (0, 0)), "host", 7), "here")


def test_new_launch_supersedes_earlier_launches():
    assert successors(OURS, None, "here") == ()
    assert successors(OURS, Holder(Claim("launch"), "host", 7, ("first",)), "here") == ("first",)
    assert successors(OURS, Holder(Claim("second"), "host", 7, ("first",)), "here") == ("first", "second")
    with pytest.raises(SupersededError):
        successors(OURS, Holder(Claim("second"), "host", 7, ("launch",)), "here")
    many = tuple(map(str, range(200)))
    assert successors(OURS, Holder(Claim("second"), "host", 7, many), "here") == (*many[1:], "second")
