"""Checks of Megatron-LM's arguments without importing it, which takes seconds.

They contain what Megatron-LM's own checks lack, and the checks that command lines fail most often: layouts that do not
divide, contradictions between options, options of tokenizers.  Everything else is left to Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron.pretraining.config.flag import Problems, dashed, listed, refuse
from moc.cli_output import counted

_AT_LEAST = {
    1: (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups seq_length "
        "make_vocab_size_divisible_by vocab_size moe_layer_freq moe_router_topk tensor_model_parallel_size "
        "pipeline_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers max_position_embeddings padded_vocab_size moe_ffn_hidden_size "
        "moe_router_num_groups moe_router_group_topk eval_global_batch_size eval_micro_batch_size "
        "micro_batch_size global_batch_size train_iters train_samples lr_decay_iters lr_decay_samples seed "
        "save_interval save_retain_interval eval_interval log_interval log_memory_interval tensorboard_log_interval "
        "check_weight_hash_across_dp_replicas_interval distributed_timeout_minutes"
    ),
    0: (
        "lr min_lr weight_decay exit_interval exit_duration_in_mins manual_gc_interval train_sync_interval "
        "start_eval_at_iter num_workers"
    ),
}
"""Arguments by the smallest value that works in Megatron-LM's loop."""

_DATA = (
    "mock_data", "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
    "per_split_data_args_path",
)  # fmt: skip
"""Arguments that name data. This project's program needs one."""

_CHECKPOINTS = "save", "load", "pretrained_checkpoint"
"""Arguments that name a directory of checkpoints. An empty path would mean the current directory."""


_DATA_OF_SCRIPTS = (
    "sft", "fim_data", "dataloader_inter_document_masking", "dataloader_fast_cache_load",
    "dataloader_defer_npy_index_mmap", "per_dataset_sequences_path", "object_storage_cache_path",
)  # fmt: skip
"""Arguments of data that this project's program does not read, and Megatron-LM's ``pretrain_gpt.py`` does."""
_OF_SCRIPTS = {"check_for_spiky_loss": "pretrain_gpt.py", "hybrid_layer_pattern": "pretrain_hybrid.py"}
"""Further arguments that only a script of Megatron-LM reads, and the script."""


def set_defaults(arguments: Any, defaults: Mapping[str, Any]) -> None:
    """Sets a program's defaults of options that are not given, and the values that scripts turn features off by."""
    for name, value in defaults.items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, value)
    if not arguments.save and arguments.save_interval is not None and arguments.save_interval < 1:
        arguments.save_interval = None  # it has no effect, and scripts turn saving off by 0
    if isinstance(arguments.eval_iters, int):
        arguments.eval_iters = max(arguments.eval_iters, 0)  # scripts turn evaluation off by -1
    arguments.num_experts = arguments.num_experts or None  # 0 is a dense model


def leave_out_kernels(arguments: Any, explicit: Collection[str], has_cuda: bool) -> None:
    """Turns off, on a CPU, the options of kernels that only CUDA has and that Megatron-LM turns on by default.

    Args:
        arguments: Megatron-LM's arguments, before their check.
        explicit: names of the arguments on the command line.
        has_cuda: whether workers compute on GPUs.
    """
    if not has_cuda:
        arguments.apply_rope_fusion = arguments.gradient_accumulation_fusion = arguments.masked_softmax_fusion = False
        if "transformer_impl" not in explicit:
            arguments.transformer_impl = "local"


def check_kernels(arguments: Any, has_cuda: bool) -> None:
    """Raises ``ConfigError`` if there is no CUDA, and the model or the profiler needs it."""
    problems, pattern, spec = Problems(), getattr(arguments, "hybrid_layer_pattern", None), arguments.spec
    is_core_spec = not spec or spec[0].startswith("megatron.core.")
    problems.refuse(
        pattern and is_core_spec and not has_cuda,
        f"--hybrid-layer-pattern {pattern} builds layers of Transformer Engine, which needs CUDA. Fix: use a GPU, or a "
        "--spec of other layers",
        code="device-unsupported",
    )
    problems.refuse(
        arguments.profile and not arguments.use_pytorch_profiler and not has_cuda,
        "--profile starts CUDA's profiler, which needs CUDA. Fix: use a GPU, or add --use-pytorch-profiler",
        code="device-unsupported",
    )
    problems.raise_found()


MOMENTS = {"exp_avg_dtype": ("fp32", "fp16", "fp8"), "exp_avg_sq_dtype": ("fp32", "fp16")}
"""Formats of Adam's moments that this project implements, by name of the argument."""


def check_formats(arguments: Any) -> None:
    """Raises ``ConfigError`` if the model or the optimizer cannot have the formats that this project implements."""
    problems = Problems()
    problems.refuse(
        arguments.fp8 and arguments.transformer_impl == "local" and arguments.num_experts and arguments.add_bias_linear,
        "--fp8-format without Transformer Engine has no biases of experts. Fix: add --disable-bias-linear, or drop "
        "--fp8-format",
        code="fp8-unsupported",
    )
    for name, formats in MOMENTS.items() if not arguments.use_precision_aware_optimizer else ():
        format = getattr(arguments, name)
        problems.refuse(
            format not in formats,
            f"{dashed(name)} {format} needs Transformer Engine and --use-precision-aware-optimizer. Fix: "
            f"choose one of {', '.join(formats)}",
            code="optimizer-excludes-flag",
        )
        problems.refuse(
            format != "fp32" and arguments.optimizer != "adam",
            f"{dashed(name)} is for Adam, and --optimizer is {arguments.optimizer}. Fix: drop it",
            code="optimizer-excludes-flag",
        )
    problems.raise_found()


def check_limits(arguments: Any) -> None:
    """Raises ``ConfigError`` with all numbers that are too small, paths that are empty, and mock data next to others.

    Megatron-LM divides by some of the numbers, in its checks or later in a worker.
    """
    problems = Problems()
    for name, minimum in _too_small(arguments):
        problems.refuse(
            True,
            f"{dashed(name)} is {getattr(arguments, name)}. Fix: give a number that is at least {minimum}",
            code="value-out-of-range",
        )
    for name in _CHECKPOINTS:
        problems.refuse(
            getattr(arguments, name, None) == "",
            f"{dashed(name)} is empty, perhaps from a variable that is not set. Fix: give a path, or drop it",
            code="value-missing",
        )
    named = [name for name in _DATA if getattr(arguments, name, None)]
    problems.refuse(
        len(named) > 1 and "mock_data" in named,
        f"--mock-data excludes {' and '.join(dashed(name) for name in named if name != 'mock_data')}. Fix: drop "
        "--mock-data to train on the data, or drop the others",
        code="flags-exclude-each-other",
    )
    problems.raise_found()


def raise_to_limits(arguments: Any) -> frozenset[str]:
    """Replaces numbers that are too small by the smallest ones that work; returns the names of the arguments.

    So a program can check the other arguments.
    """
    changed = dict(_too_small(arguments))
    vars(arguments).update(changed)
    return frozenset(changed)


def _too_small(arguments: Any) -> Iterator[tuple[str, int]]:
    """Yields the arguments whose numbers are too small, with the smallest number that works."""
    for minimum, names in _AT_LEAST.items():
        for name in names.split():
            value = getattr(arguments, name, None)
            if isinstance(value, (int, float)) and not value >= minimum:  # nan is too small
                yield name, minimum


def check_run(arguments: Any) -> None:
    """Raises ``ConfigError`` if this project's program has no data or iterations, or does not read an argument."""
    problems = Problems()
    for name in _DATA_OF_SCRIPTS:
        problems.refuse(
            getattr(arguments, name),
            f"{dashed(name)} needs Megatron-LM's pretrain_gpt.py. Fix: run that under mocrun",
            code="data-kind-unsupported",
        )
    for name, script in _OF_SCRIPTS.items():
        problems.refuse(
            getattr(arguments, name),
            f"{dashed(name)} needs Megatron-LM's {script}. Fix: run that under mocrun",
            code="loop-argument-unsupported",
        )
    problems.refuse(
        not any(getattr(arguments, name) for name in _DATA),
        "no data are given. Fix: add --data-path, --train-data-path or --mock-data",
        code="flag-missing",
    )
    problems.check(check_length, arguments)
    problems.raise_found()


def check_length(arguments: Any) -> None:
    """Raises ``ConfigError`` if the length of the run is not given; Megatron-LM counts samples with it in any case."""
    problems = Problems()
    problems.refuse(
        arguments.train_iters is None and arguments.train_samples is None,
        "--train-iters is missing. Fix: give it, or --train-samples",
        code="flag-missing",
    )
    problems.raise_found()


_FREE_LAYERS = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "hybrid_layer_pattern",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "hybrid_override_pattern",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
"""Arguments that let stages have different numbers of layers, or have their own checks."""
_SIZES = "num_layers", "hidden_size", "num_attention_heads"
"""Arguments that a model needs."""
_OTHER_SIZES = (
    "encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
"""Arguments that describe a model in another way, or have their own checks."""
_VIRTUAL_STAGES = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
"""Arguments that divide each stage into virtual ones of equal size; Megatron-LM's checks are in a worker."""
_TOKENIZER_FILES = {
    "NullTokenizer": ("vocab_size",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
}
"""Arguments that a type of tokenizer needs."""


def check_divisions(arguments: Any) -> None:
    """Raises ``ConfigError`` with all sizes of the model that do not divide among workers, whatever their number."""
    problems = Problems()
    problems.refuse(
        arguments.micro_batch_size is None, "--micro-batch-size is missing. Fix: give it", code="flag-missing"
    )
    for name in () if any(getattr(arguments, size, None) for size in _OTHER_SIZES) else _SIZES:
        problems.refuse(
            getattr(arguments, name) is None,
            f"{dashed(name)} is missing. Fix: give it, or a --model",
            code="flag-missing",
        )
    tensor, pipeline = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    remainders = [
        ("num_attention_heads", tensor),
        ("num_experts", "expert_model_parallel_size"),
        *([] if any(getattr(arguments, name, None) for name in _FREE_LAYERS) else [("num_layers", pipeline)]),
        *([] if arguments.kv_channels else [("hidden_size", "num_attention_heads")]),
        *([("seq_length", tensor)] if arguments.sequence_parallel and arguments.tensor_model_parallel_size > 1 else []),
    ]
    for name, divisor in remainders:
        problems.refuse_remainder(name, getattr(arguments, name), divisor, getattr(arguments, divisor))
    context = arguments.context_parallel_size
    problems.refuse(
        context > 1 and arguments.seq_length and arguments.seq_length % (2 * context),
        f"--seq-length {arguments.seq_length} is not a multiple of twice --context-parallel-size {context}. Fix: "
        "change one of them",
        code="flag-not-a-multiple",
    )
    problems.raise_found()


def check_virtual_stages(arguments: Any) -> None:
    """Raises ``ConfigError`` if stages of equal size cannot be divided into the virtual stages."""
    problems, stages, layers = Problems(), arguments.pipeline_model_parallel_size, arguments.num_layers
    explicit = [name for name in _VIRTUAL_STAGES if getattr(arguments, name) is not None]
    if len(explicit) != 1 or any(getattr(arguments, name, None) for name in _FREE_LAYERS if name not in explicit):
        return
    problems.refuse_remainder("num_layers", layers, "pipeline_model_parallel_size", stages)
    if not layers or layers % stages:
        return problems.raise_found()
    spelling, part, layers_per_stage = dashed(explicit[0]), getattr(arguments, explicit[0]), layers // stages
    problems.refuse(
        layers_per_stage % part,
        f"{counted(layers_per_stage, 'layer')} of each pipeline stage (--num-layers {layers} / "
        f"--pipeline-model-parallel-size {stages}) cannot be divided by {spelling} {part}. Fix: change one of them",
        code="flag-not-a-multiple",
    )
    is_interleaved = part > 1 if explicit == ["num_virtual_stages_per_pipeline_rank"] else part < layers_per_stage
    problems.refuse(
        stages == 1 and is_interleaved,
        f"{spelling} needs --pipeline-model-parallel-size greater than 1. Fix: raise it, or drop {spelling}",
        code="flag-needs-another",
    )
    problems.raise_found()


def check_contradictions(arguments: Any) -> None:
    """Raises ``ConfigError`` with all contradictions between Megatron-LM's arguments, as parsed."""
    problems = Problems()
    for flag, other_flag in (
        ("bf16", "fp16"), ("train_iters", "train_samples"), ("train_iters", "lr_decay_samples"),
        ("train_samples", "lr_decay_iters"), ("train_iters", "lr_warmup_samples"),
        ("train_samples", "lr_warmup_iters"), ("data_path", "data_args_path"), ("data_path", "train_data_path"),
        ("global_batch_size", "step_batch_size_schedule"), _VIRTUAL_STAGES,
    ):  # fmt: skip
        problems.refuse(
            getattr(arguments, flag) and getattr(arguments, other_flag),
            f"{dashed(flag)} excludes {dashed(other_flag)}. Fix: drop one of them",
            code="flags-exclude-each-other",
        )
    longest = arguments.max_position_embeddings
    problems.refuse(
        longest and arguments.seq_length and longest < arguments.seq_length,
        f"--seq-length {arguments.seq_length} is greater than --max-position-embeddings {longest}. Fix: change "
        "one of them",
        code="flag-exceeds-another",
    )
    for flag, other_flag in (
        ("overlap_param_gather", "overlap_grad_reduce"), ("moe_single_grouped_weight", "moe_grouped_gemm"),
        ("moe_single_grouped_bias", "moe_grouped_gemm"),
    ):  # fmt: skip
        problems.refuse(
            getattr(arguments, flag) and not getattr(arguments, other_flag),
            f"{dashed(flag)} needs {dashed(other_flag)}. Fix: add it, or drop {dashed(flag)}",
            code="flag-needs-another",
        )
    first, last = arguments.profile_step_start, arguments.profile_step_end
    problems.refuse(
        arguments.profile and last <= first,
        f"--profile-step-end {last} is not after --profile-step-start {first}. Fix: change one of them",
        code="flag-exceeds-another",
    )
    needed = [name for name in _TOKENIZER_FILES.get(arguments.tokenizer_type, ()) if not getattr(arguments, name)]
    problems.refuse(
        needed,
        f"--tokenizer-type {arguments.tokenizer_type} needs {listed([*map(dashed, needed)])}. Fix: add "
        f"{'it' if len(needed) == 1 else 'them'}",
        code="flag-needs-another",
    )
    problems.raise_found()


def check_schedule(arguments: Any) -> None:
    """Raises ``ConfigError`` if the learning rate cannot be scheduled, which Megatron-LM only notices in a worker."""
    problems, unit = Problems(), "samples" if arguments.train_samples else "iters"
    length = getattr(arguments, f"lr_decay_{unit}") or getattr(arguments, f"train_{unit}")
    warmup = getattr(arguments, f"lr_warmup_{unit}")
    problems.refuse(
        length and warmup and warmup >= length,
        f"--lr-warmup-{unit} {warmup} is not less than the {length} {unit} of --lr-decay-{unit}, which is "
        f"--train-{unit} by default. Fix: change one of them",
        code="flag-exceeds-another",
    )
    fraction = arguments.lr_warmup_fraction
    problems.refuse(
        fraction is not None and not 0 <= fraction < 1,
        f"--lr-warmup-fraction is {fraction}. Fix: give a number that is at least 0, and less than 1",
        code="value-out-of-range",
    )
    start = arguments.lr_warmup_init
    problems.refuse(
        arguments.lr is not None and start is not None and start > arguments.lr,
        f"--lr-warmup-init {start} is greater than --lr {arguments.lr}. Fix: change one of them",
        code="flag-exceeds-another",
    )
    problems.raise_found()


def check_router(arguments: Any) -> None:
    """Raises ``ConfigError`` if top-k exceeds the number of experts, which Megatron-LM only notices in training."""
    groups, chosen = arguments.moe_router_num_groups, arguments.moe_router_group_topk
    most = arguments.num_experts and (
        arguments.num_experts // groups * chosen if groups and chosen else arguments.num_experts
    )
    refuse(
        most and arguments.moe_router_topk > most,
        f"--moe-router-topk {arguments.moe_router_topk} is more than the {most} experts that a token can go to. Fix: "
        "lower it, or raise --num-experts",
        code="value-out-of-range",
    )
