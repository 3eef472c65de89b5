"""``docs/reference``: pages that follow from the code are what the code says."""

import ast
import re
from pathlib import Path

from megatron.pretraining import reference
from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.process import stopping
from moc import events
from moc.runtime import termination
from moc.state.operators import Detail
from tests.cases import each_row

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
SOURCES = [path for package in ("megatron", "moc") for path in (ROOT / package).rglob("*.py")]


@each_row("page", reference.pages())
def test_generated_page_matches_code(page):
    committed = (ROOT / page).read_text(encoding="utf-8")
    assert committed == reference.pages()[page], f"{page} is out of date: run {reference.COMMAND} and commit the page"


def written() -> list[tuple[str, str, set[str], bool]]:
    """Where an event is written: the place, its type, the fields named there, and whether there may be others."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            into, kind = ast.unparse(node.func), node.args[0]
            if into == "append_event":  # into the file of a run that has no worker left
                given, kind = node.keywords, node.args[1]
            elif into.split(".")[-2:] == ["events", "write"]:
                given = node.keywords
            elif into == "self._keep" and len(node.args) == 2 and isinstance(node.args[1], ast.Call):
                given = node.args[1].keywords  # EventLog's own
            else:
                continue
            names = {keyword.arg for keyword in given}
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            found.append((place, ast.literal_eval(kind), names - {None}, None in names))
    return found


def test_every_written_event_is_in_schema_with_its_fields():
    for place, name, fields, more in written():
        told = dict.fromkeys([*events.EVERY, *fields], 0) | {"type": name}
        missing = events.problems(told)
        assert [one for one in missing if not (more and one.startswith("no "))] == [], place


def test_every_schema_type_is_written():
    assert {name for _, name, _, _ in written()} == events.EVENTS.keys()


@each_row("event", [{"type": "strange"}, {"type": "save", "iteration": 1, "elapsed_s": 0.1, "more": 2}])
def test_fields_outside_schema_are_named(event):
    assert events.problems({"time": 0.0, **event}) in ([f"no type {event['type']}"], ["more"])


def test_glossary_is_sorted_and_contains_subsets_and_tiers():
    rows = re.findall(r"^\* \*\*(.+?)\*\*(.*)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for term, _ in rows]
    assert terms == sorted(terms, key=str.lower) and len(set(terms)) == len(terms)
    meanings = dict(rows)
    assert all(f"`{detail.name}`" in meanings["detail"] for detail in Detail)
    assert all(f"`{tier}`" in meanings["tier"] for tier in all_flags()["ckpt_tier"].choices)


def test_exit_codes_have_row():
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    training, launcher, _ = page.split("\n## ")[1:]
    for code in (stopping.EXIT_DONE, 1, 2, stopping.EXIT_REQUEUE):
        assert f"\n| {code} |" in training
    for code in (stopping.EXIT_DONE, termination.SAVED, termination.LOST):
        assert f"\n| {code} |" in launcher


def test_each_user_error_has_code():
    assert "`internal-error`" not in reference.pages()["docs/reference/errors.md"]
