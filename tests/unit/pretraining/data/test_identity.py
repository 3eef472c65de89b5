"""Fingerprints of data, and their comparisons."""

import dataclasses
import os
import struct

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.data import identity
from megatron.pretraining.data.identity import (
    DataIdentity,
    Fingerprint,
    PairChecker,
    Source,
    TokenIdLimit,
    VocabularyIdentity,
    changes,
    changes_since,
    difference,
    digest_of_samples,
    fingerprint,
    identity_of,
    same_words,
    sampled_blocks,
    size_of_vocabulary,
    vocabulary_of,
    write_fingerprint,
)
from megatron.pretraining.process import cpu
from moc.errors import code_of
from tests.cases import each_row
from tests.errors import raises

cpu.install()

MOST = 1 << 20
TERABYTE = 1 << 40


class Words:
    """A tokenizer with these tokens."""

    def __init__(self, *tokens):
        self.inv_vocab, self.vocab_size = dict(enumerate(tokens)), len(tokens)


ABC = Words("a", "b", "c")


def write_pair(prefix, lengths=(2, 3), ids=(0, 1, 2, 0, 1)):
    """A pair of files of 16-bit token ids."""
    count, pointers, at = len(lengths), [], 0
    for length in lengths:
        pointers.append(2 * at)
        at += length
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
    body = struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *pointers, *range(count + 1))
    prefix.with_suffix(".idx").write_bytes(header + body)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return str(prefix)


def mark(path, offset):
    """Changes a byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xee")


def problems(prefix, tokenizer=ABC, limit=None):
    return [problem.code for problem in PairChecker(tokenizer, limit).problems(prefix)]


@given(st.integers(0, 1 << 50))
def test_sampled_blocks_are_few_and_include_both_ends(size):
    blocks = sampled_blocks(size)
    assert sum(length for _, length in blocks) <= MOST + 8 * len(blocks)
    assert blocks[0][0] == 0 and sum(blocks[-1]) == size
    assert all(one[0] + one[1] <= other[0] or size < 2 * MOST for one, other in zip(blocks, blocks[1:], strict=False))
    assert all(start % 8 == 0 for start, _ in blocks)


def test_fingerprint_reads_at_most_one_mebibyte_per_file(tmp_path, monkeypatch):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").touch()
        os.truncate(tmp_path / f"x{suffix}", TERABYTE)  # sparse
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *words: read.append(pread(*words)) or read[-1])
    before = fingerprint(f"{tmp_path}/x")
    assert len(read) == 32 and sum(map(len, read)) <= 2 * MOST + 256
    assert fingerprint(f"{tmp_path}/x") == before and len(read) == 32  # known by size and time
    for offset in (0, TERABYTE - 1, sampled_blocks(TERABYTE)[7][0]):
        mark(tmp_path / "x.bin", offset)
        before, after = fingerprint(f"{tmp_path}/x"), before
        assert before.bin_xxh3_128 != after.bin_xxh3_128 and before.idx_xxh3_128 == after.idx_xxh3_128


def test_copies_have_same_fingerprint(tmp_path):
    assert fingerprint(write_pair(tmp_path / "a")) == fingerprint(write_pair(tmp_path / "b"))
    assert fingerprint(write_pair(tmp_path / "c", ids=(0, 1, 2, 0, 2))) != fingerprint(f"{tmp_path}/a")


def test_unchanged_pair_has_no_problem(tmp_path):
    prefix = write_pair(tmp_path / "a")
    assert problems(prefix) == []
    write_fingerprint(prefix, vocabulary_of(ABC))
    assert problems(prefix) == [] == problems(prefix, Words("a", "b", "c", "<special>"))
    write_fingerprint(prefix, None)
    assert problems(prefix, Words("x", "y", "z")) == []


def test_pair_of_other_tokenizer_is_reported(tmp_path):
    prefix = write_pair(tmp_path / "a")
    write_fingerprint(prefix, vocabulary_of(ABC))
    assert problems(prefix, Words("a", "c", "b")) == ["data-of-other-tokenizer"]


@each_row("suffix", [".bin", ".idx"])
def test_changed_pair_contents_are_reported(tmp_path, suffix):
    prefix = write_pair(tmp_path / "a")
    write_fingerprint(prefix, None)
    mark(f"{prefix}{suffix}", 3 if suffix == ".bin" else 34)  # a length that no size depends on
    assert problems(prefix, None) == ["data-changed"]


DAMAGES = {
    ".bin too short": (".bin", lambda data: data[:-2]),
    ".bin too long": (".bin", lambda data: data + b"\0\0"),
    ".idx empty": (".idx", lambda data: b""),
    ".idx cut in its header": (".idx", lambda data: data[:20]),
    ".idx cut": (".idx", lambda data: data[:-1]),
    ".idx of zeros": (".idx", lambda data: bytes(len(data))),
    ".idx of another version": (".idx", lambda data: data[:9] + b"\x02" + data[10:]),
    ".idx of another dtype": (".idx", lambda data: data[:17] + b"\x63" + data[18:]),
    ".idx with a number of documents that is too large": (".idx", lambda data: data[:25] + b"\xff" + data[26:]),
    "fingerprint cut": (identity.SUFFIX, lambda data: data[:-5]),
    "fingerprint with another value": (
        identity.SUFFIX,
        lambda data: data.replace(b'"bin_bytes": 10', b'"bin_bytes": 11'),
    ),
}


@each_row("damage", DAMAGES)
def test_damaged_pair_is_refused(tmp_path, damage):
    prefix = write_pair(tmp_path / "a")
    write_fingerprint(prefix, None)
    suffix, change = DAMAGES[damage]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with raises("data-damaged", str(path)):
        problems(prefix)


def test_multimodal_index_is_accepted(tmp_path):
    prefix = write_pair(tmp_path / "a")
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(2))
    assert problems(prefix) == []


def test_unreadable_pair_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "a")
    (tmp_path / f"a{identity.SUFFIX}").mkdir()
    with raises("data-damaged", prefix):
        problems(prefix)


@each_row(
    ("ids", "limit", "wrong"),
    [
        ((0, 1, 2), TokenIdLimit(3), None),
        ((0, 1, 2), TokenIdLimit(2), 2),
        ((0, -1, 2), TokenIdLimit(3), -1),
        ((0, -1, 2), TokenIdLimit(3, padding=-1), None),
        ((0, -7, -1), TokenIdLimit(3, padding=-1), -7),
    ],
)
def test_token_ids_are_checked_against_vocabulary(ids, limit, wrong):
    assert limit.find_wrong(numpy.array(ids)) == wrong
    limit.check({"tokens": numpy.zeros(1)})
    if wrong is not None:
        with raises("token-id-out-of-range", f"token id {wrong}"):
            limit.check({"tokens": numpy.array(ids)})


def test_pair_with_ids_outside_vocabulary_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "a")
    assert problems(prefix, None, TokenIdLimit(3)) == problems(prefix, None, None) == []
    with raises("token-id-out-of-range", prefix, "token id 2"):
        problems(prefix, None, TokenIdLimit(2))


def test_vocabulary_may_skip_ids():
    words = Words("a", "b", "c")
    words.inv_vocab[7] = "d"
    assert size_of_vocabulary(words) == 8 and size_of_vocabulary(ABC) == 3


def test_tokenizer_without_vocabulary_has_no_identity():
    class Null:
        @property
        def inv_vocab(self):
            raise NotImplementedError

    assert vocabulary_of(Null()) is None and vocabulary_of(None) is None
    assert vocabulary_of(Words("ab", "c")) != vocabulary_of(Words("a", "bc"))


def source(prefix, contents=None, split="train", order=None):
    contents = prefix if contents is None else contents
    return Source(split, prefix, Fingerprint(1, 2, contents * 32, "0" * 32), order)


def data(*sources, vocabulary=None):
    return DataIdentity(sources, vocabulary)


V, W = VocabularyIdentity(3, "1" * 32), VocabularyIdentity(3, "2" * 32)
A, B = source("a"), source("b")


@each_row(
    ("saved", "here", "expected"),
    [
        (data(A), data(A), []),
        (data(A), data(source("moved", "a")), []),
        (data(A, B), data(B, A), []),  # a blend in another order
        (data(A), data(source("a", "b")), ["a has other contents"]),
        (data(A), data(B), ["a is not read any more", "b was not read"]),
        (data(A), data(A, A), ["a was not read"]),
        (data(A), data(A, source("b", split="valid")), []),
        (data(A, vocabulary=V), data(A, vocabulary=V), []),
        (data(A, vocabulary=V), data(A), []),
        (data(A, vocabulary=V), data(A, vocabulary=W), ["the tokenizer has another vocabulary"]),
    ],
)
def test_training_data_changes_are_listed(saved, here, expected):
    assert changes(saved, here) == expected
    assert changes_since({"data": saved.plain()}, here) == expected


def test_other_split_changes_exclude_tokenizer():
    saved, here = (data(A, source("v", name, "valid"), vocabulary=of) for name, of in (("a", V), ("b", W)))
    assert changes(saved, here, "valid") == ["v has other contents"]


def test_state_without_identity_has_no_changes():
    assert changes_since({}, data(A)) == changes_since({"data": None}, data(A)) == []
    assert changes_since({"data": data(A).plain()}, None) == []


def test_stored_identity_round_trips():
    known = data(A, source("b", order="3" * 32), vocabulary=V)
    assert identity_of({"data": known.plain()}) == known
    with pytest.raises(ValueError):
        identity_of({"data": known.plain() | {"sources": 1}})


def test_digest_ignores_paths():
    assert data(A).digest == data(source("moved", "a")).digest
    others = [data(B), data(A, A), data(A, vocabulary=V), data(dataclasses.replace(A, split="test"))]
    assert len({one.digest for one in (data(A), data(source("a", order="3" * 32)), *others)}) == 6


@each_row(
    ("first", "other", "named"),
    [
        (data(A), data(source("x", "b")), "x of the train split"),
        (data(source("a", order="1" * 32)), data(source("a", order="2" * 32)), "cached sample index of a"),
        (data(A), data(A, B), "1 and 2 datasets"),
        (data(A, vocabulary=V), data(A, vocabulary=W), "tokenizers"),
    ],
)
def test_difference_between_nodes_is_named(first, other, named):
    assert first.digest != other.digest and named in difference(first, other)


def test_same_words_compares_contents_not_paths():
    here, moved = data(A, B), data(source("c", "a"), source("d", "b"))
    assert same_words(["1", "a", "2", "b"], here, ["1", "c", "2", "d"], moved)
    assert not same_words(["1", "a", "2", "b"], here, ["2", "c", "1", "d"], moved)
    assert not same_words(["a"], None, ["c"], moved) and same_words(["a"], None, ["a"], None)
    assert not any(same_words(damaged, here, ["a"], moved) for damaged in (-1e54, {}, [["a"]], None, "a"))


def test_array_digest_detects_change_at_end():
    array = bytearray(8 * MOST)
    before = digest_of_samples([array, array])
    array[-1] = 1
    assert before != digest_of_samples([array, array])
    assert digest_of_samples([]) == digest_of_samples([b""])


def test_data_error_names_remedy():
    error = identity.DataError("x is damaged")
    assert code_of(error) == "data-damaged" and "Fix: copy" in str(error)
