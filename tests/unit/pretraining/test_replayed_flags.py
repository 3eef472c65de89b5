"""Flags of a replay: each one that determines gradients or updates is stored, and named if it differs."""

import json
import random
import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest

import moc.megatron  # noqa: F401  # adapts megatron-core before others import it
from megatron.pretraining.checkpoint import contents
from megatron.pretraining.config.flag import dashed
from megatron.pretraining.data.identity import DATA, DataIdentity, Fingerprint, Source, reordered_since
from moc.store.errors import CheckpointError
from tests.unit.pretraining.flags import parse

BASE = "--ckpt-policy sparse --sparse-window 2 --snapshot-interval 1 --ckpt-dir c --swiglu"
OTHER = {
    "clip_grad": "0.5",
    "adam_beta1": "0.8",
    "adam_beta2": "0.9",
    "adam_eps": "1e-6",
    "seed": "7",
    "micro_batch_size": "1",
    "global_batch_size": "8",
    "hidden_dropout": "0.2",
    "attention_dropout": "0.2",
    "norm_epsilon": "1e-6",
    "rotary_base": "20000",
    "moe_router_topk": "3",
    "moe_aux_loss_coeff": "0.3",
    "moe_z_loss_coeff": "0.01",
    "moe_input_jitter_eps": "0.01",
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": "",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk_scaling_factor": "2.5",
    "moe_expert_capacity_factor": "1.5",
    "moe_token_dispatcher_type": "alltoall",
    "calculate_per_token_loss": "",
    "recompute_granularity": "selective",
    "position_embedding_type": "none",
}
SAVED_ELSEWHERE = re.compile(  # compared with the model, the schedule, the layout or the formats of a snapshot
    "num_layers|hidden_size|num_attention_heads|num_query_groups|group_query_attention|ffn_hidden_size|kv_channels|"
    "add_bias_linear|add_qkv_bias|qk_layernorm|swiglu|untie_embeddings|num_experts|moe_layer_freq|moe_ffn|moe_latent|"
    "moe_shared_expert_(gate|intermediate)|max_position|add_position|make_vocab|vocab|padded_vocab|pad_vocab|"
    "layernorm_epsilon|optimizer$|weight_decay|start_weight|end_weight|lr|min_lr|warmup|train_|main_params|exp_avg|"
    "bf16|fp16$|fp8$|fp8_recipe|tokenizer|tiktoken|null_tokenizer|merge_file|special_tokens|override_opt|use_checkpoint"
)
UNUSED = re.compile(  # they begin a model, name files, place work, report, or belong to programs other than this loop
    "help|init_|embedding_init|perform_init|use_cpu_init|data_parallel_random|data_|per_|valid|test_|multiple_val|"
    "full_val|phase_|mmap|num_workers|num_dataset|object_storage|mid_level|dataloader_(fast|defer)|"
    "metadata_path|trust_remote|chat_template|fim_(prefix|middle|suffix|pad|eod)|sft_tok|save|load|no_load|no_save|"
    "ckpt|dist_ckpt|async|non_persistent|override_ckpt|exit|skip_train|eval|start_eval|finetune|pretrained|use_dist|"
    "use_mp|use_tok|use_persistent|auto_detect|strict_|verify_|stream_|replication|distrib|log|timing|tensorboard|"
    "wandb|one_logger|enable_|app_tag|profile|record|memory|nvtx|pytorch_|use_pytorch|config_logger|dump_|barrier|"
    "run_work|moe_per_layer|moe_routing_trace|check_|gpu_sniff|result_|rerun|error_inj|fault_|inprocess|ft_|calc_ft|"
    "straggler|disable_str|disable_symm|disable_msc|flight|manual_gc|empty_unused|decrease_|batch_size$|model_parallel|"
    "tensor_|pipeline_|expert_(model|tensor)|context_|hybrid_context|hierarchical|max_seqlen|sequence_parallel|"
    "decoder_|encoder_|num_layers_per|num_virtual|microbatch|account_|mtp_(standalone|hybrid)|overlap|use_distributed|"
    "ddp_(num|bucket|pad)|align_|use_layer|create_all|outer_dp|suggested|num_distributed|use_(gloo|sharp|tp_pp|ring)|"
    "sharp|nccl|high_prio|cp_comm|fake_|local_rank|lazy_|tp_comm|delay_|defer_|wgrad_def|ep_overlap|cpu_off|"
    "fine_|offload|min_offl|delta_|activation_off|optimizer_|use_torch_opt|pin_cpu|symmetric|clone_|deterministic|"
    "moe_(deepep|hybridep|ncclep|flex|paged|enable_deepep|permute_fusion_into|pad_experts_for|single|upcycling|"
    "use_upcycling|shared_expert_glu)|use_grouped_gemm|cuda_graph|external_cuda|reuse_grad|keep_fp8|fp[48]_param|"
    "fp[48]_quant|use_kitchen|kitchen|use_transformer_engine_op|use_megatron_fsdp|use_torch_fsdp|megatron_fsdp|fsdp|"
    "torch_fsdp|distributed|rl_|perform_rl|grpo|langrl|refit|inference|flash_decode|mlp_chunks|max_tokens_to|output_b|"
    "use_legacy|decode_only|num_spec|offset_samp|is_hybrid|hybrid_|use_mamba|mamba|linear_|dsa_|experimental|"
    "multi_latent|q_lora|kv_lora|qk_head|qk_pos|v_head|cache_mla|mla_|heterogeneous|relative_|bert|ict|biencoder|"
    "indexer|retriever|titles|evidence|block_|embedding_path|query_in|use_one_sent|mask_|short_seq|sample_rate|"
    "num_classes|img_|num_channels|patch_|classes_|head_lr|vision|swin|iter_per|dino|adlr|deprecated|yaml_cfg|"
    "checkpoint_act|recompute_act|logits_save|nccl_all"
)


def differing(*changed: str) -> str:
    """Returns the error of a replay under other values of the flags."""
    there, here = parse(BASE), parse(f"{BASE} {' '.join(f'{dashed(name)} {OTHER[name]}' for name in changed)}")
    scheduler: Any = SimpleNamespace(state_dict=dict)
    saved = {contents.KEY: contents.repeated(there), "scheduler": {}}
    contents.check_replay(there, scheduler, None, saved, "c")
    with pytest.raises(CheckpointError) as refused:
        contents.check_replay(here, scheduler, None, saved, "c")
    assert refused.value.code == "replay-not-identical"
    return str(refused.value)


def test_any_two_flags_that_differ_are_named():
    names = list(OTHER)
    random.Random(1).shuffle(names)
    for pair in zip(names[::2], names[1::2], strict=True):
        said = differing(*pair)
        assert all(f"{dashed(name)} is" in said for name in pair), said


def test_schedule_is_compared_without_number_of_workers():
    words = f"{BASE} --step-batch-size-schedule 0:4,1K:8"
    stored, current = (contents.repeated(parse(words, workers=workers)) for workers in (1, 2))
    assert stored == current and stored["step_batch_size_schedule"] == "0:4,1K:8"


def test_each_option_is_compared_or_known_not_to_change_a_replay():
    """A new option of Megatron-LM belongs into one of three lists."""
    options = json.loads(files("megatron.pretraining.entry").joinpath("options.json").read_text())["options"]
    names = {option["name"] for option in options} - {*contents.repeated(parse(BASE))}
    assert sorted(name for name in names if not SAVED_ELSEWHERE.match(name) and not UNUSED.match(name)) == []


def test_another_order_of_the_same_samples_is_named():
    file = Fingerprint(1, 1, "0" * 32, "0" * 32)
    one, other = (DataIdentity((Source("train", "a", file, order * 32),), None) for order in "12")
    assert reordered_since({DATA: one.plain()}, other) and not reordered_since({DATA: one.plain()}, one)
