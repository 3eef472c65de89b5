"""Parts of the adapters of frameworks that have a loop of their own: moc.transformers, moc.accelerate, moc.lightning.

The framework works as in one process.  Here, the workers share the batches of its loader, and :mod:`moc.torch` averages
the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from moc.runtime.job import Job
from moc.session.settings import SettingsError
from moc.torch.data import DealtBatches, PositionError, reordered
from moc.torch.loop import init

_HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that make a framework connect and wrap the model itself."""

_job: Job | None = None


def join_alone(**options: Any) -> Job:
    """Joins the job, and hides the other workers from the framework; called before the framework is configured.

    Args:
        options: arguments of :func:`moc.torch.init`.
    """
    global _job
    if _job is None:
        _job = init(**options)
        for name in _HIDDEN:
            os.environ.pop(name, None)
    return _job


def joined_job(framework: str, first: str, processes: int, protection: Mapping[str, Any] | None) -> Job:
    """Returns the job that :func:`join_alone` has joined.

    Args:
        framework: name of the framework.
        first: what to call before the framework is configured.
        processes: processes or GPUs of this process that the framework would use.
        protection: arguments of :func:`moc.torch.protect`.

    Raises:
        SettingsError: the framework would connect to other workers itself, or calls another model than the protected.
    """
    if "wrap" in (protection or {}):
        raise SettingsError(
            f"{framework} calls the model that it has prepared, and not the one that wrap of protection returns. Fix: "
            "drop wrap",
            code="loop-call-unsupported",
        )
    if _job is None or processes > 1:
        raise SettingsError(
            f"{framework} would connect to other workers itself, or use several GPUs. Fix: {first}, configure one "
            "process, and let each worker see one GPU",
            code="loop-wrapped-too-early",
        )
    return _job


def shared_loader(loader: Any, seed: int, job: Job, accumulate: int) -> DataLoader:
    """Returns a loader of this worker's batches.

    Args:
        loader: DataLoader of the batches of all workers.
        seed: seed of their order.
        job: the job.
        accumulate: batches of an iteration.

    Raises:
        PositionError: the data have no position, or an epoch has less than one iteration.
    """
    dataset = getattr(loader, "dataset", None)
    is_map_style = isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset)
    if not is_map_style or not hasattr(dataset, "__len__") or loader.batch_sampler is None:
        raise PositionError(
            "training data without length have no position, so a replacement could not read the same samples. Fix: "
            "give a DataLoader of a map-style data set with a batch size",
            code="data-without-position",
        )
    sampler: Any = loader.batch_sampler
    batches = DealtBatches(sampler, seed, job.rank, job.size, accumulate)
    if not len(batches):
        raise PositionError(
            f"the data have {len(loader)} batches, and one iteration takes {job.size * accumulate}. Fix: train with "
            "more data, smaller batches or fewer workers",
            code="data-without-position",
        )
    return reordered(loader, loader.dataset, batch_sampler=batches)


class Stepping:
    """An optimizer or schedule with another ``step``.

    Args:
        inner: the optimizer or schedule.
        step: function that is called in place of its ``step``, with the same arguments.
        methods: more functions that are called in place of its methods, by name.
    """

    def __init__(self, inner: Any, step: Any, **methods: Any):
        self._inner, self.step = inner, step
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def do_nothing(*arguments: Any, **keywords: Any) -> None:
    """The ``step`` of a schedule that the run steps."""
