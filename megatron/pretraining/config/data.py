"""Flags of the datasets and of samples."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag

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
