"""Checks that the installed libraries have the private interfaces that a run needs."""

from __future__ import annotations

from contextlib import suppress

from megatron.pretraining.config import Config
from moc import private_interfaces


def features(config: Config) -> frozenset[str]:
    """Returns the features of :data:`moc.private_interfaces.TABLE` that the flags of a run need; pure."""
    parallel, precision, elastic = config.parallel, config.mixed_precision, config.elastic.elastic
    snapshots, pipeline = config.snapshot.ckpt_policy is not None, parallel.pipeline_model_parallel_size > 1
    deepspeed, experts = config.zero.deepspeed, config.moe.num_experts is not None
    needed = {
        "training": True,
        "core optimizer": not deepspeed,
        "snapshots": snapshots,
        "16-bit weights": (precision.fp16 or precision.bf16) and not deepspeed,
        "distributed optimizer": parallel.use_distributed_optimizer and not config.shards_by_blocks,
        "fragments": deepspeed or config.shards_by_blocks,
        "experts": experts,
        "expert biases": experts and config.network.add_bias_linear,
        "fp8 by Transformer Engine": precision.fp8_format is not None and config.network.transformer_impl != "local",
        "fp8": precision.fp8_format is not None and config.network.transformer_impl == "local",
        "pipeline traffic": pipeline and (snapshots or elastic),
        "elastic": elastic,
        "reading checkpoints": config.checkpoint.load is not None,
        "writing checkpoints": config.checkpoint.save is not None,
        "data files": not config.data.mock_data,
        "mock data": config.data.mock_data,
        "SentencePieceTokenizer": config.tokenizer.tokenizer_type == "SentencePieceTokenizer",
        "deepspeed": deepspeed,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def check_releases(config: Config) -> None:
    """Compares the installed libraries with the private interfaces that a run needs.

    Call it after :func:`megatron.pretraining.process.cpu.install`, and before modules of this package that import
    megatron-core.

    Raises:
        UnknownReleaseError: an interface differs.
    """
    private_interfaces.require(*(features(config) - {"deepspeed"}))
    if config.zero.deepspeed:
        from megatron.pretraining.engine.zero.build import load

        with suppress(ImportError):  # the check names the module
            load()
        private_interfaces.require("deepspeed")
