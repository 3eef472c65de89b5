"""Table of the arguments of Megatron-LM's own loop that this project refuses, and why.

``tests/unit/pretraining/test_stock_loop.py`` derives the arguments from Megatron-LM's source, and has a table of those
that this project reads. So a new release cannot add one that has no entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry.optimizers import refuse_optimizers


class Refusal(NamedTuple):
    """Why an argument is refused.

    Attributes:
        reason: a sentence's predicate, whose subject is the option.
        off: values that turn the feature off.
        remedy: the alternative.
    """

    reason: str
    off: tuple[object, ...] = (None, False)
    remedy: str = "drop it"


_GRAPHS = "captures an iteration in a CUDA graph, which a recovery by parts of an iteration cannot replay"
_TENSORS = "writes tensors of an iteration, which a recovery computes again: its files would be written twice"
_PHASES = "changes the data in the course of a run, whose position would no longer be one number"
_FSDP = "shards weights, and snapshots need complete weights on each worker"
_MEASURES = "measures iterations of Megatron-LM's loop"
_FAULTS = Refusal("injects faults from within Megatron-LM's loop", remedy="inject them with --inject")
_RECOVERS = "recovers from lost workers by another program than mocrun"
_ELSEWHERE = "keeps checkpoints outside of --save: --ckpt-policy with --ckpt-tier memory or peers takes their place"

REFUSED = {
    "cuda_graph_impl": Refusal(_GRAPHS, (None, "none")),
    "optimizer_cuda_graph": Refusal(_GRAPHS),
    "log_straggler": Refusal(_MEASURES),
    "log_energy": Refusal(_MEASURES),
    "gpu_sniff_test_interval": Refusal("tests devices between iterations, outside of the commit all-reduce"),
    "qk_clip": Refusal("changes weights after the optimizer's update, which a replay would not repeat"),
    "log_max_attention_logit": Refusal("reads values that the commit all-reduce does not carry"),
    "iterations_to_skip": Refusal("passes samples without an iteration, which no position describes", (None, ())),
    "decrease_batch_size_if_needed": Refusal("drops samples by the number of workers, which may change in a run"),
    "save_wgrads_interval": Refusal(_TENSORS),
    "save_dgrads_interval": Refusal(_TENSORS),
    "save_activations_interval": Refusal(_TENSORS),
    "save_params_interval": Refusal(_TENSORS),
    "save_tokens_per_expert_interval": Refusal(_TENSORS),
    "non_persistent_save_interval": Refusal(_ELSEWHERE),
    "non_persistent_ckpt_type": Refusal(_ELSEWHERE),
    "dataloader_type": Refusal(
        "external hands on a data loader of the script, which cannot start at any sample", (None, "single", "cyclic")
    ),
    "distributed_timeout_seconds_after_init": Refusal("changes process groups, whose timeouts mocrun controls"),
    "adlr_autoresume": Refusal("resumes jobs by another system than mocrun"),
    "phase_transition_iterations": Refusal(_PHASES),
    "multiple_validation_sets": Refusal("evaluates several validation sets, and a record has one validation loss"),
    "full_validation": Refusal("evaluates as many batches as the data have, which differ between workers"),
    "reuse_grad_buf_for_mxfp8_param_ag": Refusal("overwrites the reduced gradients that a recovery may apply"),
    "moe_expert_rank_capacity_factor": Refusal(
        "runs an iteration again when experts overflow, before the commit all-reduce"
    ),
    "hybrid_context_parallel": Refusal("balances samples between workers by their past"),
    "modelopt_enabled": Refusal("distills or quantizes by ModelOpt, whose state no snapshot holds"),
    "moe_routing_trace_path": Refusal(_TENSORS),
    "fine_grained_activation_offloading": Refusal("binds workers to processors when Megatron-LM's loop starts"),
    "perform_rl_step": Refusal("trains by reinforcement learning, whose data depend on the weights"),
    "rl_profile": Refusal("trains by reinforcement learning, whose data depend on the weights"),
    "vision_pretraining": Refusal("updates a teacher after the optimizer, which a replay would not repeat"),
    "run_workload_inspector_server": Refusal("starts a server in each worker"),
    "log_progress": Refusal("writes a file of progress that events.jsonl replaces"),
    "use_megatron_fsdp": Refusal(_FSDP),
    "use_torch_fsdp2": Refusal(_FSDP),
    "fsdp_manual_registration": Refusal(_FSDP),
    "nccl_ub": Refusal("registers buffers with communicators, which a recovery replaces"),
    "gtp_weight_remat_size": Refusal(_FSDP, (None, 1)),
    "ckpt_convert_format": Refusal(
        "converts the checkpoint that Megatron-LM's set-up loads, and mocrun loads it later",
        remedy="convert it with tools/convert_checkpoint.py",
    ),
    "moe_use_upcycling": Refusal(
        "copies the dense checkpoint that Megatron-LM's set-up loads, and mocrun loads it later",
        remedy="write the first checkpoint with Megatron-LM itself, and continue from it without the option",
    ),
    "logits_save_dir": Refusal("writes logits along with Megatron-LM's asynchronous checkpoints"),
    "logits_load_dir": Refusal("reads a teacher's logits in the order of its run, which a replay would not repeat"),
    "fault_injector_ranks": _FAULTS,
    "fault_injector_num_ranks": _FAULTS,
}
"""Refused arguments."""

OUTSIDE = {
    "enable_ft_package": Refusal(_RECOVERS),
    "inprocess_restart": Refusal(_RECOVERS),
    "error_injection_rate": _FAULTS._replace(off=(None, 0)),
    "rerun_mode": Refusal(
        "compares iterations that are computed again within a step, which is off: a recovery repeats iterations",
        (None, "disabled", "validate_results"),
    ),
    "rampup_batch_size": Refusal("has no effect in megatron-core 0.19, whose option is --step-batch-size-schedule"),
}
"""Refused arguments that Megatron-LM's loop does not read."""


def refusals(arguments: Any) -> Iterator[str]:
    """Yields one sentence for each argument that selects a feature only Megatron-LM's loop has."""
    for name, refusal in (REFUSED | OUTSIDE).items():
        value = getattr(arguments, name, None)
        if value not in refusal.off and value != []:
            yield f"--{name.replace('_', '-')} {refusal.reason}. Fix: {refusal.remedy}"


def refuse_arguments(arguments: Any) -> None:
    """Raises ``ConfigError`` with all refusals in one message."""
    problems = Problems()
    problems.refuse(
        getattr(arguments, "eval_interval", 0) is None,
        "--eval-interval is missing, and Megatron-LM counts samples with it. Fix: add it",
        code="megatron-options-refused",
    )
    for sentence in refusals(arguments):
        problems.refuse(True, sentence, code="loop-argument-unsupported")
    problems.check(refuse_optimizers, arguments)
    problems.raise_found()
