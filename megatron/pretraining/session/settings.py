"""Builds a session's settings from the flags."""

from __future__ import annotations

from megatron.pretraining.config import Config, ConfigError, train_iterations
from moc.policy import AUTO, JobShape, policy_named
from moc.session.engine import Engine
from moc.session.settings import Settings


def settings_of(config: Config, engine: Engine) -> Settings:
    """The settings of this job's session; raises ConfigError if the policy cannot be built for this model."""
    snapshot, options = config.snapshot, {}
    if snapshot.ckpt_policy not in (None, AUTO):
        job = JobShape(config.parallel.expert_model_parallel_size, tuple(engine.stages))
        try:
            options = policy_named(snapshot.ckpt_policy).settings(snapshot, job)
        except ValueError as error:
            raise ConfigError(f"--ckpt-policy {snapshot.ckpt_policy}: {error}.") from None
    return Settings(
        directory=config.snapshot_dir or "",
        train_iters=train_iterations(config, engine.world.size),
        policy=snapshot.ckpt_policy,
        interval=snapshot.snapshot_interval,
        overhead_budget=snapshot.ckpt_overhead_budget,
        options=options,
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
