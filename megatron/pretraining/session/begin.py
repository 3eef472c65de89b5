"""Where a run begins: from a snapshot, a ``--load`` checkpoint or nothing; and what takes its snapshots from there."""

from __future__ import annotations

from megatron.pretraining.checkpoint.dense import Checkpoints
from megatron.pretraining.config import Config
from megatron.pretraining.logging.log import Log
from megatron.pretraining.session.auto import AutoPolicy
from megatron.pretraining.session.settings import policy_of, settings_of
from moc.session import begin
from moc.session.begin import NoRecoveryPoint
from moc.session.engine import Engine
from moc.session.resume.survivors import LocalRemains
from moc.session.snapshots import Snapshots
from moc.session.without import NoSnapshots
from moc.state.record import Position


def begin_as_flagged(
    config: Config,
    engine: Engine,
    checkpoints: Checkpoints,
    log: Log,
    remains: LocalRemains,
    auto: AutoPolicy | None = None,
) -> tuple[Position, Snapshots | NoSnapshots]:
    """Brings all workers to the newest state that there is; see :func:`moc.session.begin.begin`."""
    if config.snapshot.ckpt_policy is None:
        if remains.trained:
            raise NoRecoveryPoint
        return checkpoints.load() or Position(), NoSnapshots()
    policy = policy_of(config, engine) if auto is None else None
    return begin.begin(engine, settings_of(config, engine.world.size), policy, log, remains, checkpoints, auto)
