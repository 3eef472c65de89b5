"""A session's settings and policy, from flags."""

from __future__ import annotations

from megatron.pretraining.config import Config, ConfigError, train_iterations
from moc.policy import JobShape, Policy, interval_named, policy_named
from moc.session.engine import Engine
from moc.session.settings import Settings


def settings_of(config: Config, workers: int) -> Settings:
    """What a session is told, for a job of so many workers."""
    snapshot, directory = config.snapshot, config.snapshot_dir
    assert directory is not None  # --ckpt-policy needs one
    return Settings(
        directory=directory,
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


def policy_of(config: Config, engine: Engine) -> Policy:
    """The policy that flags name.

    Raises:
        ConfigError: it cannot be made for this model.
    """
    snapshot = config.snapshot
    interval = interval_named(snapshot.snapshot_interval, snapshot.ckpt_overhead_budget)
    assert snapshot.ckpt_policy is not None  # or there is no session
    kind = policy_named(snapshot.ckpt_policy)
    job = JobShape(config.parallel.expert_model_parallel_size, tuple(engine.stages))
    try:
        return kind(engine.operators, interval, **kind.settings(snapshot, job))
    except ValueError as error:
        raise ConfigError(f"--ckpt-policy {snapshot.ckpt_policy}: {error}.") from None
