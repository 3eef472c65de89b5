"""Measures how much text each split has, before megatron-core searches it for samples.

megatron-core adds epochs of a split until they have the tokens that the run needs, and loops forever if an epoch has
none (NVIDIA/Megatron-LM#957).  The check uses only the ``.idx`` files, so all workers get the same result.  This
includes workers that read no data, and replacement workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretraining.config.flag import Problems

NAMES = ("train", "valid", "test")


class Corpus(Protocol):
    """Sequence of documents with token counts."""

    documents: int

    def tokens(self, start: int, end: int) -> int:
        """Returns the tokens of the documents ``[start, end)``."""
        ...


class IndexedCorpus:
    """Pair of ``.bin`` and ``.idx`` files."""

    def __init__(self, prefix: str):
        index = IndexedDataset(prefix, mmap=False).index  # an empty .bin cannot be memory-mapped
        self.documents = len(index)
        self._index = index

    def tokens(self, start: int, end: int) -> int:
        """Returns the tokens, from the offsets of the first and last document only."""
        if start == end:
            return 0
        pointers, lengths = self._index.sequence_pointers, self._index.sequence_lengths
        return int(pointers[end - 1] - pointers[start]) // self._index.dtype_size + int(lengths[end - 1])


class MockCorpus:
    """Documents of ``--mock-data``."""

    def __init__(self, tokenizer):
        self._lengths = MockGPTLowLevelDataset(tokenizer).sequence_lengths
        self.documents = len(self._lengths)

    def tokens(self, start: int, end: int) -> int:
        """Returns the tokens, by summing the lengths."""
        return int(numpy.sum(self._lengths[start:end]))


@dataclass(frozen=True)
class SplitSource:
    """Part of one dataset that a split reads.

    Attributes:
        prefix: prefix of the dataset's files; empty with ``--mock-data``.
        total_documents: documents of the complete dataset.
        documents: documents of the split in this dataset.
        tokens: tokens of these documents.
        samples: samples that the split needs from the dataset; None if it is read exactly once.
    """

    prefix: str
    total_documents: int
    documents: int
    tokens: int
    samples: float | None

    def epochs(self, seq_length: int) -> float:
        """Returns how often the run reads the split's documents."""
        return 1.0 if self.samples is None else self.samples * seq_length / self.tokens


@dataclass(frozen=True)
class DataSplit:
    """Split that the run reads (``train``, ``valid`` or ``test``), and the datasets that it blends."""

    name: str
    sources: tuple[SplitSource, ...]

    def describe(self, seq_length: int) -> str:
        """Describes documents, tokens and epochs; for a blend, the lowest and highest epochs of its datasets."""
        documents, tokens = (sum(getattr(source, name) for source in self.sources) for name in ("documents", "tokens"))
        epochs = [source.epochs(seq_length) for source in self.sources]
        repetitions = " to ".join(dict.fromkeys(_format_epochs(bound(epochs)) for bound in (min, max)))
        blend = f" in {len(self.sources)} datasets" if len(self.sources) > 1 else ""
        return f"{self.name}: {documents:,} documents{blend}, {tokens:,} tokens, {repetitions} epochs"


def _format_epochs(epochs: float) -> str:
    return f"{epochs:,.3g}" if 0.01 <= epochs < 1000 else f"{epochs:,.0f}" if epochs >= 1000 else "under 0.01"


def drop_unread(config: GPTDatasetConfig, samples: Sequence[int | None]) -> None:
    """Drops evaluation splits that the run does not sample, since megatron-core would read one."""
    for name in ("split_matrix", "blend_per_split"):
        parts = getattr(config, name)
        if parts is not None:
            train, *evaluation = zip(parts, samples, strict=True)
            setattr(config, name, [train[0], *(None if count == 0 else part for part, count in evaluation)])


def splits_of(config: GPTDatasetConfig, samples: Sequence[int | None]) -> tuple[DataSplit, ...]:
    """Returns the splits that megatron-core is to build, for the samples that the run needs from each."""
    separate, opened, splits = config.blend_per_split, {}, []
    if config.mock:
        opened[""] = MockCorpus(config.tokenizer)
    for number, (name, sample_count) in enumerate(zip(NAMES, samples, strict=True)):
        part = (0.0, 1.0) if separate else (config.split_matrix or [])[number]
        blend = separate[number] if separate else config.blend or ([""], None)
        if part is None or blend is None:
            continue
        prefixes, weights = blend
        for prefix in prefixes:
            if prefix not in opened:
                opened[prefix] = IndexedCorpus(prefix)
        samples_of_datasets = _samples_of_each(sample_count, len(prefixes), weights)
        sources = [
            _source(prefix, opened[prefix], part, source_samples)
            for prefix, source_samples in zip(prefixes, samples_of_datasets, strict=True)
        ]
        splits.append(DataSplit(name, tuple(sources)))
    return tuple(splits)


def _samples_of_each(sample_count: int | None, datasets: int, weights: Sequence[float] | None) -> list[float | None]:
    if datasets == 1:
        return [sample_count]
    if weights is None or sample_count is None:
        return [None] * datasets
    return [sample_count * weight / sum(weights) for weight in weights]


def _source(prefix: str, corpus: Corpus, part: tuple[float, float], samples: float | None) -> SplitSource:
    start, end = (int(round(share * corpus.documents)) for share in part)  # rounds as megatron-core's builder does
    return SplitSource(prefix, corpus.documents, end - start, corpus.tokens(start, end), samples)


def refuse_empty(splits: Sequence[DataSplit], config: GPTDatasetConfig) -> None:
    """Rejects splits that would make megatron-core loop forever or fail silently.

    Raises:
        ConfigError: a split has no document or token, or too few tokens for a sample of a dataset that is read once.
    """
    problems = Problems()
    for split in splits:
        for source in split.sources:
            missing = _missing(source, config.sequence_length)
            problems.refuse(
                missing is not None,
                f"{_describe_source(split, source, config)} {missing}. Fix: {_remedy(split, config)}",
                code="split-empty",
            )
    problems.raise_found()


def _missing(source: SplitSource, seq_length: int) -> str | None:
    if source.documents == 0:
        return f"has none of its {source.total_documents:,} documents" if source.total_documents else "has no document"
    if source.tokens == 0:
        return f"has no token in its documents ({source.documents:,})"
    if source.samples is None and source.tokens <= seq_length:
        return f"has {source.tokens:,} tokens, too few for one sample of --seq-length {seq_length} and its labels"
    return None


def _describe_source(split: DataSplit, source: SplitSource, config: GPTDatasetConfig) -> str:
    if config.blend_per_split:
        return f"--{split.name}-data-path {source.prefix}"
    return f"the {split.name} split ({config.split}) of {source.prefix or '--mock-data'}"


def _remedy(split: DataSplit, config: GPTDatasetConfig) -> str:
    remedies = ["give it more text"]
    if not config.blend_per_split:
        remedies.append("change its share in --split")
    if split.name != "train":
        remedies.append("evaluate nothing with --eval-iters 0")
    return ", or ".join(remedies)
