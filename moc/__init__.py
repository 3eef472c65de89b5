"""Fault tolerance for Mixture-of-Experts training, independent of megatron.pretraining.

Public names are imported on first use, so that readers of checkpoints need no torch.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "moc.store.errors",
    "Detail": "moc.state.operators",
    "Engine": "moc.session.engine",
    "LocalRemains": "moc.session.resume.survivors",
    "NoRecoveryPoint": "moc.session.resume.point",
    "NoTap": "moc.session.engine",
    "Policy": "moc.policy",
    "Position": "moc.state.record",
    "ReplicatedState": "moc.state.replicated",
    "Session": "moc.session.session",
    "Settings": "moc.session.settings",
    "SnapshotPlan": "moc.policy",
    "StepRecord": "moc.state.record",
    "TrainingState": "moc.state.interface",
    "World": "moc.runtime.job",
    "join_job": "moc.runtime.managed_job",
    "sum_over_workers": "moc.runtime.collectives",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]  # they are imported late


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
