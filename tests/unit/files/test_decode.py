"""JSON of unknown origin ends in a value of the declared type, or in ValueError."""

import json
import math
import unicodedata
from dataclasses import dataclass
from typing import Literal

import pytest

from moc.files import decode
from moc.files.decode import escape_controls
from tests.cases import each_row


@dataclass(frozen=True)
class Example:
    count: decode.Count
    rate: decode.Seconds = 0.0
    name: decode.Name = ""
    run: decode.RunName = "0" * 16
    table: dict[int, tuple[decode.Count, ...]] | None = None


def test_json_is_decoded_to_declared_types():
    text = '{"count": 3, "rate": 2, "name": "x é", "table": {"7": [1, 2]}, "unknown": []}'
    assert decode.decode(text, Example) == Example(3, 2.0, "x é", table={7: (1, 2)})


def test_name_contains_only_printable_characters():
    for code in [*range(1 << 16), 0x110BD, 0x1D173, 0x1F600, 0xE0020, 0xF0000, 0x10FFFD]:
        read = True
        try:
            decode.convert(chr(code), decode.Name)
        except ValueError:
            read = False
        assert read == chr(code).isprintable() or unicodedata.category(chr(code)) == "Cn", hex(code)


def test_error_for_long_value_is_short():
    with pytest.raises(ValueError, match="Expected `int`") as refused:
        decode.convert({"x" * 5000: "a"}, dict[str, int])
    with pytest.raises(ValueError) as of_choice:
        decode.convert("x" * 5000, Literal["a", "b"])
    assert max(len(str(refused.value)), len(str(of_choice.value))) < 400


@each_row(
    "text",
    [
        '{"count": -1}', '{"count": 4611686018427387905}', '{"count": 1.5}', '{"count": true}', '{"count": "1"}', "{}",
        '{"count": 1, "rate": Infinity}', '{"count": 1, "rate": NaN}', '{"count": 1, "rate": 1e999}',
        '{"count": 1, "name": "\\u001b[31m"}', '{"count": 1, "name": "a\\n"}',
        '{"count": 1, "run": "x/../../../victim"}',
        '{"count": 1, "run": "0123456789abcdef\\n"}', '{"count": 1, "count": 2}', '{"count": 1, "table": {"x": []}}',
        "[" * 100_000, '{"a":' * 100_000, "[1" + "0" * 5000 + "]", "", "null", '"\\ud800', b"\xff",
    ],
)  # fmt: skip
def test_undeclared_values_are_refused(text):
    with pytest.raises(ValueError):
        decode.decode(text, Example)


def test_hash_detects_every_changed_byte():
    text = decode.encode_with_hash({"count": 12, "name": "abc"}).encode()
    whole = decode.decode_verified(text, Example)
    for place in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[place] ^= 1 << bit
            try:
                assert decode.decode_verified(bytes(changed), Example) == whole
            except ValueError:
                pass


def test_text_without_hash_is_accepted_as_older_format():
    assert decode.decode_verified('{"count": 1}', Example) == Example(1)


def test_control_characters_are_escaped():
    text = "".join(map(chr, range(0x3000))) + "\ud800\x9b"
    shown = escape_controls(text)
    assert all(one.isprintable() or one in "\n\t" for one in shown) and escape_controls("plain é\n") == "plain é\n"


def test_infinity_is_parsed():
    assert math.isinf(decode.parse("Infinity"))  # a record of a skipped iteration has it
    assert json.loads(decode.encode_with_hash({"a": 1}))["a"] == 1


@dataclass(frozen=True)
class WithDefaults:
    """A state whose fields have defaults."""

    count: int = 0
    names: tuple[str, ...] = ()


@each_row("lacking", ["count", "names"])
def test_missing_field_with_default_is_refused_if_required(lacking):
    whole = {"count": 1, "names": ["a"]}
    assert decode.convert_state(whole, WithDefaults, "x", requires_every_field=True) == WithDefaults(1, ("a",))
    del whole[lacking]
    found = decode.convert_state(whole, WithDefaults, "x")
    assert decode.field_values(found).keys() == {"count", "names"}
    with pytest.raises(ValueError, match=lacking):
        decode.convert_state(whole, WithDefaults, "x", requires_every_field=True)
