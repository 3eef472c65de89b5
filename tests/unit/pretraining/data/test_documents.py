"""Documents come out of files as they are in them, and what is wrong is said with file and line."""

import gzip
import io
import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.data import documents as reading
from megatron.pretraining.data.documents import BadText, Reader, find_files
from tests.cases import each_row
from tests.errors import raises


def documents(*files, split=None, keys=("text",)) -> list[str]:
    """Joins the pieces of each document."""
    found, parts = [], []
    for piece in Reader([str(f) for f in files], split):
        parts.append(piece.texts(keys).get("text", ""))
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    assert not parts
    return found


def write(path, data) -> str:
    data = data.encode() if isinstance(data, str) else data
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :])
    path.write_bytes(data)
    return str(path)


@each_row("suffix", ["", ".gz", ".zst"])
def test_text_file_is_one_document_with_any_compression(tmp_path, suffix):
    text = "\n  tabs\t and  \r\nlines \n\n" * 5 + "é中😀 no end of line"
    assert documents(write(tmp_path / f"a.txt{suffix}", text)) == [text]


@each_row("suffix", ["", ".gz", ".zst"])
def test_json_lines_are_read_as_documents(tmp_path, suffix):
    lines = '{"text": "one\\ntwo", "x": 1}\n\n  \n{"text": ""}\n{"text": "\\u00e9"}'
    assert documents(write(tmp_path / f"a.jsonl{suffix}", lines)) == ["one\ntwo", "", "é"]


def test_byte_order_mark_is_removed(tmp_path):
    assert documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert documents(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}')) == ["hello"]


def test_blank_lines_separate_documents(tmp_path):
    path = write(tmp_path / "a.txt", "\n\na\nb\n \n\nc\n\n")
    assert documents(path, split=reading.on_blank_lines) == ["a\nb\n", "c\n"]


def test_regex_match_starts_document(tmp_path):
    path = write(tmp_path / "a.txt", "before\n = One = \ntext\n = = Sub = = \nmore\n = Two = \n")
    split = reading.on_regex("^ = [^=]+ = $")
    assert documents(path, split=split) == [
        "before\n",
        " = One = \ntext\n = = Sub = = \nmore\n",
        " = Two = \n",
    ]


def test_invalid_pattern_is_refused():
    with raises("value-unreadable", "--split-on-regex"):
        reading.on_regex("(")


@each_row("text", ["é中😀x" * 30_000, "中文\n" * 40_000, "a" * reading.PIECE_BYTES, "é" * 65536 + "\n"])
def test_long_texts_are_cut_between_characters(tmp_path, text):
    path = write(tmp_path / "a.txt", text)
    pieces = list(Reader([path]))
    assert all(len(p.data) < 2 * reading.PIECE_BYTES + 8 for p in pieces)
    assert documents(path) == [text]
    assert "".join(reading.cut_text(text)) == text


@given(st.text(st.characters(codec="utf-8"), max_size=60), st.integers(1, 7))
def test_line_reader_loses_no_character(text, limit):
    original, reading.PIECE_BYTES = reading.PIECE_BYTES, limit
    try:
        lines = list(reading._lines(io.BytesIO(text.encode())))
    finally:
        reading.PIECE_BYTES = original
    assert b"".join(line for _, line, _ in lines) == text.encode()
    if limit >= 4:
        assert "".join(line.decode() for _, line, _ in lines) == text
    assert [number for number, _, whole in lines if whole] == list(range(1, len(text.encode().splitlines()) + 1)) or (
        set("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029") & set(text)
    )


@each_row(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\nfine\nbad \xff\n", r"a\.txt, line 3: not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'\n["text"]\n', r"a\.jsonl, line 2: a JSON object is wanted"),
        ("a.jsonl", b'{"body": "a"}\n', r"a\.jsonl, line 1: no key 'text'"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: no text under key 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: .*surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not UTF-8"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl, line 1: JSON nested too deeply"),
    ],
)
def test_bad_text_is_named_with_file_and_line(tmp_path, name, data, message):
    with pytest.raises(BadText, match=message):
        documents(write(tmp_path / name, data))


@each_row("suffix", [".gz", ".zst"])
@each_row("keep", [3, 0.5, -5])
def test_truncated_file_is_detected(tmp_path, suffix, keep):
    path = tmp_path / f"a.txt{suffix}"
    whole = "".join(f"line {i} {i * i}\n" for i in range(2000))
    data = gzip.compress(whole.encode()) if suffix == ".gz" else zstandard.compress(whole.encode())
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with raises("text-invalid", path.name, "at or after line"):
        documents(path)


@each_row("suffix", [".gz", ".zst"])
def test_uncompressed_file_with_compressed_suffix_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"just text\n")
    with raises("text-invalid", path.name):
        documents(path)


def test_decompression_bomb_uses_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.pretraining.data.documents.MAX_LINE_BYTES", 1_000_000)
    path = tmp_path / "a.jsonl.zst"
    pressed = zstandard.ZstdCompressor().compressobj(size=1 << 28)
    data = b"".join(pressed.compress(bytes(1 << 24)) for _ in range(1 << 4)) + pressed.flush()
    assert len(data) < 1 << 18
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with raises("text-invalid", "line 1", "1,000,000"):
            documents(path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_documents_before_truncation_are_readable(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = b"".join(b'{"text": "document %d"}\n' % i for i in range(20_000))
    path.write_bytes(gzip.compress(lines)[:-2000])
    pieces = list(Reader([str(path)]))
    assert [bool(p.error) for p in pieces[-2:]] == [False, True]
    assert [p.texts(["text"])["text"] for p in pieces[:3]] == ["document 0", "document 1", "document 2"]


def test_directories_are_searched_in_order(corpus):
    found = [path.removeprefix(f"{corpus}/") for path in find_files([str(corpus)])]
    assert found == ["a.txt", "b.txt", "sub/c.txt"]
    assert find_files([str(corpus), str(corpus / "ignored.bin")])[-1] == str(corpus / "ignored.bin")


def test_linked_directories_are_searched_once(tmp_path):
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").touch()
    for name, target in (("again", "../elsewhere"), ("link", "../elsewhere"), ("loop", ".")):
        (tmp_path / "in" / name).symlink_to(target)
    found = find_files([str(tmp_path / "in")])
    assert [path.removeprefix(f"{tmp_path}/") for path in found] == ["in/a.txt", "in/again/a.txt"]


def test_unreadable_directory_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").touch()
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        find_files([str(tmp_path)])


def test_patterns_ignore_compression_suffix(tmp_path):
    for name in ("a.py", "b.py.gz", "c.py.zst", "d.pyc", "e.gz"):
        (tmp_path / name).touch()
    assert [p[-8:] for p in find_files([str(tmp_path)], ["*.py"])] == [
        str(tmp_path / n)[-8:] for n in ("a.py", "b.py.gz", "c.py.zst")
    ]


def test_missing_inputs_are_named(tmp_path):
    with raises("input-missing", "nowhere"):
        find_files([str(tmp_path / "nowhere")])
    with raises("input-missing", str(tmp_path), "*.txt"):
        find_files([str(tmp_path)])


def test_progress_reaches_total_file_size(corpus):
    reader = Reader(find_files([str(corpus)]))
    assert reader.bytes_done == 0
    list(reader)
    assert reader.bytes_done == reader.bytes_total > 0
