"""Lists the private interfaces of other libraries that this project uses.

An entry names something that its library does not document as public, and that the project reads, calls, replaces or
overrides: a name with a leading underscore, an attribute of an object, a function that the project replaces, or a
method that it overrides.  :func:`check` compares entries with the installed libraries.  A run checks the entries of
its features before it starts workers, so that an unknown release ends it with one sentence.

This module imports none of the libraries.  :func:`check` imports the modules of the entries that it checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any, Protocol

from moc.errors import UserError

SUPPORTED = {
    "torch": "torch>=2.11,<2.16",
    "megatron-core": "megatron-core>=0.19.2,<0.20",
    "deepspeed": "deepspeed>=0.19,<0.20",
    "transformer-engine": "transformer-engine>=2.15",
    "lightning": "lightning>=2.6,<2.7",
    "torchtitan": "torchtitan>=0.3,<0.4",
}
"""Supported releases by library: the table was checked against them."""

_PACKAGES = {
    "torch": "torch",
    "megatron": "megatron-core",
    "deepspeed": "deepspeed",
    "transformer_engine": "transformer-engine",
    "lightning": "lightning",
    "torchtitan": "torchtitan",
}


class Expectation(Protocol):
    """Property of an interface that the project relies on."""

    def problem(self, interface: Any) -> str | None:
        """Return how ``interface`` differs from the expectation, as a predicate; None if it does not."""


@dataclass(frozen=True)
class Parameters:
    """Function that accepts these parameters.

    Attributes:
        names: in order, without ``self``.
        by_keyword: callers pass keywords, so that other parameters may be in between.
        only: there are no other parameters, because the project's replacement accepts no others.
    """

    names: tuple[str, ...]
    by_keyword: bool = False
    only: bool = False

    def problem(self, interface: Any) -> str | None:
        """See :class:`Expectation`.  A function written in C has no signature and only has to exist."""
        if not callable(interface):
            return "is not a function"
        try:
            parameters = [
                parameter for parameter in inspect.signature(interface).parameters.values() if parameter.name != "self"
            ]
        except ValueError:
            return None
        names = [parameter.name for parameter in parameters]
        other_parameters = [
            parameter
            for parameter in parameters
            if parameter.name not in self.names and parameter.kind not in _VARIABLE
        ]
        in_order = [name for name in names if name in self.names] if self.by_keyword else names[: len(self.names)]
        if in_order != list(self.names):
            return f"takes ({', '.join(names)}) and not ({', '.join(self.names)})"
        unknown = (
            other_parameters
            if self.only
            else [parameter for parameter in other_parameters if parameter.default is inspect.Parameter.empty]
        )
        return f"takes the unknown parameter {unknown[0].name}" if unknown else None


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Members:
    """Object with these attributes; a class also has the attributes that its ``__init__`` names."""

    names: tuple[str, ...]

    def problem(self, interface: Any) -> str | None:
        instance_attributes = _instance_attributes(interface) if inspect.isclass(interface) else frozenset()
        missing = [name for name in self.names if name not in instance_attributes and not hasattr(interface, name)]
        return f"has no attribute {missing[0]}" if missing else None


@dataclass(frozen=True)
class Refers:
    """Function whose code refers to these global names, attributes, local names or keywords."""

    names: tuple[str, ...]

    def problem(self, interface: Any) -> str | None:
        code = getattr(inspect.unwrap(interface), "__code__", None)
        if code is None:
            return "is not a function"
        used_names = {
            name
            for nested_code in _codes(code)
            for name in (*nested_code.co_names, *nested_code.co_varnames, *nested_code.co_cellvars)
        }
        constants = [constant for nested_code in _codes(code) for constant in nested_code.co_consts]
        used_names |= {keyword for names in constants if isinstance(names, tuple) for keyword in names}
        missing = [name for name in self.names if name not in used_names]
        return f"does not use {missing[0]}" if missing else None


@dataclass(frozen=True)
class StateHolder:
    """Global object with values that an iteration changes: a dictionary, an object, or a function that returns it.

    Attributes:
        names: attributes that are dictionaries of lists of tensors, if only the content of these tensors is state,
            because modules register them once; empty if everything in the object is state.
    """

    names: tuple[str, ...] = ()

    def problem(self, interface: Any) -> str | None:
        missing = [name for name in self.names if not hasattr(interface, name)]
        return f"has no attribute {missing[0]}" if missing else None

    def state(self, holder: Any) -> Any:
        """Returns the values, or the tensors of :attr:`names`."""
        if self.names:
            return [tensor for name in self.names for tensors in getattr(holder, name).values() for tensor in tensors]
        return holder() if callable(holder) else holder


@dataclass(frozen=True)
class PrivateInterface:
    """Entry of the table.

    Attributes:
        target: module and name, as ``package.module:Class.method``; only the module if the name is empty.
        expects: property that the project relies on.
        use: use by the project.
        file: source file with this use.
        feature: feature of a run that needs it.
    """

    target: str
    expects: Expectation
    use: str
    file: str
    feature: str

    @property
    def library(self) -> str:
        """Distribution that contains the interface."""
        return _PACKAGES[self.target.partition(".")[0].partition(":")[0]]

    @property
    def names(self) -> frozenset[str]:
        """All names of the library in the entry."""
        named = getattr(self.expects, "names", ())
        return frozenset((*self.target.partition(":")[2].split("."), *named)) - {""}


@dataclass(frozen=True)
class Mismatch:
    """Entry that an installed library does not fulfil."""

    entry: PrivateInterface
    problem: str

    def __str__(self) -> str:
        target = self.entry.target.replace(":", ".")
        return str(_refusal(self.entry.library, f"{target} {self.problem}, and {self.entry.file} {self.entry.use} it"))


class UnknownReleaseError(UserError, RuntimeError):
    """Difference between a library and the table; the message has the entry and the remedy."""

    code = "release-unknown"


def check(features: Collection[str]) -> list[Mismatch]:
    """Compares the entries of some features with the installed libraries; imports their modules."""
    return list(differing(entry for entry in TABLE if entry.feature in features))


def require(*features: str) -> None:
    """Raises UnknownReleaseError on the first difference that :func:`check` finds."""
    for mismatch in differing(entry for entry in TABLE if entry.feature in features):
        raise UnknownReleaseError(str(mismatch))


@contextlib.contextmanager
def refuse_import() -> Iterator[None]:
    """Raises UnknownReleaseError if a library lacks a name that is imported in this context."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES or (error.name or "").startswith("megatron.pretraining"):
            raise
        raise _refusal(_PACKAGES[package], _first_line(error)) from error


def differing(entries: Iterator[PrivateInterface]) -> Iterator[Mismatch]:
    """Yields the entries that the installed libraries do not fulfil."""
    for entry in entries:
        module, _, path = entry.target.partition(":")
        try:
            interface: Any = importlib.import_module(module)
            for name in filter(None, path.split(".")):
                interface = getattr(interface, name)
        except AttributeError:
            problem = "is missing"
        except Exception as error:  # a library with inconsistent modules may raise anything
            problem = f"cannot be imported ({type(error).__name__}: {_first_line(error)})"
        else:
            problem = entry.expects.problem(interface)
        if problem is not None:
            yield Mismatch(entry, problem)


def state_holders() -> list[Callable[[], Any]]:
    """Returns a function per :class:`StateHolder` whose module is imported; the function returns its values."""
    entries = [entry for entry in TABLE if isinstance(entry.expects, StateHolder)]
    return [partial(_state_of, entry) for entry in entries if entry.target.partition(":")[0] in sys.modules]


def _state_of(entry: PrivateInterface) -> Any:
    module, _, path = entry.target.partition(":")
    assert isinstance(entry.expects, StateHolder)
    return entry.expects.state(operator.attrgetter(path)(sys.modules[module]))


def _refusal(library: str, cause: str) -> UnknownReleaseError:
    return UnknownReleaseError(
        f"{library} {_release_of(library)} cannot be used: {cause}. Fix: pip install '{SUPPORTED[library]}', or report "
        "this message as an issue if the installed release is one of these"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _release_of(library: str) -> str:
    """Returns the release of an imported library, or a phrase for an unknown release."""
    package = next(package for package, name in _PACKAGES.items() if name == library)
    with contextlib.suppress(Exception):
        module = importlib.import_module("megatron.core" if package == "megatron" else package)
        return str(module.__version__).partition("+")[0]
    return "of an unknown release"


def _instance_attributes(kind: type) -> frozenset[str]:
    """Returns the fields of a class, and the attributes named in its own or an inherited ``__init__``."""
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    inits = (inspect.unwrap(base.__dict__["__init__"]) for base in kind.__mro__ if "__init__" in base.__dict__)
    named = (name for init in inits if hasattr(init, "__code__") for name in init.__code__.co_names)
    return frozenset((*fields, *named))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _entries(feature: str, *rows: tuple[str, Expectation, str, str]) -> tuple[PrivateInterface, ...]:
    return tuple(PrivateInterface(*row, feature) for row in rows)


_C10D, _GROUP = "torch.distributed.distributed_c10d", "moc/runtime/process_group.py"
_GROUPS, _GENERATION = "moc/runtime/groups.py", "moc/runtime/generation.py"
_OURS = "megatron/pretraining"
_CORE = "megatron.core"
_OPTIMIZER, _DIST_OPTIMIZER = f"{_CORE}.optimizer.optimizer", f"{_CORE}.optimizer.distrib_optimizer"
_HYBRID = f"{_CORE}.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_DDP = f"{_CORE}.distributed.distributed_data_parallel:DistributedDataParallel"
_MOE, _CHECKPOINT = f"{_CORE}.transformer.moe", f"{_CORE}.dist_checkpointing"
_MODULES = f"{_OURS}/engine/module_state.py"
_OWNED, _ENGINE = f"{_OURS}/engine/owned.py", f"{_OURS}/engine/optimizer.py"
_BOUNDARY, _NODES, _LAYER = f"{_OURS}/engine/boundary.py", f"{_OURS}/process/nodes.py", f"{_OURS}/elastic/moe_layer.py"
_ENTRY, _TRAINING = f"{_OURS}/entry", "megatron.training"
_ZERO, _ZERO_OPTIMIZER = f"{_OURS}/engine/zero", "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

_TORCH = (
    # the launcher's workers: process groups that outlive their connections
    *_entries(
        "mocrun",
        ("torch._C._distributed_c10d:Backend", Members(_words("""abort eager_connect_single_device
            _set_sequence_number_for_group supports_coalescing""")), "calls methods of", _GENERATION),
        (f"{_C10D}:_world", Members(_words("""pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag
            pg_coalesce_state""")), "fills the tables of", _GROUPS),
        (_C10D, Members(_words("""_update_default_pg _register_process_group _unregister_process_group
            _check_p2p_op_list""")), "calls functions of", _GROUPS),
        (f"{_C10D}:split_group", Parameters(_words("parent_pg split_ranks timeout pg_options group_desc backend")),
         "replaces", _GROUPS),
        (f"{_C10D}:_coalescing_manager", Parameters(_words("group device async_ops")), "calls", _GROUPS),
        (f"{_C10D}:_object_to_tensor", Parameters(_words("obj device group")), "replaces", _GROUPS),
        (f"{_C10D}:_tensor_to_object", Parameters(_words("tensor tensor_size group")), "replaces", _GROUPS),
        (f"{_C10D}:all_gather_object", Refers(_words("_object_to_tensor _tensor_to_object")),
         "replaces functions inside", _GROUPS),
        ("torch.distributed:ProcessGroup", Members(_words("""_set_default_backend _register_backend _set_group_name
            _get_backend _device_types bound_device_id group_desc group_name rank size abort shutdown allgather
            allreduce alltoall barrier broadcast gather recv reduce reduce_scatter scatter send _start_coalescing
            _end_coalescing BackendType""")), "overrides members of", _GROUP),
        ("torch.distributed:ProcessGroupGloo", Members(_words("""_Options create_device create_default_device
            _set_default_timeout _set_sequence_number_for_group""")), "builds", _GENERATION),
        ("torch.distributed:ProcessGroupGloo._Options", Members(_words("""_devices _timeout global_ranks_in_group
            group_name""")), "fills", _GENERATION),
    ),
    *_entries(
        "snapshots",
        ("torch", Members(("_foreach_copy_",)), "calls a function of", "moc/snapshot/device_copy.py"),
        ("torch.nn:Module.register_buffer", Refers(("_non_persistent_buffers_set",)), "reads what is set by",
         "moc/torch/naming.py"),
    ),
    *_entries(
        "training",
        (f"{_CORE}.models.gpt.gpt_model:GPTModel", Members(_words("output_layer post_process")),
         "adds a hook to the output layer of", f"{_OURS}/model/corrections.py"),
        ("torch", Members(_words("_foreach_mul _foreach_norm")), "calls functions of", _ENGINE),
    ),
    *_entries(
        "fp8 by Transformer Engine",
        ("transformer_engine.pytorch.quantization:FP8GlobalStateManager.quantization_state",
         StateHolder(_words("global_amax_history_buffer global_scale_buffer")), "restores the values of", _MODULES),
    ),
    *_entries(
        "fp8",
        ("torch", Members(("_scaled_mm",)), "calls a function of", f"{_ENTRY}/formats.py"),
    ),
    # torch_dist checkpoints of other programs: no code in them may run
    *_entries(
        "reading checkpoints",
        ("torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata", Refers(_words("pickle load")),
         "replaces the pickle module of", f"{_OURS}/checkpoint/unpickling.py"),
        ("torch.distributed.checkpoint.filesystem", Members(_words("pickle _StorageInfo _StoragePrefix")),
         "replaces the pickle module of, and allows classes of,", f"{_OURS}/checkpoint/unpickling.py"),
        ("torch.distributed.checkpoint.metadata", Members(_words("_MEM_FORMAT_ENCODING")), "allows classes of",
         f"{_OURS}/checkpoint/unpickling.py"),
        ("torch.serialization", Members(("_get_layout",)), "allows a function of",
         f"{_OURS}/checkpoint/unpickling.py"),
        (f"{_CHECKPOINT}.strategies.torch", Members(_words("MCoreMetadata MCoreSavePlan")), "allows classes of",
         f"{_OURS}/checkpoint/unpickling.py"),
    ),
)  # fmt: skip

_MEGATRON = (
    *_entries(
        "cpu",
        (f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state", Parameters(_words("new_state device graph_safe"),
         only=True), "replaces", f"{_OURS}/process/cpu.py"),
        (f"{_MOE}.token_dispatcher:maybe_move_tensor_to_cpu", Parameters(_words("tensor as_numpy record_stream"),
         only=True), "replaces", f"{_OURS}/process/cpu.py"),
    ),
    *_entries(
        "megatron.training on a CPU",
        (f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__", Parameters(_words("""cls config hidden_size
            eps"""), by_keyword=True), "replaces", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.transformer.dot_product_attention:DotProductAttention", Members(_words("""forward
            hidden_size_per_partition num_attention_heads_per_partition""")), "extends", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax", Parameters(_words("""input mask
            softmax_offset"""), only=True), "extends", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.fusions.fused_softmax:FusedScaleMaskSoftmax", Members(_words("""mask_func input_in_float16
            softmax_in_fp32""")), "reads attributes of", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.datasets.utils:compile_helpers", Parameters((), only=True), "replaces", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer", Members(_words("""allgather_params
            broadcast_params""")), "replaces a method of", f"{_ENTRY}/cpu.py"),
        (_DIST_OPTIMIZER, Members(("HAVE_APEX_OR_TE",)), "reads", f"{_ENTRY}/cpu.py"),
        (f"{_HYBRID}._get_sub_optimizer_param_groups", Parameters(("offload_fraction",), only=True), "replaces",
         f"{_ENTRY}/cpu.py"),
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer.state_dict", Parameters((), only=True), "extends",
         f"{_ENTRY}/cpu.py"),
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer.load_state_dict", Parameters(("state_dict",), only=True), "extends",
         f"{_ENTRY}/cpu.py"),
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer._set_main_param_and_optimizer_states", Parameters(_words("""
            model_param tensors"""), only=True), "extends", f"{_ENTRY}/cpu.py"),
    ),
    *_entries(
        "megatron.training",
        (f"{_TRAINING}.training:pretrain", Parameters(_words("""cfg_container train_valid_test_dataset_provider
            model_type forward_step_func model_provider process_non_loss_data_func get_embedding_ranks
            get_position_embedding_ranks non_loss_data_func store inprocess_call_wrapper p2p_communicator pg_collection
            skip_model_parallel_init"""), only=True), "replaces", f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.arguments:parse_args", Parameters(_words("extra_args_provider ignore_unknown_args"), only=True),
         "extends", f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.checkpointing:load_args_from_checkpoint", Parameters(_words("""args load_arg
            checkpointing_context"""), only=True), "extends", f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.argument_utils:ArgumentGroupFactory._get_field_docstrings",
         Parameters(("src_cfg_class",), only=True), "extends", f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.arguments:add_megatron_arguments", Parameters(("parser",), only=True), "calls",
         f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.arguments:parse_and_validate_args", Refers(_words("""parse_args validate_args
            set_global_variables""")), "replaces functions inside", f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.arguments:validate_args", Refers(("_print_args",)), "replaces a function inside",
         f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.arguments:_print_args", Parameters(_words("title args"), only=True), "replaces",
         f"{_ENTRY}/install.py"),
        (f"{_TRAINING}.initialize:initialize_megatron", Parameters(_words("""allow_no_cuda get_embedding_ranks
            get_position_embedding_ranks"""), by_keyword=True), "calls", f"{_ENTRY}/program.py"),
        (f"{_TRAINING}.training:setup_model_and_optimizer", Parameters(_words("""model_type model_provider_func
            checkpointing_context cfg_container pg_collection"""), by_keyword=True), "calls", f"{_ENTRY}/program.py"),
        (f"{_TRAINING}.training:evaluate_and_print_results", Parameters(_words("""prefix forward_step_func data_iterator
            model iteration process_non_loss_data_func config verbose write_to_tensorboard non_loss_data_func"""),
         by_keyword=True), "calls", f"{_ENTRY}/program.py"),
        (f"{_TRAINING}.training:update_train_iters", Parameters(("args",)), "calls", f"{_ENTRY}/pretrain.py"),
        (f"{_TRAINING}.training:build_train_valid_test_datasets", Parameters(_words("""
            build_train_valid_test_datasets_provider train_valid_test_num_samples""")), "calls",
         f"{_ENTRY}/streams.py"),
        (f"{_TRAINING}.datasets.fim_dataset:GPTFIMDataset._query_document_sample_shuffle_indices", Parameters(("idx",),
         only=True), "extends", f"{_ENTRY}/streams.py"),
        (f"{_TRAINING}.datasets.fim_dataset:GPTFIMDataset", Members(("np_rng",)), "seeds an attribute of",
         f"{_ENTRY}/streams.py"),
        (f"{_TRAINING}.datasets.data_samplers:build_pretraining_data_loader", Parameters(_words("""dataset
            consumed_samples""")), "calls", f"{_ENTRY}/streams.py"),
        (f"{_TRAINING}.training:training_log", Parameters(_words("""loss_dict total_loss_dict learning_rate iteration
            loss_scale report_memory_flag skipped_iter grad_norm params_norm num_zeros_in_grad max_attention_logit
            pg_collection is_first_iteration seqlen_squared_sum_in_batch total_real_tokens_in_batch""")), "calls",
         f"{_ENTRY}/log.py"),
        (f"{_TRAINING}.training:write_args_to_tensorboard", Parameters(()), "calls", f"{_ENTRY}/log.py"),
        (f"{_TRAINING}.training:num_floating_point_operations", Parameters(_words("args batch_size")), "calls",
         f"{_ENTRY}/log.py"),
        (f"{_TRAINING}.training:load_checkpoint", Parameters(_words("""ddp_model optimizer opt_param_scheduler
            checkpointing_context"""), by_keyword=True), "calls", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.training:save_checkpoint", Parameters(_words("""iteration model optimizer opt_param_scheduler
            num_floating_point_operations_so_far checkpointing_context train_data_iterator
            preprocess_common_state_dict_fn"""), by_keyword=True), "calls", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.wandb_utils:on_save_checkpoint_success", Parameters(_words("""checkpoint_path tracker_filename
            save_dir iteration"""), only=True), "delays", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.wandb_utils:on_load_checkpoint_success", Parameters(_words("checkpoint_path load_dir"),
         only=True), "delays", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.wandb_utils:on_save_checkpoint_success", Refers(("get_wandb_writer",)),
         "replaces a function inside", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.checkpointing:save_checkpoint", Refers(_words("""get_checkpoint_name schedule_async_save
            get_checkpoint_tracker_filename""")), "replaces functions inside", f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.checkpointing:load_checkpoint", Refers(("read_metadata",)), "replaces functions inside",
         f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.checkpointing:read_metadata", Parameters(("tracker_filename",), only=True), "replaces",
         f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.checkpointing:schedule_async_save", Parameters(("async_request",), only=True), "replaces",
         f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.training:get_model", Parameters(_words("""model_provider_func model_type wrap_with_ddp
            pg_collection"""), by_keyword=True), "calls", f"{_ENTRY}/stock.py"),
        (f"{_TRAINING}.training:get_megatron_optimizer_config", Parameters(("args",)), "calls",
         f"{_ENTRY}/deepspeed.py"),
        (f"{_TRAINING}.training:get_optimizer_param_scheduler", Parameters(("optimizer",)), "calls",
         f"{_ENTRY}/deepspeed.py"),
        (f"{_CORE}.utils:configure_nvtx_profiling", Parameters(("enabled",)), "calls", f"{_ENTRY}/log.py"),
        (f"{_TRAINING}.training:get_megatron_optimizer_config", Parameters(("args",)), "calls", f"{_ENTRY}/elastic.py"),
        (f"{_TRAINING}.training:get_optimizer_param_scheduler", Parameters(("optimizer",)), "calls",
         f"{_ENTRY}/elastic.py"),
        (f"{_TRAINING}.initialize:_initialize_distributed", Parameters(_words("""get_embedding_ranks
            get_position_embedding_ranks store"""), by_keyword=True), "calls", f"{_ENTRY}/elastic.py"),
        (f"{_CORE}.models.gpt.moe_module_specs:get_moe_module_spec_for_backend", Refers(("MoELayer",)),
         "replaces a class inside", f"{_ENTRY}/elastic.py"),
        (f"{_TRAINING}.training:training_log", Refers(("get_num_microbatches",)), "replaces a function inside",
         f"{_ENTRY}/log.py"),
        (f"{_CORE}.timers:Timers.write", Refers(("SummaryWriter", "wandb")), "replaces types inside",
         f"{_ENTRY}/log.py"),
        (f"{_TRAINING}.training:preprocess_common_state_dict", Parameters(("common_state_dict",)), "passes",
         f"{_ENTRY}/checkpoints.py"),
        (f"{_TRAINING}.training:pretrain", Refers(_words("initialize_megatron set_jit_fusion_options")),
         "replaces functions inside", f"{_ENTRY}/cpu.py"),
        (f"{_CORE}.timers:Timers", Members(("_timers",)), "resets the timers of", f"{_ENTRY}/program.py"),
        (f"{_CORE}.timers:Timer", Members(("_started",)), "resets", f"{_ENTRY}/program.py"),
    ),
    *_entries(
        "core optimizer",
        (_DDP, Members(_words("""ddp_config bucket_groups expert_parallel_bucket_groups dp_group dp_cp_group
            expt_dp_group""")), "reads attributes of", f"{_OURS}/engine/schedule.py"),
        (f"{_CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", Members(_words("""grad_reduce_handle
            param_gather_handle param_gather_dispatched per_param_grad_ready_counts is_last_microbatch""")),
         "resets attributes of", f"{_OURS}/engine/schedule.py"),
        (f"{_OPTIMIZER}:ChainedOptimizer", Members(_words("chained_optimizers is_stub_optimizer")),
         "reads attributes of", _OWNED),
        (f"{_OPTIMIZER}:MegatronOptimizer", Members(("init_state_fn",)), "calls", _OWNED),
        (f"{_HYBRID}._init_sub_optimizers", Refers(_words("""param_to_inner_param inner_param_to_orig_param
            cpu_copy_map_grad""")), "reads attributes set in", _OWNED),
        (_HYBRID, Members(("sub_optimizers",)), "reads attributes of", _OWNED),
        (f"{_CORE}.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer", Members(_words("""allgather_params
            dp_cp use_buffer_param_sync""")), "reads attributes of", _OWNED),
        (f"{_CORE}.optimizer_param_scheduler:OptimizerParamScheduler", Members(_words("""init_lr wsd_decay_steps
            lr_wsd_decay_style use_checkpoint_opt_param_scheduler override_opt_param_scheduler""")),
         "derives a class from", f"{_OURS}/engine/schedule.py"),
    ),
    *_entries(
        "16-bit weights",
        (f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params", Members(_words("""float16_groups fp32_from_float16_groups
            fp32_from_fp32_groups grad_scaler""")), "reads attributes of", _OWNED),
        (f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads", Parameters(()), "calls",
         _ENGINE),
    ),
    *_entries(
        "distributed optimizer",
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer", Members(_words("""model_float16_groups model_fp32_groups
            shard_fp32_from_float16_groups shard_fp32_groups data_parallel_group is_stub_optimizer""")),
         "reads attributes of", _OWNED),
        (f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads", Parameters(()), "calls", _ENGINE),
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer._get_model_param_range_map", Parameters(("param",)), "calls", _OWNED),
        (f"{_DIST_OPTIMIZER}:DistributedOptimizer._copy_model_grads_to_main_grads", Parameters(()), "calls", _ENGINE),
    ),
    # optimizers with fragmented state: megatron-core's, with other copies between weights and masters
    *_entries(
        "fragments",
        (f"{_OPTIMIZER}:MixedPrecisionOptimizer", Parameters(_words("optimizer config grad_scaler init_state_fn")),
         "derives a class from", f"{_OURS}/engine/sharded.py"),
        (f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads", Refers(("_copy_main_params_to_model_params",)),
         "overrides a method inside", f"{_OURS}/engine/sharded.py"),
        (f"{_OPTIMIZER}:MixedPrecisionOptimizer.reload_model_params", Refers(("_copy_model_params_to_main_params",)),
         "overrides a method inside", f"{_OURS}/engine/sharded.py"),
    ),
    *_entries(
        "experts",
        (f"{_MOE}.router:TopKRouter", Members(_words("local_tokens_per_expert topk layer_number")),
         "reads attributes of", f"{_OURS}/engine/routing.py"),
        (f"{_MOE}.router:TopKRouter", Members(_words("is_mtp_layer")), "reads attributes of",
         f"{_OURS}/engine/routing.py"),
        (f"{_MOE}.router:TopKRouter", Members(_words("local_tokens_per_expert global_tokens_per_expert ga_steps")),
         "changes the dtype of buffers of", f"{_OURS}/model/corrections.py"),
        (f"{_MOE}.router:TopKRouter.get_aux_loss_coeff", Refers(_words("config moe_aux_loss_coeff")),
         "changes the coefficient in", f"{_OURS}/model/corrections.py"),
        (f"{_MOE}.moe_logging:get_moe_metrics_tracker", StateHolder(), "restores the values of", _MODULES),
        (f"{_CORE}.transformer.multi_token_prediction:MTPLossLoggingHelper.tracker", StateHolder(),
         "restores the values of", _MODULES),
        (f"{_CORE}.transformer.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.tracker", StateHolder(),
         "restores the values of", _MODULES),
        (f"{_MOE}.moe_logging:MetricEntry", Members(_words("values reduce_group needs_dp_avg")), "reads",
         f"{_OURS}/entry/schedule.py"),
    ),
    *_entries(
        "expert biases",
        (f"{_CORE}.tensor_parallel.layers:ColumnParallelLinear", Members(("explicit_expert_comm",)),
         "sets attributes of", f"{_OURS}/entry/cpu.py"),
        (f"{_CORE}.tensor_parallel.layers:RowParallelLinear", Members(("explicit_expert_comm",)),
         "sets attributes of", f"{_OURS}/entry/cpu.py"),
    ),
    *_entries(
        "fp8",
        (f"{_CORE}.tensor_parallel.layers:ColumnParallelLinear.forward", Refers(_words("""_forward_impl input weight
            bias allreduce_dgrad sequence_parallel tp_group""")), "replaces a method inside",
         f"{_ENTRY}/formats.py"),
        (f"{_CORE}.tensor_parallel.layers:RowParallelLinear.forward", Refers(_words("""_forward_impl input weight
            bias allreduce_dgrad sequence_parallel tp_group""")), "replaces a method inside",
         f"{_ENTRY}/formats.py"),
    ),
    *_entries(
        "pipeline traffic",
        (f"{_CORE}.pipeline_parallel.p2p_communication:P2PCommunicator._communicate", Parameters(_words("""
            tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs"""), only=True),
         "overrides", _BOUNDARY),
        (f"{_CORE}.pipeline_parallel.schedules:get_schedule_table", Parameters(_words("""num_microbatches
            num_model_chunks microbatch_group_size_per_vp_stage""")), "calls", _BOUNDARY),
    ),
    *_entries(
        "elastic",
        (f"{_CORE}.parallel_state:RankGenerator.get_ranks", Parameters(("token",), only=True), "overrides", _NODES),
        (f"{_CORE}.parallel_state:RankGenerator", Members(("world_size",)), "replaces", _NODES),
        (f"{_CORE}.parallel_state:initialize_model_parallel", Refers(_words("RankGenerator get_world_size")),
         "replaces functions inside", _NODES),
        (f"{_CORE}.parallel_state:RankGenerator", Parameters(_words("tp ep dp pp cp order"), by_keyword=True),
         "builds", f"{_OURS}/elastic/placement.py"),
        (f"{_MOE}.moe_layer:MoELayer.route", Parameters(_words("hidden_states padding_mask"), only=True),
         "overrides", _LAYER),
        (f"{_MOE}.moe_layer:MoELayer", Members(_words("experts token_dispatcher config layer_number")),
         "sets attributes of", _LAYER),
        (f"{_MOE}.moe_layer:MoESubmodules", Members(_words("experts router")), "replaces fields of", _LAYER),
        (f"{_MOE}.experts:SequentialMLP", Members(_words("local_experts sharded_state_dict")), "overrides members of",
         _LAYER),
        (f"{_CORE}.models.gpt.moe_module_specs:get_moe_module_spec_for_backend", Refers(_words("partial MoELayer")),
         "changes the functools.partial of", _LAYER),
        (f"{_MOE}.token_dispatcher:MoETokenDispatcher", Members(_words("""dispatch_preprocess token_dispatch
            dispatch_postprocess combine_preprocess token_combine combine_postprocess""")), "overrides methods of",
         f"{_OURS}/elastic/moe_layer.py"),
        (f"{_DDP}.finish_grad_sync", Parameters(("force_all_reduce",)), "overrides",
         f"{_OURS}/elastic/gradients.py"),
    ),
    *_entries(
        "writing checkpoints",
        (f"{_CHECKPOINT}.strategies.filesystem_async:get_write_results_queue", Refers(("_results_queue",)),
         "replaces the queue inside", f"{_OURS}/checkpoint/writer.py"),
        (f"{_CHECKPOINT}.strategies.filesystem_async:FileSystemWriterAsync.finish", Parameters(_words("""metadata
            results"""), only=True), "replaces", f"{_OURS}/entry/checkpoints.py"),
        (f"{_CHECKPOINT}.strategies.async_utils:AsyncCallsQueue", Members(("async_calls",)), "reads attributes of",
         f"{_OURS}/checkpoint/background.py"),
        (f"{_CHECKPOINT}.strategies.async_utils:_ActiveAsyncRequest", Members(("async_caller",)), "reads fields of",
         f"{_OURS}/checkpoint/background.py"),
    ),
    *_entries(
        "data files",
        (f"{_CORE}.datasets.blended_dataset", Members(("safe_numpy_load",)), "replaces a function of",
         f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
         Refers(("safe_numpy_load",)), "replaces a function inside", f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.indexed_dataset:IndexedDataset.initialize", Refers(("index",)), "reads an attribute of",
         f"{_OURS}/data/splits.py"),
        (f"{_CORE}.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices", Refers(_words("""torch
            is_initialized path_to_cache path_prefix unique_description_hash""")), "replaces",
         f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.blended_dataset:BlendedDataset._build_indices", Refers(_words("""torch is_initialized
            path_to_cache unique_description_hash""")), "replaces", f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.megatron_dataset:MegatronDataset", Members(_words("""unique_identifiers unique_description
            unique_description_hash dataset_path dataset config""")), "sets attributes of",
         f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.blended_megatron_dataset_config:BlendedMegatronDatasetConfig", Members(_words("""
            path_to_cache mock fast_cache_load defer_npy_index_mmap""")), "reads fields of",
         f"{_ENTRY}/streams.py"),
        (f"{_CORE}.datasets.gpt_dataset:GPTDataset", Members(_words("document_index sample_index shuffle_index")),
         "reads attributes of", f"{_OURS}/entry/streams.py"),
        (f"{_CORE}.datasets.blended_dataset:BlendedDataset", Members(("datasets",)), "reads an attribute of",
         f"{_OURS}/entry/streams.py"),
        (f"{_CORE}.datasets.indexed_dataset:IndexedDataset.initialize", Refers(("path_prefix",)),
         "reads an attribute of", f"{_OURS}/entry/streams.py"),
        (f"{_CORE}.tokenizers.text.text_tokenizer:MegatronTokenizerText", Members(_words("inv_vocab vocab_size")),
         "reads attributes of", f"{_OURS}/data/identity.py"),
        (f"{_CORE}.datasets.indexed_dataset:_IndexReader", Members(_words("""sequence_pointers sequence_lengths
            dtype_size""")), "reads attributes of", f"{_OURS}/data/splits.py"),
    ),
    *_entries(
        "mock data",
        (f"{_CORE}.datasets.gpt_dataset:MockGPTLowLevelDataset", Members(("sequence_lengths",)),
         "reads attributes of", f"{_OURS}/data/splits.py"),
    ),
    *_entries(
        "SentencePieceTokenizer",
        (f"{_CORE}.tokenizers.text.text_tokenizer:MegatronTokenizerText", Members(("_tokenizer",)),
         "reads attributes of", f"{_OURS}/data/tokenizer.py"),
        (f"{_CORE}.tokenizers.text.libraries.sentencepiece_tokenizer:SentencePieceTokenizer",
         Members(("tokenizer",)), "reads attributes of", f"{_OURS}/data/tokenizer.py"),
    ),
)  # fmt: skip

_DEEPSPEED = _entries(
    "deepspeed",
    (_ZERO_OPTIMIZER, Parameters(_words("""init_optimizer param_names timers optimizer_params contiguous_gradients
        reduce_bucket_size use_multi_rank_bucket_allreduce allgather_bucket_size dp_process_group
        expert_parallel_group expert_data_parallel_group reduce_scatter overlap_comm offload_optimizer_config mpu
        clip_grad gradient_accumulation_dtype communication_data_type gradient_average partition_grads
        round_robin_gradients has_moe_layers check_grad_overflow"""), by_keyword=True), "builds",
     f"{_ZERO}/build.py"),
    (_ZERO_OPTIMIZER, Members(_words("""optimizer param_names bit16_groups bit16_groups_flat
        parallel_partitioned_bit16_groups single_partition_of_fp32_groups round_robin_bit16_groups
        round_robin_bit16_offsets real_dp_process_group nccl_start_alignment_factor allgather_bucket_size
        partition_gradients cpu_offload""")), "reads attributes of", f"{_ZERO}/optimizer.py"),
    (_ZERO_OPTIMIZER, Members(_words("""averaged_gradients all_grad_tensors ipg_buckets extra_large_param_to_reduce
        previous_reduced_grads params_already_reduced micro_step_id _pending_offload_events
        _offload_accumulated_param_ids _backward_hook_state""")), "resets attributes of", f"{_ZERO}/optimizer.py"),
    (_ZERO_OPTIMIZER, Members(_words("""set_gradient_accumulation_boundary clear_backward_seen_flag enter_backward
        exit_backward backward_epilogue overlapping_partition_gradients_reduce_epilogue reduce_gradients
        finalize_gradient_accumulation_boundary zero_grad reset_cpu_buffers _wait_for_offload_copies
        _release_ipg_buffers _use_compact_grad_partition_buffer _get_compact_grad_partition_buffer""")),
     "calls methods of", f"{_ZERO}/optimizer.py"),
    ("deepspeed.runtime.zero.stage_1_and_2:IPGBucket", Members(_words("clear buffer index")), "resets",
     f"{_ZERO}/optimizer.py"),
    ("deepspeed.runtime.base_optimizer:BackwardHookStateManager", Members(_words("""backward_active_depth
        reset_for_new_step""")), "resets", f"{_ZERO}/optimizer.py"),
    ("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups", Parameters(_words("""groups_flat
        partitioned_param_groups dp_process_group start_alignment_factor allgather_bucket_size"""), by_keyword=True),
     "calls", f"{_ZERO}/optimizer.py"),
    ("deepspeed.comm.comm", Members(("cdb",)), "reads", f"{_ZERO}/build.py"),
    ("deepspeed.comm.comm:init_distributed", Parameters(_words("""dist_backend auto_mpi_discovery verbose
        dist_init_required"""), by_keyword=True), "calls", f"{_ZERO}/build.py"),
    ("deepspeed.comm.torch:build_shm_op", Parameters(()), "replaces", f"{_ZERO}/build.py"),
    ("deepspeed.comm.torch:TorchBackend", Members(("all_gather_function",)), "replaces a function of",
     f"{_ZERO}/build.py"),
)  # fmt: skip

_LOOPS = "lightning.pytorch.loops"

_LIGHTNING = _entries(
    "lightning",
    (f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop._build_kwargs", Parameters(_words("kwargs batch batch_idx")),
     "calls", "moc/lightning.py"),
    (f"{_LOOPS}.optimization.automatic:_AutomaticOptimization._make_closure", Parameters(_words("""kwargs optimizer
        batch_idx""")), "calls", "moc/lightning.py"),
    (f"{_LOOPS}.fit_loop:_FitLoop", Members(_words("epoch_progress epoch_loop restarting")), "sets counters of",
     "moc/lightning.py"),
    (f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop", Members(_words("batch_progress automatic_optimization")),
     "sets counters of", "moc/lightning.py"),
    (f"{_LOOPS}.optimization.automatic:_AutomaticOptimization", Members(("optim_progress",)), "sets counters of",
     "moc/lightning.py"),
)  # fmt: skip

_TORCHTITAN = _entries(
    "torchtitan",
    ("torchtitan.trainer:Trainer._forward_backward_body", Parameters(_words("""inputs labels global_valid_tokens
        extra_kwargs""")), "overrides", "moc/torchtitan.py"),
    ("torchtitan.trainer:Trainer.train_step", Parameters(("data_iterator",)), "calls", "moc/torchtitan.py"),
    ("torchtitan.trainer:Trainer.batch_generator", Parameters(("data_iterable",)), "calls", "moc/torchtitan.py"),
    ("torchtitan.trainer:Trainer.init_distributed", Parameters(()), "overrides", "moc/torchtitan.py"),
    ("torch.distributed.tensor:distribute_tensor", Parameters(_words("""tensor device_mesh placements
        src_data_rank""")), "sets the default of a parameter of", "moc/torchtitan.py"),
)  # fmt: skip

TABLE = (*_TORCH, *_MEGATRON, *_DEEPSPEED, *_LIGHTNING, *_TORCHTITAN)
