"""Types of ``training_state.json``, which is also the main part of a snapshot's state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from megatron.pretraining.data.identity import DataIdentity
from moc.files import decode, safe_directory
from moc.files.decode import Amount, Count, Name, Positive
from moc.files.safe_directory import SafeDirectory
from moc.store import dense_files


@dataclass(frozen=True)
class _Schedule:
    """State of megatron-core's scheduler of learning rate and weight decay; it counts steps in samples."""

    num_steps: Count
    max_lr: Amount
    min_lr: Amount
    lr_warmup_steps: Amount  # a fraction of the decay may not be an integer
    lr_decay_steps: Count
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] | None
    start_wd: Amount
    end_wd: Amount
    wd_incr_style: Literal["constant", "linear", "cosine"]
    wd_incr_steps: Count
    init_lr: Amount = 0.0
    wsd_decay_steps: Count | None = None
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"


@dataclass(frozen=True)
class _GradScaler:
    """State of fp16's dynamic loss scale."""

    scale: Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=1)]
    growth_tracker: Count
    hysteresis_tracker: int


@dataclass(frozen=True)
class _StoredState:
    """The part of a checkpoint's state that this package reads; see ``contents.training_state``."""

    optimizer: Name | None
    shape: dict[str, Any]
    iteration: Count
    consumed_samples: Count = 0
    skipped_iterations: Count = 0
    scheduler: _Schedule | None = None
    grad_scaler: _GradScaler | None = None
    sample_order: dict[str, Any] | None = None
    optimizer_step: Count | None = None
    params_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    fp8: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+ fp8 products \([a-z0-9]+\) of [A-Za-z ]+\Z")] | None = None
    main_params_dtype: Name | None = None
    moments: tuple[Name, Name] | None = None
    job: Name | None = None
    beginning: str | None = None
    model: dict[Name, Any] | None = None
    tokenizer: dict[Name, Any] | None = None
    grad_norm: Literal["stock", "exact"] = "exact"
    repeated: dict[Name, Any] | None = None
    data: DataIdentity | None = None


_NEEDED = {"consumed_samples", "skipped_iterations", "scheduler", "grad_scaler", "sample_order"}
"""Keys that a resumed run needs, and that checkpoints of other programs lack."""


def check_types(saved: Mapping, resumes: bool = True) -> None:
    """Checks a training state.

    Args:
        saved: the state.
        resumes: whether a run resumes from the state, which requires more keys than a converter.

    Raises:
        ValueError: a value is missing or invalid.
    """
    constant = {"grad_scaler": None} if saved.get("grad_scaler") == {} else {}  # a constant loss scale has no state
    stored = decode.convert({**saved, **constant}, _StoredState)
    if resumes and (missing := _NEEDED - saved.keys()):
        raise ValueError(f"it has no {min(missing)}")
    if resumes and stored.optimizer and stored.scheduler is None:
        raise ValueError("it has an optimizer, and no schedule")


def read_state(directory: Path, resumes: bool = False) -> dict[str, Any]:
    """Returns the training state of a dense checkpoint; ``resumes`` as for :func:`check_types`.

    Raises:
        CheckpointError: the file is missing, or a value is missing or invalid.
    """
    with _reading(directory / dense_files.STATE_FILE):
        state = decode.parse(SafeDirectory(directory).read(dense_files.STATE_FILE, safe_directory.MAX_MANIFEST_BYTES))
        check_types(decode.require_object(state, "it"), resumes)
        return state


def read_data(directory: Path) -> dict[str, Any]:
    """Returns the identity of the data of a dense checkpoint without training state.

    Raises:
        CheckpointError: the file is missing, or a value is missing or invalid.
    """
    with _reading(directory / dense_files.DATA_FILE):
        return decode.decode(
            SafeDirectory(directory).read(dense_files.DATA_FILE, safe_directory.MAX_MANIFEST_BYTES), DataIdentity
        ).plain()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dense_files.damage_error(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise dense_files.damage_error(f"{path} is damaged ({error})") from None
