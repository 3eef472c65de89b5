"""The session's settings, from flags."""

from __future__ import annotations

from megatron.pretraining.config import Config, train_iterations
from moc.session.settings import Settings


def settings_of(config: Config, workers: int) -> Settings:
    """What a session is told, for a job of so many workers."""
    snapshot = config.snapshot
    return Settings(
        directory=config.snapshot_dir,
        train_iters=train_iterations(config, workers),
        tier=snapshot.ckpt_tier,
        memory_directory=snapshot.ckpt_memory_dir,
        nodes=snapshot.node_of_rank,
        blocking=snapshot.ckpt_blocking,
        most_behind=snapshot.max_snapshot_lag,
        keep=snapshot.ckpt_keep,
        sharding=snapshot.ckpt_sharding,
        persist_interval=snapshot.persist_interval,
        persists_all=snapshot.chooses_experts,
        replicas=snapshot.replicas,
        replication_rate=snapshot.replication_rate,
        upstream_logging=snapshot.upstream_logging,
        begin_at=config.checkpoint.ckpt_step,
        stops=config.checkpoint.save_failure == "stop",
    )
