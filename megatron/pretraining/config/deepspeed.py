"""Flags of the DeepSpeed engine, under Megatron-DeepSpeed's names."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, Problems, flag

DTYPES = ("fp32", "bf16", "fp16")
WANTED = "deepspeed>=0.19,<0.20"
OLDEST, BEFORE = (0, 19), (0, 20)
"""Supported versions of DeepSpeed, as in ``pyproject.toml``; the upper bound exists because private parts are used."""


def _elements(value: object) -> int:
    """Parses a number of elements, which ds_configs also write as 5e8."""
    number = float(str(value))
    if number != int(number):
        raise ValueError("the number of elements must be an integer")
    return int(number)


@dataclass(frozen=True)
class DeepSpeedFlags(FlagGroup):
    """DeepSpeed: its ZeRO optimizer in place of megatron-core's data parallelism and optimizer."""

    deepspeed: bool = flag(False, "Reduce gradients and shard optimizer state by DeepSpeed's ZeRO optimizer.")
    deepspeed_config: str | None = flag(
        None,
        "Take flags from this ds_config; they must agree with those given, and keys without a flag are refused.",
        "--deepspeed_config",
        metavar="FILE.json",
    )
    zero_stage: int | None = flag(
        None, "ZeRO stage: 1 shards optimizer state, 2 also gradients; by default 1, or the stage of the ds_config."
    )
    cpu_optimizer: bool = flag(False, "Keep masters and moments in host memory, and update them there (offload).")
    use_pin_memory: bool = flag(False, "Pin the host memory of --cpu-optimizer.")
    zero_reduce_bucket_size: int = flag(
        50_000_000, "Elements of gradients reduced together.", type=_elements, limits=">= 1"
    )
    zero_allgather_bucket_size: int = flag(
        500_000_000, "Elements of updated weights gathered together.", type=_elements, limits=">= 2"
    )
    zero_round_robin_gradients: bool = flag(
        False, "Deal parameters out to data-parallel workers in turns, as round_robin_gradients of a ds_config."
    )
    zero_multi_rank_bucket_allreduce: bool = flag(
        True, "Reduce a bucket by one all-reduce, not to each owner, as use_multi_rank_bucket_allreduce of a ds_config."
    )
    zero_communication_dtype: str = flag("fp32", "Data type of reduced gradients.", choices=DTYPES)
    zero_grad_accum_dtype: str = flag("fp32", "Data type of accumulated gradients.", choices=DTYPES)
    gradient_accumulation_steps: int | None = flag(
        None, "Micro batches in an iteration; follows from the batch sizes, and must agree with them.", limits=">= 1"
    )

    def validate(self, problems: Problems) -> None:
        """Rejects flags that need ``--deepspeed`` without it, other stages, and odd all-gather buckets."""
        for name in ("deepspeed_config", "zero_stage", "cpu_optimizer", "gradient_accumulation_steps"):
            self.needs(problems, name, "deepspeed")
        self.needs(problems, "use_pin_memory", "cpu_optimizer")
        problems.check(self._validate_stage, problems)
        problems.refuse(
            self.zero_allgather_bucket_size % 2,
            f"--zero-allgather-bucket-size {self.zero_allgather_bucket_size} is odd, and DeepSpeed aligns it to 2. "
            "Fix: change it",
            code="bucket-size-odd",
        )

    def _validate_stage(self, problems: Problems) -> None:
        problems.refuse(
            self.deepspeed and self.zero_stage == 3,
            "--zero-stage 3 (zero_optimization.stage) gathers weights by collectives within forward, so that no "
            "pipeline stage or expert could be restored without the others. Fix: choose 1 or 2",
            code="zero-stage-unsupported",
        )
        problems.refuse(
            self.deepspeed and self.zero_stage not in (1, 2, 3),
            f"--zero-stage {self.zero_stage} (zero_optimization.stage) does not exist. Fix: choose 1 or 2",
            code="zero-stage-unsupported",
        )
