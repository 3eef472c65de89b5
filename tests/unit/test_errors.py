"""Codes of errors: where they come from, and how other processes receive them."""

import errno

import pytest

from megatron.pretraining.reference import cause_and_remedy, documented, messages
from moc.errors import UserError, cause_of, code_of, codes_in, with_code
from tests.cases import each_row
from tests.errors import raises


class OfAClass(UserError):
    code = "of-a-class"


class Derived(OfAClass):
    pass


@each_row(
    ("error", "code"),
    [
        (UserError("x"), "internal-error"),
        (OfAClass("x"), "of-a-class"),
        (Derived("x"), "of-a-class"),
        (Derived("x", code="of-a-call"), "of-a-call"),
        (OSError(errno.ENOSPC, "full"), "disk-full"),
        (OSError("x"), "system-call-failed"),
        (ValueError("x"), "internal-error"),
    ],
)
def test_error_has_expected_code(error, code):
    assert code_of(error) == code and codes_in(f"tool: {with_code(error)}\n") == [code]


def test_error_from_other_process_keeps_its_code():
    error = Derived("it failed. Fix: repair it", code="of-a-call")
    with raises("of-a-call", "repair") as caught:
        raise OfAClass(with_code(error))
    assert str(caught.value) == str(error)


@each_row(
    ("error", "cause"),
    [
        (Derived("it failed. Fix: repair it"), "it failed"),
        (with_code(Derived("it failed. Fix: repair it")), "it failed"),
        (OSError(errno.ENOSPC, "full", "/a"), "/a: full"),
        (OSError(errno.ENOSPC, "full"), "full"),
        (ValueError("x"), "x"),
    ],
    ids=str,
)
def test_cause_is_quoted_without_remedy_and_code(error, cause):
    assert cause_of(error) == cause


def test_error_without_remedy_uses_remedy_of_its_class(tmp_path):
    class Repairable(UserError):
        code, remedy = "repairable", "repair it"

    assert str(Repairable("it is broken")) == "it is broken. Fix: repair it"
    assert str(Repairable("it is broken. Fix: replace it")) == "it is broken. Fix: replace it"
    (tmp_path / "module.py").write_text(
        "class Broken(UserError):\n    code = 'broken'\n    remedy = 'repair it'\n\nraise Broken('it is broken')\n"
    )
    assert messages([tmp_path / "module.py"]) == {"broken": ["it is broken. Fix: repair it"]}


@pytest.mark.slow
def test_each_message_has_cause_and_remedy():
    found = documented()
    assert all(found.values()), [code for code, texts in found.items() if not texts]
    assert not [text for texts in found.values() for text in texts if not all(cause_and_remedy(text))]


def test_messages_are_read_from_source(tmp_path):
    (tmp_path / "module.py").write_text(
        "class Broken(UserError):\n    code = 'broken'\n\nclass Worse(Broken):\n    pass\n\n"
        "raise Broken(f'{self.path} is bad. Fix: repair {dashed(name)}')\n"
        "raise Worse('worse')\n"
        "refuse(a < b, 'too small', code='too-small')\n"
        "raise Broken(sentence)\n"
        "raise Broken(f'--flag: {error}', code=code_of(error))\n"
    )
    found = messages([tmp_path / "module.py"])
    assert found == {"broken": ["<path> is bad. Fix: repair <name>", "worse"], "too-small": ["too small"]}
    assert cause_and_remedy(found["broken"][0]) == ("<path> is bad.", "repair <name>")
