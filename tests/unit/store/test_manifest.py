"""``manifest.json`` comes back as it was written, or is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.state.operators import Detail
from moc.store.errors import CheckpointError
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, RankReport, merge_reports
from tests.cases import each_row
from tests.errors import raises

COUNT = st.integers(0, 2**62)
NAME = st.text(max_size=12).filter(str.isprintable)
FILE_NAME = st.from_regex(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,20}", fullmatch=True)
DETAIL = st.sampled_from([one.value for one in Detail])
DIGEST = st.text("0123456789abcdef", min_size=32, max_size=32)
FILE = st.builds(lambda one, other, digest: FileEntry(max(one, other), min(one, other), digest), COUNT, COUNT, DIGEST)
FILES = st.dictionaries(FILE_NAME, FILE, max_size=3)
OPERATORS = st.dictionaries(
    NAME, st.builds(OperatorEntry, DETAIL, st.none() | COUNT, st.dictionaries(NAME, COUNT, max_size=3)), max_size=3
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAME,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=8,
)
MANIFESTS = st.builds(
    Manifest, COUNT, NAME, COUNT, FILES, OPERATORS, st.dictionaries(NAME, COUNT), st.dictionaries(NAME, JSON)
)
SMALL = Manifest(
    iteration=20,
    policy="full",
    writers=2,
    files={
        "rank_00000.safetensors": FileEntry(8192, 4096, "01" * 16),
        "rank_00001.safetensors": FileEntry(1, 1, "f" * 32),
    },
    operators={"output": OperatorEntry("full", 20, {"master": 6}), "embedding": OperatorEntry("compute", None, {})},
    layout={"world": 2},
    state={"consumed_samples": 160, "scale": 0.1, "name": "größer", "nothing": None, "flags": [True, False]},
)


@given(MANIFESTS)
def test_manifest_survives_json(manifest):
    assert Manifest.from_json(manifest.to_json(), "manifest.json") == manifest


@given(st.builds(RankReport, FILE_NAME, FILE, OPERATORS))
def test_rank_report_survives_json(part):
    assert RankReport.from_json(part.to_json()) == part


@each_row("character", ["0", "9", "a", '"', "{", "}", ",", "\\", "é", "\0"])
def test_every_changed_character_is_detected(character):
    text = SMALL.to_json()
    for position, before in enumerate(text):
        # white space between the tokens of JSON is all that may differ
        if before not in (character, " ", "\n"):
            with pytest.raises(CheckpointError, match="^here "):
                Manifest.from_json(text[:position] + character + text[position + 1 :], "here")


@settings(max_examples=300)
@given(st.data())
def test_damaged_manifest_is_refused_or_equal(data):
    text = SMALL.to_json()
    position = data.draw(st.integers(0, len(text) - 1))
    kind, character = data.draw(st.sampled_from(["change", "drop", "insert"])), data.draw(st.characters())
    rest = text[position if kind == "insert" else position + 1 :]
    damaged = text[:position] + ("" if kind == "drop" else character) + rest
    try:
        assert Manifest.from_json(damaged, "here") == SMALL
    except CheckpointError as error:
        assert str(error).startswith("here ")


@each_row("keep", range(0, 400, 13))
def test_truncated_manifest_is_refused(keep):
    with raises("checkpoint-damaged", "here"):
        Manifest.from_json(SMALL.to_json()[:keep], "here")


@each_row("text", ["[]", "3", "null", '"x"', "{}", '{"format": 1, "xxh3_128": 2}'])
def test_other_json_is_refused(text):
    with raises("checkpoint-format-unknown" if "format" in text else "checkpoint-damaged", "here"):
        Manifest.from_json(text, "here")


def test_other_format_is_named():
    text = SMALL.to_json().replace("moc-megatron checkpoint 1", "moc-megatron checkpoint 2")
    with raises("checkpoint-format-unknown", "'moc-megatron checkpoint 2'"):
        Manifest.from_json(text, "here")


def test_manifest_has_documented_fields():
    plain = json.loads(SMALL.to_json())
    documented = ["format", "iteration", "policy", "layout", "writers", "files", "operators", "state", "xxh3_128"]
    assert sorted(plain) == sorted(documented)
    assert sorted(plain["files"]["rank_00000.safetensors"]) == ["bytes", "header_bytes", "header_xxh3_128"]
    assert sorted(plain["operators"]["output"]) == ["detail", "elements", "step"]


def test_manifest_has_size_and_completeness():
    assert SMALL.nbytes == 8193
    assert SMALL.is_complete
    assert not replace(SMALL, writers=3).is_complete


def part(rank, **operators):
    return RankReport(f"rank_{rank}", FileEntry(rank, 1, "aa"), operators)


def test_reports_are_summed():
    files, operators = merge_reports(
        [
            part(0, output=OperatorEntry("full", 3, {"master": 4, "exp_avg": 4})),
            part(1, output=OperatorEntry("full", 3, {"master": 2}), router=OperatorEntry("full", None, {"param": 8})),
            part(2, router=OperatorEntry("full", 5, {"master": 1})),
        ]
    )
    assert {name: entry.bytes for name, entry in files.items()} == {"rank_0": 0, "rank_1": 1, "rank_2": 2}
    assert operators == {
        "output": OperatorEntry("full", 3, {"master": 6, "exp_avg": 4}),
        "router": OperatorEntry("full", 5, {"param": 8, "master": 1}),
    }


@each_row(
    "other",
    [OperatorEntry("full", 4, {"master": 1}), OperatorEntry("compute", 3, {"master": 1})],
    ids=["step", "detail"],
)
def test_contradictory_ranks_are_refused(other):
    with raises("parts-contradictory", "output"):
        merge_reports([part(0, output=OperatorEntry("full", 3, {"master": 1})), part(1, output=other)])


def test_reports_of_two_launches_are_refused():
    with raises("parts-contradictory", "one, two"):
        merge_reports([replace(part(0), job="one"), replace(part(1), job="two")])


def test_signed_manifest_with_repeated_key_is_refused():
    text = SMALL.to_json()
    assert text.count('"writers":2') == 1
    repeated = text.replace('"writers":2', '"writers":3,"writers":2')  # the last value counts, so its hash is right
    assert json.loads(repeated) == json.loads(text)
    with pytest.raises(CheckpointError, match="twice"):
        Manifest.from_json(repeated, "manifest.json")


def test_manifest_with_other_whitespace_is_read():
    assert Manifest.from_json(json.dumps(json.loads(SMALL.to_json()), indent=2), "manifest.json") == SMALL
