"""The arguments of Megatron-LM's loop that have an entry are those that its source reads."""

import ast
import dataclasses
import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core

from megatron.training import config  # noqa: E402

from megatron.pretraining.config import ConfigError  # noqa: E402
from megatron.pretraining.entry import stock_loop  # noqa: E402
from tests.cases import each_row  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


FUNCTIONS = (
    "pretrain", "train", "train_step", "post_training_step_callbacks", "checkpoint_and_decide_exit",
    "save_checkpoint_and_time", "evaluate", "evaluate_and_print_results", "build_train_valid_test_data_iterators",
    "build_train_valid_test_data_loaders", "get_train_valid_test_num_samples", "should_disable_forward_pre_hook",
    "setup_model_and_optimizer",
)  # fmt: skip
"""Functions of ``megatron.training.training`` that are Megatron-LM's loop, and its set-up, which loads nothing here."""

PORTED = {
    "megatron/pretraining/entry/program.py": """
        align_grad_reduce align_param_gather overlap_grad_reduce overlap_param_gather empty_unused_memory_level
        skip_train train_iters train_sync_interval start_eval_at_iter consumed_valid_samples manual_gc_eval
        check_weight_hash_across_dp_replicas_interval""",
    "megatron/pretraining/entry/streams.py": """
        micro_batch_size eval_global_batch_size eval_micro_batch_size virtual_pipeline_model_parallel_size""",
    "megatron/pretraining/entry/schedule.py": "decoder_seq_length seq_length",
    "megatron/pretraining/entry/log.py": """
        curr_iteration iteration consumed_train_samples num_floating_point_operations_so_far
        tensorboard_log_interval
        profile profile_ranks profile_step_start profile_step_end use_pytorch_profiler nvtx_ranges record_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes
        tensorboard_dir""",
    "megatron/pretraining/entry/checkpoints.py": "finetune load save pretrained_checkpoint",
    "megatron/pretraining/checkpoint/background.py": "async_save",
    "megatron/pretraining/duties.py": "eval_interval exit_interval save_interval",
    "megatron/pretraining/process/stopping.py": "exit_signal_handler exit_duration_in_mins",
    "megatron/pretraining/setup.py": "manual_gc manual_gc_interval log_num_zeros_in_grad log_params_norm",
}  # fmt: skip
"""By file of this project, the arguments that it reads under the same name."""

BY_STOCK = frozenset(
    """
    eval_iters log_interval log_throughput log_validation_ppl_to_tensorboard
    validation_set_names sft global_batch_size step_batch_size_schedule data_parallel_size world_size rank
    tensor_model_parallel_size context_parallel_size train_samples tensorboard_dir num_experts
    use_distributed_optimizer use_layer_wise_distributed_optimizer do_test do_train do_valid barrier_with_L1_time
    use_tp_pp_dp_mapping fp8 ckpt_format no_load_optim disable_straggler_on_startup straggler_ctrlr_port
    straggler_minmax_count cuda_graph_warmup_steps adlr_autoresume_interval vision_pretraining_type
    moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
    moe_routing_trace_max_training_iters grpo_group_size grpo_iterations grpo_prompts_per_step refit_method
    replication replication_factor replication_jump non_persistent_local_ckpt_dir rl_profile_dir
    rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
    rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level
    rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size
    rl_offload_inference_model_weights_when_idle rl_offload_optimizer_during_inference rl_use_sequence_packing
    bf16 fp16 fp4 fp8_recipe calculate_per_token_loss cuda_graph_modules dump_param_to_param_group_map
    expert_model_parallel_size ffn_hidden_size moe_shared_expert_overlap use_gloo_process_groups use_mup
    ckpt_convert_save moe_upcycling_granularity logits_save_dtype logits_save_top_k logits_save_top_p
    logits_save_top_p_min_k fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
    fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds fault_injector_seed
    """.split()
)
"""Arguments that Megatron-LM's functions read here as well, and details of refused features."""


def known_arguments() -> frozenset[str]:
    """All arguments with an entry."""
    return BY_STOCK | stock_loop.REFUSED.keys() | {name for names in PORTED.values() for name in names.split()}


def read_arguments() -> set[str]:
    """The names that the functions of Megatron-LM's loop read of ``args`` and of its container of configurations."""
    spec = importlib.util.find_spec("megatron.training")
    tree = ast.parse((Path(next(iter(spec.submodule_search_locations))) / "training.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(FUNCTIONS) <= functions.keys()
    found = set()
    for name in FUNCTIONS:
        for node in ast.walk(functions[name]):
            match node:
                case ast.Attribute(value=ast.Name(id="args"), ctx=ast.Load()):
                    found.add(node.attr)
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="cfg_container"))):
                    found.add(node.attr)
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[ast.Name(id="args"), ast.Constant(value=str(key)), *_]
                ):
                    found.add(key)
                case ast.Call(func=ast.Attribute(attr="fields"), args=[ast.Name(id=kind)]):  # read by name of the field
                    found |= {one.name for one in dataclasses.fields(getattr(config, kind))}
    return found - {"get_builder_cls"}


def test_each_loop_argument_has_entry():
    missing = read_arguments() - known_arguments()
    assert not missing, "port these arguments, or refuse them"


def test_each_entry_is_read_by_loop():
    unread = known_arguments() - read_arguments() - {"tensorboard_log_interval"}  # read by training_log
    assert not unread


@each_row("file", PORTED)
def test_ported_argument_is_read_in_listed_file(file):
    text = (ROOT / file).read_text()
    assert not [name for name in PORTED[file].split() if name not in text]


def test_all_refusals_are_in_one_message():
    arguments = Namespace(log_straggler=True, log_energy=True, iterations_to_skip=[], cuda_graph_impl="none")
    with pytest.raises(ConfigError) as caught:
        stock_loop.refuse_arguments(arguments)
    assert [one.code for one in caught.value.problems] == ["loop-argument-unsupported"] * 2
    assert "--log-straggler " in str(caught.value) and "--log-energy " in str(caught.value)
    stock_loop.refuse_arguments(Namespace(log_straggler=False, iterations_to_skip=[3][:0], cuda_graph_impl="none"))


@each_row(
    "arguments",
    [
        dict(ckpt_convert_format="torch", ckpt_convert_save="there"),
        dict(moe_use_upcycling=True),
        dict(logits_save_dir="there"),
        dict(logits_load_dir="there"),
        dict(fault_injector_ranks="0"),
        dict(fault_injector_num_ranks=1),
        dict(enable_ft_package=True),
        dict(inprocess_restart=True),
        dict(multiple_validation_sets=True),
        dict(error_injection_rate=2),
        dict(rerun_mode="report_stats"),
    ],
)
def test_ignored_flags_and_random_weights_are_refused(arguments):
    with pytest.raises(ConfigError) as caught:
        stock_loop.refuse_arguments(Namespace(**arguments))
    assert [one.code for one in caught.value.problems] == ["loop-argument-unsupported"]
