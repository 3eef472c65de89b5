"""Provides micro batches of Megatron-LM's data loaders, at any position of a run, with safe index caches.

Reads and builds megatron-core's cache of sample indices: keyed by the data's contents, on each node. megatron-core
reads it with ``allow_pickle=True``, by default from ``cache/`` next to the data, where others may write. Its keys
have the path of the data only, and only the first worker of a job builds indices.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tokenize import TokenError
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.datasets import blended_dataset, gpt_dataset
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.datasets.fim_dataset import GPTFIMDataset
from megatron.training.training import build_train_valid_test_datasets
from megatron.training.utils import get_blend_and_blend_per_split

from megatron import training
from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.flag import refuse
from megatron.pretraining.data import identity
from megatron.pretraining.data.identity import DataError, DataIdentity, PairChecker, Source, TokenIdLimit
from megatron.pretraining.entry import command_line
from megatron.pretraining.entry.schedule import problem_of_length
from megatron.pretraining.entry.stock import get_args
from megatron.pretraining.logging.startup import DataSizes
from megatron.pretraining.model.corrections import PaddedVocabulary
from megatron.pretraining.process.topology import Topology
from moc.errors import cause_of, with_code
from moc.files.safe_directory import remove_owned
from moc.runtime.child_processes import begin_reader
from moc.runtime.collectives import first_reported
from moc.store.errors import CheckpointError

_REFUSED = (ValueError, EOFError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError, TokenError)
"""Errors of numpy for files that hold no valid array."""
_replacement_lock = threading.Lock()


class IndexCacheError(CheckpointError):
    """Cached index that is not a plain array, belongs to another user, or cannot be written."""

    code = "index-cache-unusable"


class DamagedIndexError(IndexCacheError):
    """Cached index that is not a plain array."""


class _FirstWorker:
    """Replacement of ``torch`` in modules of megatron-core, which build missing indices outside of a job."""

    distributed = SimpleNamespace(is_initialized=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def read_plainly() -> None:
    """Makes megatron-core's datasets read their index caches with :func:`load`."""
    modules: tuple[Any, ...] = gpt_dataset, blended_dataset
    for module in modules:
        module.safe_numpy_load = load


def build_by_contents() -> None:
    """Makes megatron-core's datasets key their indices by contents, and build missing or damaged ones on each node.

    Caches for ``--dataloader-fast-cache-load`` and ``--dataloader-defer-npy-index-mmap`` are prepared by Megatron-LM,
    and stay as they are.  Further calls do nothing.
    """
    kinds: tuple[tuple[Any, Any, str], ...] = (
        (gpt_dataset, gpt_dataset.GPTDataset, "_build_document_sample_shuffle_indices"),
        (blended_dataset, blended_dataset.BlendedDataset, "_build_indices"),
    )
    for module, kind, name in kinds:
        real = getattr(kind, name)
        if not hasattr(real, "__wrapped__"):
            setattr(kind, name, _with_local_build(module, real))


def _with_local_build(module: Any, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(real)
    def build(dataset: Any) -> Any:
        directory = _directory_of(dataset)
        if directory is None or dataset.config.fast_cache_load or dataset.config.defer_npy_index_mmap:
            return real(dataset)
        try:
            _add_contents(dataset)
            with _locked(directory):
                try:
                    return real(dataset)
                except (FileNotFoundError, DamagedIndexError):
                    for path in directory.glob(f"{dataset.unique_description_hash}-*.npy"):
                        remove_owned(path)
                    return _build_on_this_worker(module, real, dataset)
        except OSError as error:
            raise IndexCacheError(
                f"the sample index cannot be cached in {directory} ({error.strerror or error}). Fix: pass "
                "--data-cache-path with a directory that can be written"
            ) from None

    return build


def _build_on_this_worker(module: Any, real: Callable[[Any], Any], dataset: Any) -> Any:
    with _replacement_lock:
        module.torch = _FirstWorker()
        try:
            return real(dataset)
        finally:
            module.torch = torch


def _directory_of(dataset: Any) -> Path | None:
    """Returns the directory of the cache, as megatron-core chooses it; None if nothing is cached."""
    if dataset.config.path_to_cache:
        return Path(dataset.config.path_to_cache)
    if dataset.config.mock or not isinstance(dataset, gpt_dataset.GPTDataset):
        return None
    low_level: Any = dataset.dataset
    return Path(low_level.path_prefix, "cache", f"{type(dataset).__name__}_indices")


def _add_contents(dataset: Any) -> None:
    """Adds the fingerprint of the data to the key; a blend's key has the keys of its datasets."""
    prefix = getattr(dataset, "dataset_path", None)
    if prefix is None or not identity.is_local_pair(prefix):
        return
    dataset.unique_identifiers["contents"] = vars(identity.fingerprint(prefix))
    description = json.dumps(dataset.unique_identifiers, indent=4, default=lambda value: value.unique_identifiers)
    dataset.unique_description = description
    dataset.unique_description_hash = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lets one worker of a node at a time use a cache, if it can be written: another may be building it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def load(path: str, mmap_mode=None, **_) -> numpy.ndarray:
    """Loads an array like ``numpy.load``, without pickles.

    Raises:
        IndexCacheError: the directory or the file belongs to another user, or the file is no plain array.
    """
    remedy = f"remove it, or pass --data-cache-path with a directory of your own instead of {os.path.dirname(path)}"
    for location in (Path(path).parent, Path(path)):
        if location.stat().st_uid not in (os.geteuid(), 0):
            raise IndexCacheError(
                f"{location} of the sample index belongs to another user, and is not read. Fix: {remedy}"
            )
    try:
        with open(path, "rb") as file:
            numpy.lib.format.read_magic(file)  # refuses archives: numpy.load returns no array of them
        return numpy.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except _REFUSED as error:
        reason = f"{type(error).__name__}: {error}".encode("unicode_escape").decode()[:200]
        raise DamagedIndexError(f"{path} is no plain array ({reason}). Fix: {remedy}") from None


def seed_by_sample() -> None:
    """Seeds the random numbers of a sample by its number; further calls do nothing.

    Megatron-LM draws them from one stream per dataset, so a sample depends on the samples read before it, and a
    resumed run would read different samples.
    """
    dataset: Any = GPTFIMDataset
    real = dataset._query_document_sample_shuffle_indices
    if hasattr(real, "__wrapped__"):
        return

    @functools.wraps(real)
    def query(self, idx):
        self.np_rng.seed([self.config.random_seed, int(idx)])
        return real(self, idx)

    dataset._query_document_sample_shuffle_indices = query


SPLITS = ("train", "valid", "test")
_INDICES = "document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index"
"""Attributes of megatron-core's datasets and blends, which determine their samples."""
_READERS = 16  # threads that read blocks of data files


class StockStream:
    """A split, read by Megatron-LM's data loaders.

    Args:
        datasets: dataset of each virtual stage, or one; None where another tensor-parallel rank sends the data.
        interleaved: whether there are virtual stages.
        evaluates: the split is for evaluation, in batches of a constant size.
        limit: limit of the token ids; None if they are not checked.
    """

    def __init__(self, datasets: Sequence[Any], interleaved: bool, evaluates: bool, limit: TokenIdLimit | None = None):
        self._datasets, self._interleaved, self._evaluates, self._limit = datasets, interleaved, evaluates, limit
        self._readers: list[Iterator[Any] | None] = []
        self._position: tuple[int, int, int] | None = None

    @property
    def has_data(self) -> bool:
        """Whether this worker reads the split."""
        return any(dataset is not None for dataset in self._datasets)

    def close(self) -> None:
        """Ends the reader processes; otherwise multiprocessing would wait for them forever when this process exits."""
        self._readers = []

    def iteration(self, topology: Topology, consumed_samples: int) -> Any:
        """Returns the micro batches of the iteration, or of the evaluation, that starts at ``consumed_samples``.

        For training, the global batch size is set to its value at this position.  The readers continue if the previous
        iteration has been read; otherwise they start at the position.  An evaluation may read more batches, for plots.
        """
        args = get_args()
        if self._evaluates:
            batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
            micro = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
            rounds = batch // (micro * topology.world.data_size) * max(args.eval_iters, 1)
            batch *= max(args.eval_iters, 1)
        else:
            update_num_microbatches(consumed_samples, consistency_check=True)
            rounds, batch = get_num_microbatches(), get_current_global_batch_size()
        position = topology.world.size, topology.world.data_rank, consumed_samples
        if self._position != position:
            self._readers = [self._reader_at(stage, consumed_samples) for stage in range(len(self._datasets))]
        self._position = None  # until all have been read
        unread = {stage for stage, reader in enumerate(self._readers) if reader is not None}

        def read(stage: int) -> Iterator[Any]:
            for number in itertools.count() if self._evaluates else range(rounds):
                reader = self._readers[stage]
                assert reader is not None  # only stages with data are read
                try:
                    sample = next(reader)
                except StopIteration:  # the end of an epoch
                    reader = self._reader_at(stage, consumed_samples + number * batch // rounds)
                    assert reader is not None
                    self._readers[stage], sample = reader, next(reader)
                if self._limit is not None:
                    self._limit.check(sample)
                if number >= rounds - 1:
                    unread.discard(stage)
                    self._position = None if unread or number >= rounds else (*position[:2], consumed_samples + batch)
                yield sample

        readers = [None if reader is None else read(stage) for stage, reader in enumerate(self._readers)]
        return readers if self._interleaved else readers[0]

    def _reader_at(self, stage: int, consumed_samples: int) -> Iterator[Any] | None:
        """Returns a reader of a stage's dataset; evaluations restart at its end.

        Raises:
            ConfigError: the dataset has too few samples.
        """
        dataset, args = self._datasets[stage], get_args()
        if dataset is None:
            return None
        if args.dataloader_type in ("single", "cyclic"):
            micro = self._evaluates and getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
            samples_per_round = micro * parallel_state.get_data_parallel_world_size()
            complete = len(dataset) // samples_per_round * samples_per_round
            is_cyclic = args.dataloader_type == "cyclic"
            if self._evaluates and complete and not is_cyclic:
                consumed_samples %= complete
            refuse(
                not complete or (consumed_samples >= complete and not is_cyclic),
                f"a split {'of evaluations' if self._evaluates else 'of training'} has {len(dataset)} samples, and the "
                f"run needs {samples_per_round} more after sample {consumed_samples}. Fix: give it more data, or train "
                "for less",
                code="samples-too-few",
            )
            refuse(
                is_cyclic and consumed_samples % complete % samples_per_round,
                f"--dataloader-type cyclic cannot continue after sample {consumed_samples} with micro batches of "
                f"{samples_per_round} samples over all workers. Fix: continue with the micro batch size and the number "
                "of workers of the saved run",
                code="batch-not-divisible",
            )
        loader: Any = build_pretraining_data_loader(dataset, consumed_samples)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.num_workers:
            loader.worker_init_fn = functools.partial(begin_reader, loader.worker_init_fn)
        return iter(loader)


def streams_of(
    datasets: Mapping[str, Sequence[Any]], limits: Mapping[str, TokenIdLimit | None]
) -> dict[str, StockStream]:
    """Returns the readers of the splits; ``limits`` is the result of :func:`token_id_limits`."""
    interleaved = get_args().virtual_pipeline_model_parallel_size is not None
    return {
        split: StockStream(of_stages, interleaved, split != "train", limits[split])
        for split, of_stages in datasets.items()
    }


def token_id_limits(datasets: Mapping[str, Sequence[Any]]) -> dict[str, TokenIdLimit | None]:
    """Returns the limit of the token ids of each split; None if it reads no pairs of files, or without a vocabulary.

    Other datasets may have further ids, such as ids of images.
    """
    limit = _token_id_limit()
    return {
        split: limit if next(_files_of(of_stages), None) is not None else None for split, of_stages in datasets.items()
    }


def _token_id_limit() -> TokenIdLimit | None:
    size = padded_rows(get_args()).size
    return TokenIdLimit(size, getattr(_tokenizer(), "pad", -1)) if size else None


def padded_rows(args: Any) -> PaddedVocabulary:
    """Returns the rows of the embedding.

    A given ``--padded-vocab-size`` is the size of the vocabulary; ``--vocab-size`` may exceed the tokenizer's.
    """
    rows, tokenizer = args.padded_vocab_size or 0, _tokenizer()
    if not rows or tokenizer is None or "padded_vocab_size" in command_line.read().named:
        return PaddedVocabulary(rows, rows)
    return PaddedVocabulary(min(max(identity.size_of_vocabulary(tokenizer), args.vocab_size or 0), rows), rows)


def build_split_datasets(
    provider: Callable[..., Any], chunks: int, accepts_changes: bool, warn: Callable[[str], None]
) -> dict[str, tuple[Any, ...]]:
    """Builds the datasets of all splits by Megatron-LM's provider, for each of a worker's model chunks.

    Args:
        provider: Megatron-LM's provider of datasets.
        chunks: number of model chunks.
        accepts_changes: whether data with other contents than recorded are only reported.
        warn: function that prints a warning.

    Raises:
        ConfigError: a dataset cannot be read from any position.
        DataError: on all workers: data files are damaged or unsuitable for this run, or too short for it.
    """
    interleaved = get_args().virtual_pipeline_model_parallel_size is not None
    distributed = getattr(provider, "is_distributed", False)
    reads = distributed or parallel_state.get_tensor_model_parallel_rank() == 0
    if interleaved and "vp_stage" not in inspect.signature(provider).parameters:
        raise ConfigError(
            "virtual pipeline stages need a provider of datasets with the parameter vp_stage. Fix: add it, or drop "
            "--num-layers-per-virtual-pipeline-stage",
            code="dataset-provider-unsupported",
        )
    seed_by_sample()
    read_plainly()
    build_by_contents()
    if problem := first_reported(_problem_of_files(accepts_changes, warn) if reads else None):
        raise DataError(problem)
    by_stage = []
    for stage in range(chunks):
        stage_provider: Any = functools.partial(provider, vp_stage=stage) if interleaved else provider
        if interleaved:
            stage_provider.is_distributed = distributed
        by_stage.append(build_train_valid_test_datasets(stage_provider) if reads else (None, None, None))
    datasets_by_split: dict[str, tuple[Any, ...]] = dict(zip(SPLITS, zip(*by_stage, strict=True), strict=True))
    for split, datasets in datasets_by_split.items():
        _check_readable(split, datasets)
    if problem := first_reported(problem_of_length(datasets_by_split["train"])):
        raise DataError(problem)
    return datasets_by_split


def _problem_of_files(accepts_changes: bool, warn: Callable[[str], None]) -> str | None:
    """Checks the pairs of files that Megatron-LM's flags name; datasets of other kinds and places are left out."""
    try:
        blend, by_split = get_blend_and_blend_per_split(get_args())
    except (AssertionError, LookupError, OSError, TypeError, ValueError):
        return None  # the provider of datasets reads the same flags next, perhaps in another way
    blends = filter(None, [blend, *(by_split or ())])
    prefixes = filter(
        identity.is_local_pair, dict.fromkeys(prefix for prefixes_of_blend, _ in blends for prefix in prefixes_of_blend)
    )
    checker = PairChecker(_tokenizer(), _token_id_limit())
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            problems = [problem for pair_problems in pool.map(checker.problems, prefixes) for problem in pair_problems]
    except DataError as error:
        return with_code(error)
    if problems and not accepts_changes:
        return with_code(problems[0])
    for problem in problems:
        warn(f"WARNING: {cause_of(with_code(problem))}")
    return None


def data_identity(datasets: Mapping[str, Sequence[Any]]) -> DataIdentity | None:
    """Returns the identity of the pairs of files that megatron-core's datasets read; None if they read none."""
    all_sources = (source for split, of_stages in datasets.items() for source in _sources(split, of_stages))
    sources = tuple(dict.fromkeys(all_sources))  # virtual stages have the same
    return DataIdentity(sources, identity.vocabulary_of(_tokenizer())) if sources else None


def _sources(split: str, datasets: Iterable[Any], blends: tuple[Any, ...] = ()) -> Iterator[Source]:
    """Yields the pairs of files of datasets, which are parts of ``blends``."""
    for dataset in datasets:
        if isinstance(dataset, BlendedDataset):
            yield from _sources(split, dataset.datasets, (*blends, dataset))
        elif _is_pair(dataset):
            prefix, owners = dataset.dataset.path_prefix, (dataset, *blends)
            arrays = [
                array for owner in owners for name in _INDICES if (array := getattr(owner, name, None)) is not None
            ]
            order = identity.digest_of_samples(arrays) if arrays else None
            yield Source(split, prefix, identity.fingerprint(prefix), order)


def data_sizes(datasets: Sequence[Any]) -> DataSizes | None:
    """Returns the sizes of the data that a split's datasets read; None if they read no files of megatron-core."""
    documents = tokens = 0
    for dataset in _files_of(datasets[:1]):  # virtual stages have the same
        indexed = dataset.dataset
        total = len(indexed.document_indices) - 1
        stored = os.path.getsize(f"{indexed.path_prefix}.bin") // indexed.index.dtype_size
        documents += len(dataset.indices)
        tokens += round(stored * len(dataset.indices) / max(total, 1))
    return DataSizes(documents, tokens) if documents else None


def _files_of(datasets: Iterable[Any]) -> Iterator[Any]:
    """Yields the datasets of a blend that read local pairs of files."""
    for dataset in datasets:
        if isinstance(dataset, BlendedDataset):
            yield from _files_of(dataset.datasets)
        elif _is_pair(dataset):
            yield dataset


def _is_pair(dataset: Any) -> bool:
    if not isinstance(dataset, MegatronDataset) or not isinstance(dataset.dataset, IndexedDataset):
        return False
    return identity.is_local_pair(dataset.dataset.path_prefix)


def _tokenizer() -> Any:
    """Returns Megatron-LM's tokenizer; None if a script has none."""
    try:
        return training.get_tokenizer()
    except AssertionError:
        return None


def _check_readable(split: str, datasets: Sequence[Any]) -> None:
    for dataset in datasets:
        if isinstance(dataset, list):
            raise ConfigError(
                f"the {split} split has several datasets, which is not supported. Fix: drop all but one",
                code="datasets-unsupported",
            )
        if isinstance(dataset, torch.utils.data.IterableDataset) or (
            dataset is not None and not hasattr(dataset, "__getitem__")
        ):
            raise ConfigError(
                f"the dataset {type(dataset).__name__} of the {split} split can only be read in sequence, and a "
                "resumed run has to read from any sample. Fix: give it __getitem__ and __len__",
                code="datasets-unsupported",
            )
