"""Builds the training session's settings from the flags; checks and switches the choices of ``--ckpt-policy auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.pretraining.config import Config, ConfigError, num_microbatches, train_iterations
from megatron.pretraining.config.deterministic import is_exact
from megatron.pretraining.config.flag import flags_of, refuse
from megatron.pretraining.config.snapshot import SnapshotFlags
from megatron.pretraining.config.together import job_shape, may_save_gradients
from megatron.pretraining.parts import Callback, TrainingRun
from megatron.pretraining.process.nodes import continues_in_process, parts_of_model, per_node, stages_on_node
from moc.errors import with_code
from moc.policy import AUTO, POLICIES, JobShape, policy_by_flag, registered_policy
from moc.policy.errors import policy_refusal
from moc.policy.flags import bubble_share
from moc.runtime.environment import node_limits
from moc.runtime.progress import progress
from moc.session.auto import AutoLimits, AutoPolicy, PolicySwitched
from moc.session.engine import Engine, Listener
from moc.session.settings import Settings
from moc.sharding.parallel_layout import ParallelLayout
from moc.simulate.elastic import ElasticSettings, Lasting
from moc.store.errors import CheckpointError

_OWN_FLAGS = ("exact_only", "host_memory_gb", "mtbf_hours")


def settings_of(config: Config, engine: Engine) -> Settings:
    """Returns the settings of this job's session.

    Raises:
        ConfigError: the policy cannot be built for this model.
    """
    snapshot, options = config.snapshot, {}
    if snapshot.ckpt_policy not in (None, AUTO):
        job = _job_shape(config, engine)
        try:
            options = registered_policy(snapshot.ckpt_policy).settings(snapshot, job)
        except ValueError as error:
            refusal = policy_refusal(snapshot.ckpt_policy, error)
            raise ConfigError(str(refusal), code=refusal.code) from None
    return Settings(
        directory=config.snapshot_dir or "",
        train_iters=train_iterations(config, engine.world.size),
        policy=snapshot.ckpt_policy,
        snapshot_interval=snapshot.snapshot_interval,
        overhead_budget=snapshot.ckpt_overhead_budget,
        options=options,
        tier=snapshot.ckpt_tier,
        memory_dir=snapshot.ckpt_memory_dir,
        node_of_rank=snapshot.node_of_rank,
        blocking=snapshot.ckpt_blocking,
        max_snapshot_lag=snapshot.max_snapshot_lag,
        keep=snapshot.ckpt_keep,
        sharding=snapshot.ckpt_sharding,
        persist_interval=snapshot.persist_interval,
        replicas=snapshot.replicas,
        replication_rate=snapshot.replication_rate,
        upstream_logging=snapshot.upstream_logging,
        step=config.checkpoint.ckpt_step,
        save_failure=config.checkpoint.save_failure,
        digest_interval=snapshot.digest_interval,
        deterministic=is_exact(config, engine.world.device.type == "cuda") is not False,
    )


def _job_shape(config: Config, engine: Engine) -> JobShape:
    world, chunks = engine.world, config.virtual_pipeline_model_parallel_size or 1
    complete_copy_workers = world.size - len(world.job.partial_model_parts) * per_node()
    share = bubble_share(
        config.parallel.pipeline_model_parallel_size, num_microbatches(config, complete_copy_workers), chunks
    )
    return replace(
        job_shape(config),
        stages=tuple(engine.stages),
        bubble_share=0.0 if world.device.type == "cuda" else share,  # on CUDA, the host does not wait for other stages
    )


@dataclass(frozen=True)
class FlaggedChoices:
    """Given flags, as :class:`moc.session.auto.Choices`."""

    config: Config

    def check(self, flags: Mapping[str, object]) -> None:
        """Raises ConfigError if chosen flags contradict the given ones."""
        in_force(self.config, flags)

    def settings(self, flags: Mapping[str, object], engine: Engine) -> Settings:
        """Returns the session's settings with the chosen flags in force."""
        return settings_of(in_force(self.config, flags), engine)


def auto_policy(config: Config, log: Listener) -> AutoPolicy | None:
    """Returns the object that chooses the policy; None unless ``--ckpt-policy auto`` or ``--pec-k auto``."""
    snapshot, parallel = config.snapshot, config.parallel
    if not snapshot.is_chosen:
        return None
    fixed = snapshot.snapshot_interval
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    limits = AutoLimits(
        tier=snapshot.ckpt_tier,
        replicas=snapshot.replicas,
        exact_only=snapshot.exact_only,
        host_memory_gb=snapshot.host_memory_gb,
        plt={name: kind.flags.max_lost_tokens(snapshot) for name, kind in POLICIES.items()},
        mtbf_hours=snapshot.mtbf_hours,
        parallel=(*sizes, parallel.expert_model_parallel_size),
        has_experts=config.moe.num_experts is not None,
        gradients=may_save_gradients(config),
        lasting=lasting(config),
        only=None if snapshot.ckpt_policy == AUTO else snapshot.ckpt_policy,
        interval=int(fixed) if fixed.isdecimal() else None,
    )
    return AutoPolicy(limits, FlaggedChoices(config), log)


class PolicySwitch(Callback):
    """Flushes the state and restarts the session if ``--ckpt-policy auto`` chooses another policy."""

    def __init__(self, auto: AutoPolicy):
        self._auto = auto

    def between_iterations(self, run: TrainingRun) -> None:
        """As :meth:`Callback.between_iterations`.

        Raises:
            PolicySwitched: on all workers, once the last snapshot is in storage.
        """
        session = run.session
        if session.storage_fails or not self._auto.switches_policy(run.position.iteration, session.load):
            return
        self._auto.mark_orderly_end()
        progress("save")
        if problem := flush(run):
            self._auto.cancel_end()
            run.log.message(f"WARNING: the policy is not changed: {problem}")
            return
        raise PolicySwitched

    def before_last_snapshot(self, run: TrainingRun) -> None:
        self._auto.mark_orderly_end()


def flush(run: TrainingRun) -> str:
    """Writes the last snapshot to storage; returns the problem, empty on success.

    Raises:
        CheckpointError: on all workers, with ``--save-failure stop``, if storage fails.
    """
    try:
        run.session.flush()
    except CheckpointError as error:
        if run.config.checkpoint.save_failure == "stop":
            raise
        return with_code(error)
    return ""


def lasting(config: Config) -> Lasting | None:
    """Returns how the job survives losses without a checkpoint.

    None if the number of nodes is fixed, or a change restarts the workers.
    """
    min_nodes, max_nodes = node_limits()
    if min_nodes == max_nodes or not continues_in_process(config):
        return None
    elastic, experts = config.elastic, config.moe.num_experts
    assert elastic.elastic_slots is not None and experts is not None  # --elastic requires both
    settings = ElasticSettings(
        slots=min(elastic.elastic_slots, experts),
        least=elastic.elastic_min_replicas,
        everywhere=elastic.everywhere,
        domain=elastic.elastic_domain,
    )
    return Lasting(
        min_nodes, max_nodes, per_node() // stages_on_node(config), experts, settings, _layers_of_parts(config)
    )


def _layers_of_parts(config: Config) -> tuple[tuple[int, ...], ...]:
    """Returns the layers with experts of each part of the model; each part is on one node."""
    parts, stages = parts_of_model(config), config.parallel.pipeline_model_parallel_size
    layers = config.network.num_layers
    layers_of_part: list[list[int]] = [[] for _ in range(parts)]
    for layer, has_experts in enumerate(config.moe.expert_layers(layers)):
        if has_experts:
            layers_of_part[ParallelLayout(stages, pp=stages).stage_of_layer(layer, layers) * parts // stages].append(
                layer
            )
    return tuple(map(tuple, layers_of_part))


def in_force(config: Config, flags: Mapping[str, object]) -> Config:
    """Returns the configuration with the chosen values of a policy in place of ``auto``.

    Raises:
        ConfigError: the other flags do not allow the choice.
    """
    policy, specs = flags["ckpt_policy"], flags_of(SnapshotFlags)
    unknown = flags.keys() - {spec.name for spec in specs}  # flags of a policy that is no longer installed
    refuse(
        unknown,
        f"the policy of {', '.join(sorted(unknown))} is not installed. Fix: install it on all nodes",
        code="policy-not-installed",
    )
    defaults = {spec.name: spec.default for spec in specs if not _applies_to(spec.name, policy, config)}
    return config.replace("snapshot", **defaults | dict(flags))


def _applies_to(flag: str, policy: object, config: Config) -> bool:
    """Returns whether a flag applies to the chosen policy."""
    if (owner := policy_by_flag().get(flag)) is None:
        return flag not in _OWN_FLAGS
    required_flag = next(spec.required_flag for spec in owner.flags.specs if spec.name == flag)
    return owner.name == policy and (required_flag is None or bool(getattr(config.snapshot, required_flag)))
