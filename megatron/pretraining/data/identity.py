"""Identifies training data by its contents: fingerprints of ``.bin``/``.idx`` pairs, and their comparison.

A fingerprint has the sizes of both files, and hashes of evenly spaced blocks of each: at most 1 MiB is read of a file
of any size.  ``tools/preprocess_data.py`` records the fingerprint of a pair and the vocabulary of its tokenizer in
``PREFIX.fingerprint.json``.  Copies of the same data have the same fingerprint, on any node and under any path.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from moc.errors import UserError
from moc.files import decode, safe_directory
from moc.files.decode import Count, Digest, Name
from moc.files.safe_directory import SafeDirectory
from moc.store.manifest import compute_digest

SUFFIX = ".fingerprint.json"
"""The end of the name of a pair's fingerprint file."""
DATA = "data"
"""The key of the identity in the state of a checkpoint."""
TRAIN = "train"
_BLOCKS, _BLOCK = 16, 1 << 16
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, documents
_MAGIC = b"MMIDIDX\x00\x00"
_SHOWN = 3


class DataError(UserError, ValueError):
    """Data files that cannot be trained on; the message names the file."""

    code = "data-damaged"
    remedy = "copy the .bin and .idx files again from the same source, or preprocess the text again"


@dataclass(frozen=True)
class Fingerprint:
    """Identity of the contents of a pair of files: sizes in bytes, and hashes of sampled blocks."""

    bin_bytes: Count
    idx_bytes: Count
    bin_xxh3_128: Digest
    idx_xxh3_128: Digest


@dataclass(frozen=True)
class VocabularyIdentity:
    """Identity of a tokenizer's vocabulary: number of tokens, and hash of the tokens in the order of their ids."""

    tokens: Count
    xxh3_128: Digest


@dataclass(frozen=True)
class TokenIdLimit:
    """The token ids that a model can read: from 0 to ``size`` - 1, and ``padding``, which datasets replace."""

    size: int
    padding: int | None = None

    def find_wrong(self, ids: Any) -> int | None:
        """Returns another id in an array or tensor, which is not empty; None if there is none."""
        least, largest = int(ids.min()), int(ids.max())
        if largest >= self.size:
            return largest
        return least if least < 0 and least != self.padding else None

    def check(self, batch: Any) -> None:
        """Checks the tokens of a micro batch, since a start reads only parts of the data.

        Args:
            batch: tokens and labels by name, on the CPU; others are not checked.

        Raises:
            DataError: a token is outside of the vocabulary.
        """
        tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
        if tokens is not None and (wrong := self.find_wrong(tokens)) is not None:
            raise self.error("a sample", wrong)

    def error(self, where: str, wrong: int) -> DataError:
        """Returns the error of data with a wrong token id."""
        return DataError(
            f"{where} has token id {wrong}, and the vocabulary has {self.size} ids. Fix: pass the tokenizer that "
            "preprocessed it, or preprocess the text again",
            code="token-id-out-of-range",
        )


@dataclass(frozen=True)
class Source:
    """A dataset that a split reads.

    Attributes:
        split: ``train``, ``valid`` or ``test``.
        prefix: path of its files, without ``.bin`` and ``.idx``.
        fingerprint: identity of its contents.
        order: hash of sampled blocks of megatron-core's indices, which determine its samples; None if unknown.
    """

    split: Name
    prefix: str
    fingerprint: Fingerprint
    order: Digest | None = None


@dataclass(frozen=True)
class DataIdentity:
    """Identity of the data that a run reads; without paths, it is equal on all nodes."""

    sources: tuple[Source, ...]
    vocabulary: VocabularyIdentity | None

    @property
    def digest(self) -> str:
        """Hash of everything except paths."""
        contents = [[source.split, asdict(source.fingerprint), source.order] for source in self.sources]
        vocabulary = None if self.vocabulary is None else asdict(self.vocabulary)
        return compute_digest(json.dumps([contents, vocabulary], sort_keys=True).encode())

    def plain(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class _Recorded(Fingerprint):
    """Fields of a fingerprint file."""

    vocabulary: VocabularyIdentity | None = None


def identity_of(saved: Mapping) -> DataIdentity | None:
    """Returns the identity in the state of a checkpoint; None if it has none, as of an earlier release."""
    return None if saved.get(DATA) is None else decode.convert(saved[DATA], DataIdentity)


def sampled_blocks(size: int) -> list[tuple[int, int]]:
    """Returns offset and length of the blocks of a file that are hashed, with the first and the last bytes; pure."""
    if size <= _BLOCKS * _BLOCK:
        return [(0, size)]
    last = size - _BLOCK
    starts = (last * number // (_BLOCKS - 1) // 8 * 8 for number in range(_BLOCKS - 1))  # complete tokens
    return [*((start, _BLOCK) for start in starts), (last // 8 * 8, size - last // 8 * 8)]


def digest_of_samples(buffers: Iterable[Any]) -> str:
    """Returns the hash of sampled blocks of buffers in memory, such as mapped arrays."""
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start, length in sampled_blocks(len(view)):
            hasher.update(view[start : start + length])
    return hasher.hexdigest()


def is_local_pair(prefix: str) -> bool:
    """Returns whether a prefix names a pair of files on this machine."""
    return all(os.path.isfile(path) for path in _paths(prefix))


def fingerprint(prefix: str) -> Fingerprint:
    """Returns the fingerprint of a pair of files; reads it again only if size or time of a file has changed."""
    stats = [os.stat(path) for path in _paths(prefix)]
    return _fingerprint(prefix, *((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))


@functools.lru_cache(1 << 16)
def _fingerprint(prefix: str, bin_stat: tuple[int, ...], idx_stat: tuple[int, ...]) -> Fingerprint:
    digests = []
    for path in _paths(prefix):
        hasher = xxhash.xxh3_128()
        for block in _read_blocks(path):
            hasher.update(block)
        digests.append(hasher.hexdigest())
    return Fingerprint(bin_stat[2], idx_stat[2], *digests)


def vocabulary_of(tokenizer: Any) -> VocabularyIdentity | None:
    """Returns the identity of the vocabulary of megatron-core's tokenizer; None if it has none (NullTokenizer)."""
    tokens = _tokens_of(tokenizer)
    return None if tokens is None else _vocabulary(tokens)


def size_of_vocabulary(tokenizer: Any) -> int:
    """Returns the number of ids of megatron-core's tokenizer: more than it has tokens if it skips ids."""
    try:
        return max(tokenizer.vocab_size, 1 + max(tokenizer.inv_vocab, default=-1))
    except (AttributeError, NotImplementedError):
        return tokenizer.vocab_size


def write_fingerprint(prefix: str, vocabulary: VocabularyIdentity | None) -> None:
    """Writes the fingerprint file of a complete pair."""
    record = asdict(fingerprint(prefix)) | {"vocabulary": None if vocabulary is None else asdict(vocabulary)}
    path = Path(f"{prefix}{SUFFIX}")
    SafeDirectory(path.parent).write(path.name, [decode.encode_with_hash(record).encode()])


class PairChecker:
    """Checks pairs of files for a run.

    Args:
        tokenizer: megatron-core's tokenizer of this run, or None.
        limit: limit of the token ids, if known.
    """

    def __init__(self, tokenizer: Any, limit: TokenIdLimit | None):
        tokens, self._limit = _tokens_of(tokenizer), limit
        self._tokens = tokens
        self._vocabulary_of_first = functools.cache(lambda count: _vocabulary((tokens or [])[:count]))

    def problems(self, prefix: str) -> list[DataError]:
        """Returns the problems of a pair that ``--allow-changed-data`` accepts.

        Raises:
            DataError: the pair is incomplete, or has token ids that the model lacks.
        """
        try:
            sampled = _sampled_ids(prefix, _check_sizes(prefix))
            if self._limit is not None:
                for ids in sampled:
                    if (wrong := self._limit.find_wrong(ids)) is not None:
                        raise self._limit.error(f"{prefix}.bin", wrong)
            recorded = _recorded(prefix)
            problems = list(_other_contents(prefix, recorded)) if recorded is not None else []
        except OSError as error:
            raise DataError(
                f"{error.filename or prefix} cannot be read ({error.strerror}). Fix: correct its permissions, or copy "
                "it again"
            ) from None
        vocabulary = recorded.vocabulary if recorded is not None else None
        if vocabulary is None or self._tokens is None:
            return problems
        if self._vocabulary_of_first(vocabulary.tokens) != vocabulary:
            problem = DataError(
                f"{prefix}.bin has token ids of another tokenizer ({vocabulary.tokens} tokens) than this run's "
                f"({len(self._tokens)}). Fix: pass the tokenizer that preprocessed it, or --allow-changed-data",
                code="data-of-other-tokenizer",
            )
            problems.append(problem)
        return problems


def changes_since(saved: Mapping, current: DataIdentity | None, split: str = TRAIN) -> list[str]:
    """Returns the :func:`changes` since a state was saved; none if it has no identity, or this run reads no files."""
    saved_identity = identity_of(saved)
    return [] if saved_identity is None or current is None else changes(saved_identity, current, split)


def reordered_since(saved: Mapping, current: DataIdentity | None) -> list[str]:
    """Returns the paths of training data with the contents of a saved run, but another order of samples.

    Data without a known index in both runs are not compared.  Equal files in a blend are a set of orders.
    """
    saved_identity = identity_of(saved)
    if saved_identity is None or current is None:
        return []
    saved_orders = {(source.fingerprint, source.order) for source in saved_identity.sources if source.split == TRAIN}
    comparable = {fingerprint for fingerprint, order in saved_orders if order is not None}
    return [
        source.prefix
        for source in current.sources
        if source.split == TRAIN and source.order is not None and source.fingerprint in comparable
        if (source.fingerprint, source.order) not in saved_orders
    ]


def changes(saved: DataIdentity, current: DataIdentity, split: str = TRAIN) -> list[str]:
    """Returns phrases about datasets of a split that a saved run read and this one does not, or the reverse; pure.

    Paths, weights and order in a blend are not compared.  The tokenizer belongs to the training split.
    """
    saved_sources, current_sources = (
        [source for source in identity.sources if source.split == split] for identity in (saved, current)
    )
    phrases = []
    if saved_sources and current_sources:
        removed, added = _without(saved_sources, current_sources), _without(current_sources, saved_sources)
        phrases += [f"{prefix} has other contents" for prefix in added if prefix in removed]
        phrases += [f"{prefix} is not read any more" for prefix in removed if prefix not in added]
        phrases += [f"{prefix} was not read" for prefix in added if prefix not in removed]
    if split == TRAIN and None not in (saved.vocabulary, current.vocabulary) and saved.vocabulary != current.vocabulary:
        phrases.append("the tokenizer has another vocabulary")
    return phrases


def join_phrases(phrases: Sequence[str]) -> str:
    """Joins the first phrases, and counts the others."""
    more = len(phrases) - _SHOWN
    return "; ".join(phrases[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def difference(first: DataIdentity, second: DataIdentity) -> str:
    """Describes the first difference between the data of two workers with different digests; pure."""
    for source, other_source in zip(first.sources, second.sources, strict=False):
        if source.fingerprint != other_source.fingerprint:
            return f"{other_source.prefix} of the {other_source.split} split is another file than {source.prefix}"
        if source.order != other_source.order:
            return f"the cached sample index of {other_source.prefix} ({other_source.split} split) differs"
    if len(first.sources) != len(second.sources):
        return f"{len(first.sources)} and {len(second.sources)} datasets are read"
    return "the tokenizers have other vocabularies"


def same_words(
    words: object, data: DataIdentity | None, other_words: Sequence[str], other_data: DataIdentity | None
) -> bool:
    """Returns whether the words of two ``--data-path`` name the same contents, in the same order and weights; pure.

    ``words`` are a value of a file, which may be no words.
    """
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        return False
    fingerprints = []
    for path_words, identity in ((words, data), (other_words, other_data)):
        contents = {source.prefix: source.fingerprint for source in identity.sources} if identity is not None else {}
        fingerprints.append([contents.get(word, word) for word in path_words])
    return fingerprints[0] == fingerprints[1]


def _without(sources: Iterable[Source], other_sources: Iterable[Source]) -> list[str]:
    """Returns the paths of the sources whose contents the other sources lack."""
    unmatched = Counter(source.fingerprint for source in other_sources)
    prefixes = []
    for source in sources:
        if not unmatched[source.fingerprint]:
            prefixes.append(source.prefix)
        unmatched[source.fingerprint] -= unmatched[source.fingerprint] > 0
    return prefixes


def _paths(prefix: str) -> tuple[str, str]:
    return f"{prefix}.bin", f"{prefix}.idx"


def _read_blocks(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        for start, length in sampled_blocks(os.fstat(file.fileno()).st_size):
            yield os.pread(file.fileno(), length, start)


def _check_sizes(prefix: str) -> str:
    """Compares the sizes of both files with the header of the index; returns the numpy name of the tokens' dtype."""
    from megatron.core.datasets.indexed_dataset import DType

    bin_path, idx_path = _paths(prefix)
    bin_bytes, idx_bytes = (os.path.getsize(path) for path in (bin_path, idx_path))
    with open(idx_path, "rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{idx_path} is not an index of Megatron-LM, or is truncated")
        _, version, code, sequences, documents = _HEADER.unpack(header)
        expected_bytes = _HEADER.size + 12 * sequences + 8 * documents
        if version != 1 or code not in {dtype.value for dtype in DType}:
            raise DataError(f"{idx_path} has an unknown version or dtype in its header")
        if idx_bytes not in (expected_bytes, expected_bytes + sequences):  # multimodal indices have a mode per sequence
            raise DataError(f"{idx_path} has {idx_bytes} bytes, and its header requires {expected_bytes}")
        end = 0
        if sequences:
            (length,) = struct.unpack("<i", os.pread(file.fileno(), 4, _HEADER.size + 4 * (sequences - 1)))
            pointers = _HEADER.size + 4 * sequences
            (pointer,) = struct.unpack("<q", os.pread(file.fileno(), 8, pointers + 8 * (sequences - 1)))
            end = pointer + length * DType.size(code)
    if bin_bytes != end:
        raise DataError(f"{bin_path} has {bin_bytes} bytes, and {idx_path} describes {end}")
    return DType(code).name


def _recorded(prefix: str) -> _Recorded | None:
    path = f"{prefix}{SUFFIX}"
    try:
        with open(safe_directory.open_user_file(path, safe_directory.MAX_SMALL_FILE_BYTES), "rb") as file:
            return decode.decode_verified(file.read(), _Recorded)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}). Fix: copy it again, or remove it") from None


def _other_contents(prefix: str, recorded: _Recorded) -> Iterator[DataError]:
    current = asdict(fingerprint(prefix))
    differing = [name for name, value in current.items() if getattr(recorded, name) != value]
    if differing:
        yield DataError(
            f"{prefix}.{differing[0][:3]} has other contents than when {prefix}{SUFFIX} was written. Fix: copy all "
            "three files again, or pass --allow-changed-data",
            code="data-changed",
        )


def _sampled_ids(prefix: str, dtype: str) -> Iterator[Any]:
    import numpy

    size = numpy.dtype(dtype).itemsize
    blocks = (numpy.frombuffer(block, dtype, len(block) // size) for block in _read_blocks(f"{prefix}.bin"))
    return (ids for ids in blocks if ids.size)


def _tokens_of(tokenizer: Any) -> list[str] | None:
    """Returns the tokens of megatron-core's tokenizer in the order of their ids."""
    try:
        by_id = tokenizer.inv_vocab
        return [str(by_id[number]) for number in sorted(by_id)]
    except (AttributeError, NotImplementedError):
        return None


def _vocabulary(tokens: Sequence[str]) -> VocabularyIdentity:
    hasher = xxhash.xxh3_128()
    for token in tokens:
        data = token.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(4, "little"))
        hasher.update(data)
    return VocabularyIdentity(len(tokens), hasher.hexdigest())
