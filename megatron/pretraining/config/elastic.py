"""Flags of elastic training (Lazarus), and what it does not go together with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.pretraining.config.flag import FlagGroup, flag, flags_of, refuse

if TYPE_CHECKING:
    from megatron.pretraining.config.groups import FlagGroups


def parse_everywhere(text: object) -> str:
    """``auto``, or a number of slots as it is written."""
    word = str(text)
    if word != "auto" and not word.isdecimal():
        raise ValueError("it is a number of slots or the word auto")
    return word


@dataclass(frozen=True)
class ElasticFlags(FlagGroup):
    """Elastic training (Lazarus): replicas of experts by load, and any number of workers."""

    elastic: bool = flag(
        False,
        "Place each expert on as many workers as its load asks for, and deal micro batches so that results do not "
        "depend on the number of workers; needs --calculate-per-token-loss and --global-batch-size.",
    )
    elastic_slots: int | None = flag(
        None, "Experts of each MoE layer that a worker has room for; needed with --elastic.", limits=">= 1"
    )
    elastic_min_replicas: int = flag(
        2, "Workers that hold each expert at least, if slots suffice: fewer losses at once lose none.", limits=">= 1"
    )
    elastic_everywhere: str = flag(
        "auto",
        "Slots of each worker for the hottest experts, which every worker holds; auto weighs balance against survival.",
        type=parse_everywhere,
        metavar="auto|H",
    )
    elastic_rebalance_interval: int = flag(
        200, "Iterations between two looks at whether other replicas would pay; 0 never looks.", limits=">= 0"
    )
    elastic_dispatch: str = flag(
        "level",
        "Tokens of each replica: such that all workers get equally many, or as many as other replicas of its expert.",
        choices=("level", "even"),
    )

    def validate(self) -> None:
        """Refuses flags without --elastic, and --elastic without slots."""
        if self.elastic:
            self.needs("elastic", "elastic_slots")
            return
        for spec in flags_of(ElasticFlags):
            refuse(
                getattr(self, spec.name) != spec.default,
                f"{spec.spelling} has no effect without --elastic: add it, or drop {spec.spelling}.",
            )

    @property
    def everywhere(self) -> int | None:
        """Slots for the hottest experts; None if they are to be chosen."""
        return None if self.elastic_everywhere == "auto" else int(self.elastic_everywhere)


def check_elastic(config: FlagGroups) -> None:
    """Refuses what elastic training does not go together with; raises ConfigError."""
    if not config.elastic.elastic:
        return
    _check_batch(config)
    _check_model(config)
    _check_parallel(config)
    _check_snapshots(config)
    refuse(
        "TORCHELASTIC_RUN_ID" in os.environ,
        "--elastic needs a launcher that keeps the workers that are left, and torchrun ends them: start the job with "
        "python -m moc.launch.",
    )


def _check_batch(config: FlagGroups) -> None:
    training = config.training
    refuse(
        training.global_batch_size is None,
        "--elastic needs --global-batch-size, which does not change with the number of workers: add it.",
    )
    refuse(
        not training.calculate_per_token_loss,
        "--elastic needs --calculate-per-token-loss: gradients must not depend on the number of workers: add it.",
    )


def _check_model(config: FlagGroups) -> None:
    moe, everywhere, slots = config.moe, config.elastic.everywhere, config.elastic.elastic_slots
    refuse(moe.num_experts is None, "--elastic places experts, and the model has none: add --num-experts, or drop it.")
    refuse(
        everywhere is not None and slots is not None and everywhere > slots,
        f"--elastic-everywhere {everywhere} is more than --elastic-slots {slots}: lower it.",
    )
    refuse(
        moe.moe_grouped_gemm,
        "--elastic computes experts one by one, whose numbers of tokens differ: drop --moe-grouped-gemm.",
    )
    refuse(
        moe.moe_token_dispatcher_type == "flex",
        "--elastic has a dispatcher of its own: drop --moe-token-dispatcher-type flex.",
    )
    refuse(
        moe.moe_permute_fusion,
        "--elastic has a dispatcher of its own, without fused kernels: drop --moe-permute-fusion.",
    )
    refuse(
        moe.moe_pad_expert_input_to_capacity,
        "--elastic sends tokens without padding: drop --moe-pad-expert-input-to-capacity.",
    )
    refuse(
        moe.moe_router_load_balancing_type == "global_aux_loss",
        "--moe-router-load-balancing-type global_aux_loss depends on the number of workers, which --elastic changes: "
        "choose aux_loss or seq_aux_loss.",
    )
    refuse(
        moe.moe_shared_expert_overlap,
        "--elastic does not compute shared experts during its dispatch: drop --moe-shared-expert-overlap.",
    )


def _check_parallel(config: FlagGroups) -> None:
    parallel = config.parallel
    for name, spelling in (
        ("expert_model_parallel_size", "--expert-model-parallel-size"),
        ("expert_tensor_parallel_size", "--expert-tensor-parallel-size"),
    ):
        refuse(
            getattr(parallel, name) > 1,
            f"--elastic places whole experts itself: drop {spelling} {getattr(parallel, name)}.",
        )
    for on, spelling in (
        (parallel.overlap_grad_reduce, "--overlap-grad-reduce"),
        (parallel.overlap_param_gather, "--overlap-param-gather"),
    ):
        refuse(on, f"--elastic sums gradients of replicas after the backward pass: drop {spelling}.")
    refuse(
        config.virtual_pipeline_model_parallel_size,
        "--elastic works with plain pipeline schedules: drop --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank.",
    )


def _check_snapshots(config: FlagGroups) -> None:
    snapshot = config.snapshot
    refuse(
        snapshot.ckpt_policy and snapshot.ckpt_tier != "disk",
        f"--elastic keeps replicas of experts in the workers themselves: choose --ckpt-tier disk, not "
        f"{snapshot.ckpt_tier}.",
    )
    refuse(
        snapshot.upstream_logging,
        "--elastic does not replay single pipeline stages: drop --upstream-logging.",
    )
