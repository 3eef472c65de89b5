"""Pre-trains GPT models with Megatron-LM's flags and ``megatron.training``, without a user's script.

Megatron-LM's flags describe the model and the data.  Each worker reads its own samples, so tensor-parallel ranks do not
exchange them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, print_rank_0

from megatron.pretraining.config.flag import refuse
from megatron.pretraining.data.splits import drop_unread, refuse_empty, splits_of
from megatron.pretraining.entry.flags import refused_by_megatron
from megatron.pretraining.entry.own_flags import DEFAULTS
from megatron.pretraining.entry.pretrain import pretrain
from megatron.pretraining.entry.program import StockProgram
from megatron.pretraining.entry.stock import get_args


def main() -> None:
    """Parses Megatron-LM's flags and ours, then trains."""
    program = program_of(configured())
    pretrain(
        program.container,
        program.datasets,
        program.model_type,
        program.forward_step,
        get_embedding_ranks=program.embedding_ranks,
    )


def program_of(args: Any) -> StockProgram:
    """Returns the program of Megatron-LM's arguments."""
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    kind = ModelType.encoder_or_decoder
    return StockProgram(container, build_datasets, kind, forward_step, embedding_ranks=embedding_ranks)


def configured() -> Any:
    """Parses and validates Megatron-LM's arguments; ends the process with a message if they are invalid."""
    return parse_and_validate_args(args_defaults=DEFAULTS)


def forward_step(
    batches: Any, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, functools.partial]:
    """Computes one micro batch in one model chunk, as megatron-core's schedules call it.

    With ``--overlap-moe-expert-parallel-comm``, schedules compute the layers themselves, and call it for their plan.
    """
    sample = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items() if torch.is_tensor(tensor)}
    group: Any = parallel_state.get_context_parallel_group()
    batch: dict[str, Any] = get_batch_on_this_cp_rank(sample, is_hybrid_cp=False, cp_group=group)
    mask = batch["loss_mask"]
    compute: Any = cast(Any, model).build_schedule_plan if return_schedule_plan else model
    output = compute(
        batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"], loss_mask=mask
    )
    return output, functools.partial(loss_function, mask)


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sums the losses of unmasked tokens; returns the sum, the number of tokens, and both for the report."""
    mask = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def build_datasets(counts: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Returns the datasets of the three splits, on each worker.

    Raises:
        ConfigError: on all workers, if a split is empty or there are too few training samples.
    """
    with refused_by_megatron():
        return _built_datasets(counts)


def _built_datasets(counts: Sequence[int | None]) -> Any:
    args = get_args()
    blend, by_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=by_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )
    sizes = [count or 0 for count in counts]  # None is one of unlimited size
    drop_unread(config, sizes)
    splits = splits_of(config, sizes)
    refuse_empty(splits, config)
    for split in splits:
        print_rank_0(f" {split.describe(args.seq_length)}")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    requested: Any = [*counts]
    train, *other_splits = BlendedMegatronDatasetBuilder(kind, requested, lambda: True, config).build()
    refuse(
        train is not None and len(train) < sizes[0],
        f"the run needs {sizes[0]} samples, and prefixes without weights are read only once. Fix: give each a weight, "
        "or train for less",
        code="samples-too-few",
    )
    return train, *other_splits


build_datasets.is_distributed = True


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Returns the ranks of a pipeline with a copy of the embedding, for tied weights and multi-token prediction."""
    args, ranks = get_args(), {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
