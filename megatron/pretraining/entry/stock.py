"""Megatron-LM's global objects, which exist once its arguments are parsed, and its models."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron import training
from megatron.pretraining.checkpoint.unpickling import restricted_unpickling
from moc.runtime.collectives import first_line
from moc.runtime.process_group import Aborted, PeerFailure
from moc.store.errors import CheckpointError

_FAILURES = (
    *(AssertionError, RuntimeError, OSError, KeyError, ValueError, SystemExit),
    *(CheckpointException, CheckpointingException, pickle.UnpicklingError),
)
"""Errors that Megatron-LM raises for a checkpoint that it cannot read."""


def get_args() -> Any:
    """Returns Megatron-LM's arguments."""
    return training.get_args()


def get_timers() -> Any:
    """Returns Megatron-LM's timers."""
    return training.get_timers()


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Temporarily replaces attributes of Megatron-LM's modules or arguments, as a context manager."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def reads_checkpoint(root: str | None) -> Iterator[None]:
    """Lets Megatron-LM read a checkpoint in a directory without running code from it.

    Raises:
        CheckpointError: Megatron-LM cannot read it.
    """
    try:
        with restricted_unpickling():
            yield
    except _FAILURES as error:
        if isinstance(error, (Aborted, PeerFailure)):
            raise
        raise CheckpointError(
            f"{root} cannot be loaded ({type(error).__name__}: {first_line(error) or 'see above'}). Fix: pass "
            "another checkpoint, or the flags that it was saved with",
            code="checkpoint-unloadable",
        ) from error


def bare_chunks(container: Any, model_type: Any, provider: Callable[..., Any] | None, groups: Any) -> list[Any]:
    """Builds this worker's model chunks by Megatron-LM's functions, not wrapped for data parallelism.

    Args:
        container: Megatron-LM's configuration; it describes the model, unless ``provider`` builds it.
        model_type: Megatron-LM's kind of model.
        provider: builds a model chunk.
        groups: Megatron-LM's collection of process groups.
    """
    model_config = getattr(container, "model", None)
    if model_config is not None:
        builder = model_config.get_builder_cls()(model_config)
        return builder.build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
    bare = training.training.get_model(provider, model_type, wrap_with_ddp=False, pg_collection=groups)
    return cast(list[Any], bare)
