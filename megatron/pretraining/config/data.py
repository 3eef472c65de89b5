"""Flags of the datasets and of samples."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, ConfigError, FlagGroup, Problems, dashed, flag, listed, refuse

_SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_BLEND = "A prefix of .bin and .idx files, several, or weight and prefix pairs"


@dataclass(frozen=True)
class DataFlags(FlagGroup):
    """Data: datasets, their blend, and the shape of samples."""

    preset = True

    data_path: tuple[str, ...] | None = flag(None, f"{_BLEND}; divided by --split.", nargs="*", metavar="PREFIX")
    train_data_path: tuple[str, ...] | None = flag(None, f"{_BLEND}, to train on.", nargs="*", metavar="PREFIX")
    valid_data_path: tuple[str, ...] | None = flag(None, f"{_BLEND}, to validate on.", nargs="*", metavar="PREFIX")
    test_data_path: tuple[str, ...] | None = flag(None, f"{_BLEND}, to test on.", nargs="*", metavar="PREFIX")
    split: str | None = flag(
        None, "Shares of --data-path for training, validation and test, such as 90,5,5; by default 969, 30, 1."
    )
    mock_data: bool = flag(False, "Train on synthetic samples, for tests and benchmarks.")
    data_cache_path: str | None = flag(None, "Directory that caches the sample index between runs.")
    mmap_bin_files: bool = flag(True, "Memory-map .bin files instead of reading them.")
    seq_length: int = flag(REQUIRED, "Tokens in a sample.", limits=">= 1")
    reset_position_ids: bool = flag(False, "Restart position ids at each document.")
    reset_attention_mask: bool = flag(False, "Restrict attention to the same document.")
    eod_mask_loss: bool = flag(False, "Exclude end-of-document tokens from the loss.")
    num_workers: int = flag(2, "Data-loading processes per worker; 0 loads in the worker itself.", limits=">= 0")
    dataloader_type: str = flag(
        "single", "Order of samples: sequential over the shuffled dataset.", choices=("single",)
    )

    def validate(self, problems: Problems) -> None:
        """Rejects a missing source, two sources, and missing files."""
        separate = [name for name in _SPLIT_PATHS if getattr(self, name)]
        sources = ["--mock-data"] * self.mock_data + ["--data-path"] * bool(self.data_path)
        sources += map(dashed, separate[:1])
        problems.refuse(
            not sources,
            "there is nothing to train on. Fix: give --data-path, --train-data-path or --mock-data",
            code="data-source-missing",
        )
        problems.refuse(
            len(sources) > 1,
            f"{' and '.join(sources[:2])} exclude each other. Fix: drop one",
            code="flags-exclude-each-other",
        )
        problems.refuse(
            separate and not self.train_data_path,
            f"{listed([dashed(name) for name in separate])} needs --train-data-path. Fix: add it",
            code="data-source-missing",
        )
        problems.refuse(
            separate and self.split is not None,
            "--split divides --data-path, and has no effect with --train-data-path. Fix: drop it",
            code="flag-has-no-effect",
        )
        if self.split is not None:
            problems.check(_check_split, self.split)
        for name in ("data_path", *_SPLIT_PATHS):
            problems.check(_check_files, dashed(name), getattr(self, name) or (), problems)


def split_blend(paths: tuple[str, ...]) -> tuple[list[str], list[float] | None]:
    """Prefixes, and their weights or None: ``w1 p1 w2 p2`` or ``p1 p2``, as megatron-core reads them."""
    if len(paths) % 2 == 0:
        weights = [weight for word in paths[0::2] if (weight := _weight(word)) is not None]
        if paths and len(weights) == len(paths) // 2:
            refuse(
                not all(0 < weight < float("inf") for weight in weights),
                f"the data path {' '.join(paths)!r} has a weight that is not above 0. Fix: drop its prefix, or correct "
                "it",
                code="data-path-malformed",
            )
            return list(paths[1::2]), weights
        refuse(
            any(weight is not None for weight in weights),
            f"the data path {' '.join(paths)!r} mixes weights and prefixes. Fix: write weight1 prefix1 weight2 prefix2",
            code="data-path-malformed",
        )
    return list(paths), None


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_split(split: str) -> None:
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        raise ConfigError(
            f"--split {split!r} is not understood. Fix: write shares such as 90,5,5", code="split-malformed"
        ) from None
    refuse(
        len(shares) > 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"),
        f"--split {split!r} is not understood. Fix: write up to three shares such as 90,5,5",
        code="split-malformed",
    )


def _check_files(spelling: str, paths: tuple[str, ...], problems: Problems) -> None:
    for prefix in split_blend(paths)[0]:
        missing = [prefix + ending for ending in (".idx", ".bin") if not os.path.isfile(prefix + ending)]
        problems.refuse(
            missing,
            f"{spelling} {prefix} does not exist: there is no {' and no '.join(missing)}. Fix: correct the prefix, or "
            "make the dataset with tools/preprocess_data.py",
            code="data-file-missing",
        )
