"""Elastic state of a worker: expert replicas and optimizer shards, from its start to the callbacks of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core.distributed import DistributedDataParallel

from megatron.pretraining.config import Config, ConfigError, restart_reason
from megatron.pretraining.elastic.membership import (
    DrainAgreement,
    ReplicaCounts,
    hand_over,
    is_settled,
    migrate,
    settle,
)
from megatron.pretraining.elastic.moe_layer import ElasticLayer, ElasticMicroBatchHooks, elastic_layers
from megatron.pretraining.elastic.placement import NodesOfStages, Plans
from megatron.pretraining.elastic.rebalancing import Rebalancer
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.elastic.state_transfer import Shards
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.owned import sharded_part
from megatron.pretraining.logging.records import EventRecorder
from megatron.pretraining.parts import Callback, WorkerParts
from megatron.pretraining.process.nodes import continues_in_process, per_node
from megatron.pretraining.process.topology import Topology
from moc.runtime.environment import min_nodes
from moc.runtime.job import World
from moc.session.session import Session


@dataclass
class ElasticState:
    """Implementation of :class:`megatron.pretraining.parts.MovingState` for ``--elastic``.

    Attributes:
        layers: mixture-of-experts layers of this worker.
        replicas: replicas of experts.
        shards: shards of the dense optimizer state; None if it is not sharded.
    """

    layers: Sequence[ElasticLayer]
    replicas: Replicas
    shards: Shards | None
    _run_started: bool = False  # the plans in force belong to a started run

    @classmethod
    def of(
        cls,
        config: Config,
        world: World,
        chunks: Sequence[DistributedDataParallel],
        modules: ModuleState,
        optimizer: CommitOptimizer,
        plans: Plans,
        nodes: NodesOfStages,
    ) -> ElasticState:
        """Returns the state of a built worker.

        Raises:
            ConfigError: modules of a user have state that cannot move.
        """
        if modules.user_state:
            raise ConfigError(
                f"--elastic: user modules of {next(iter(modules.user_state))} keep values of their own, which cannot "
                "move between nodes. Fix: drop --elastic, or keep the values in parameters",
                code="elastic-excludes-module-state",
            )
        layers = elastic_layers(chunks)
        replicas = Replicas(layers, optimizer.core, plans, nodes, config.elastic.elastic_dispatch)
        sharded = sharded_part(optimizer.core)
        return cls(layers, replicas, sharded and Shards(config, sharded, nodes[world.pipeline_rank]))

    def settle(self, parts: WorkerParts) -> None:
        """As :meth:`MovingState.settle`.

        If no worker has the state of some experts, their new holders load it from a checkpoint. If other state is
        missing, all workers discard their live state and load the newest checkpoint.
        """
        partial_model_parts = parts.world.job.partial_model_parts
        settled = settle(parts.config, self.replicas, self.shards, parts.remains.trained, partial_model_parts)
        if settled.lost:
            reason = f"no worker that is left holds {settled.lost}"
            consequence = "a checkpoint is read for them" if settled.experts else "all go back to the newest checkpoint"
            parts.log.message(f"{reason}: {consequence}")
            parts.log.events.write("fallback", reason=reason, experts=settled.experts)
            parts.remains.lacking |= settled.missing_operators
            if not settled.experts:
                parts.remains.live = None
        self._run_started = settled.run_started

    def callbacks(self, parts: WorkerParts, engine: MegatronEngine, session: Session) -> tuple[Callback, ...]:
        config, log = parts.config, parts.log
        rebalancer = Rebalancer(config, engine, self.replicas, self.shards, parts.vocabulary_rows)
        try:
            if not is_settled(self.replicas, self.shards):
                migrate(self.replicas, self.shards, engine, session, log)
            elif not self._run_started:
                rebalancer.restore(session.moving)  # to the placement of experts in the snapshot
        except BaseException:
            rebalancer.close()
            raise
        if self.replicas.plans:
            replica_counts = ReplicaCounts.of(self.replicas.plans, config.elastic.elastic_min_replicas)
            log.message(replica_counts.sentence)
            log.events.write("expert_replicas", iteration=session.position.iteration, **vars(replica_counts))
        if min_nodes() is None or not continues_in_process(config):
            return (rebalancer,)
        move = partial(hand_over, config, self.replicas, self.shards, engine, session, log)
        return (DrainAgreement(parts.world, move), rebalancer)

    def micro_batch_hooks(self, seed: int, topology: Topology) -> ElasticMicroBatchHooks:
        return ElasticMicroBatchHooks(seed, topology, self.layers)


def announce_restarts(config: Config, log: EventRecorder) -> None:
    """With ``--elastic``, reports why workers cannot continue in the same processes, if they cannot."""
    why = restart_reason(config, per_node())
    if config.elastic.elastic and why and min_nodes() is not None:
        log.message(f"{why}, all workers restart when nodes are lost or added: they {_describe_resume(config)}")


def _describe_resume(config: Config) -> str:
    """Describes the state that restarted workers begin with."""
    if config.snapshot.ckpt_policy is not None:
        return "resume from --ckpt-dir"
    if config.checkpoint.load:
        return "resume from --load"
    if config.checkpoint.save:
        return "resume from --save"
    return "begin again, since neither --ckpt-dir, --save nor --load is given"
