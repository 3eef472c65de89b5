"""What a worker tells of its main thread."""

import time

from moc.runtime.progress import Progress


def test_a_section_is_measured_when_the_next_begins():
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


def test_what_was_cut_off_is_not_measured():
    progress = Progress()
    progress.enter("step")
    progress.forget()
    assert progress.report()["section"] is None and progress.report()["longest"] == {}
    progress.enter("setup")
    assert progress.report()["longest"] == {}


def test_who_waits_says_so_until_the_wait_is_over():
    progress = Progress()
    try:
        with progress.waiting():
            assert progress.report()["waits"]
            raise RuntimeError
    except RuntimeError:
        assert not progress.report()["waits"]
