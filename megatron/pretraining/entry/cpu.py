"""Runs ``megatron.training`` without CUDA, on torch's CPU kernels and gloo.

:mod:`megatron.pretraining.process.cpu` adapts megatron-core; this module adapts what ``megatron.training`` and its
models use in addition.  With CUDA it changes nothing.

* Memory statistics are zero, and the device is one of 64 GiB with compute capability 9.0.
* ``Tensor.to("cuda")`` and further tensor factories mean the CPU, and pinned memory is ordinary memory.
* Norms of torch mark their parameters for sequence parallelism.
* megatron-core's local attention accepts the widths of multi-latent attention (MLA), and context parallelism.
* The layer-wise optimizer broadcasts parameters, since gloo gathers no parts of different sizes.
* The distributed optimizer (ZeRO-1) loads its own checkpoints without Transformer Engine.
* ``--optimizer-cpu-offload`` offloads all parameters, which megatron-core would take for parameters of the GPU's part.
"""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.pretraining.config import Config
from megatron.pretraining.process import cpu
from moc import private_interfaces

_FACTORIES = ("rand", "randn", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like")
_PINNED = ("tensor", "empty", "zeros")
_installed = False


def install() -> None:
    """Adapts torch, megatron-core and ``megatron.training``; further calls do nothing.

    Raises:
        CoreError: megatron-core is missing or of an unsupported version.
        UnknownReleaseError: megatron-core lacks a private interface that is replaced here.
        RuntimeError: megatron.core is already imported, and can no longer be adapted.
    """
    global _installed
    if _installed:
        return
    _installed = True
    cpu.install()
    if torch.cuda.is_available():
        return
    _redirect_torch()
    private_interfaces.require("megatron.training on a CPU")
    _use_compiled_helpers()
    _mark_norms()
    _extend_local_attention()
    _broadcast_layers()
    _load_sharded_state()
    _offload_everything()


def adapt(args: Any) -> None:
    """Sets the arguments of a run on a CPU; does nothing with CUDA."""
    if not torch.cuda.is_available():
        args.distributed_backend = "gloo"


def take_device(config: Config, local_rank: int) -> None:
    """Selects this worker's device, and deterministic kernels if the run asks for them."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return
    if config.training.deterministic_mode:
        import_module("megatron.pretraining.process.initialize").be_deterministic(config)
    torch.cuda.set_device(local_rank)


def repair_experts(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Repairs megatron-core's local experts with biases on a CPU; a hook of the model builder.

    Without other workers, the experts' linear layers pass through one-worker collectives, and autograd rejects the
    in-place addition of the bias to their output.  With tensor parallelism, the biases of different experts are treated
    as replicas of one: their gradients are summed, and counted once in the norm.  The dispatcher communicates for the
    experts; their linear layers, which are never split if they have biases, need no communication.
    """
    modules = [module for chunk in chunks for module in chunk.modules()] if not torch.cuda.is_available() else []
    for layer in modules:
        module: Any = layer
        if getattr(module, "is_expert", False) and hasattr(module, "explicit_expert_comm"):
            module.explicit_expert_comm = True
            if getattr(module, "bias", None) is not None:
                module.bias.sequence_parallel = False
                module.bias.tensor_model_parallel = True  # not a replica: each worker's bias counts in the norm
    return chunks


def _redirect_torch() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: False
    cuda.device_count = lambda: 1
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.get_device_capability = lambda *_, **__: (9, 0)
    device = types.SimpleNamespace(major=9, minor=0, name="CPU", total_memory=1 << 36, multi_processor_count=1)
    cuda.get_device_properties = lambda *_, **__: device
    cuda.set_stream = lambda *_, **__: None
    cuda.Stream.cuda_stream = 0
    for name in _FACTORIES:
        setattr(torch, name, cpu.on_cpu(getattr(torch, name)))
    for name in _PINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to = _to_cpu(tensor.to)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


def _without_pinning(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def make(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _to_cpu(to: Callable) -> Callable:
    @functools.wraps(to)
    def on_cpu(self, *args, **kwargs):
        values = [torch.device("cpu") if cpu.means_cuda(value) else value for value in args]
        if cpu.means_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return to(self, *values, **kwargs)

    return on_cpu


def _use_compiled_helpers() -> None:
    """Skips compiling the dataset helpers if the wheel contains them, since that would need a compiler."""
    utils: Any = import_module("megatron.core.datasets.utils")
    if any(Path(str(utils.__file__)).parent.glob("helpers_cpp*.so")):
        utils.compile_helpers = lambda: None


def _mark_norms() -> None:
    """Makes torch's norms mark their parameters, whose gradients are summed with sequence parallelism."""
    norms: Any = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm

    def new(cls, config, hidden_size, eps=1e-5, **ignored):
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            marked: Any = parameter
            marked.sequence_parallel = config.sequence_parallel
        return norm

    norms.__new__ = new


def _extend_local_attention() -> None:
    """Extends megatron-core's local attention: the widths of MLA, and context parallelism, which gathers keys."""
    attention: Any = import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    softmax: Any = import_module("megatron.core.fusions.fused_softmax").FusedScaleMaskSoftmax
    real_init, real_forward, real_softmax = attention.__init__, attention.forward, softmax.forward_torch_softmax

    def init(self, config, *args, k_channels=None, v_channels=None, cp_comm_type=None, **kwargs):
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            real_init(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        if self.config.context_parallel_size > 1:
            key, value, attention_mask = _gather_keys_and_values(key, value)
        return real_forward(self, query, key.contiguous(), value.contiguous(), attention_mask, *args, **kwargs)

    def forward_softmax(self, input, mask, softmax_offset=None):
        if mask is None or mask.shape[-1] == mask.shape[-2]:
            return real_softmax(self, input, mask, softmax_offset)
        scores = self.mask_func(input.float() if self.input_in_float16 and self.softmax_in_fp32 else input, mask)
        return torch.softmax(scores, dim=-1).to(input.dtype)

    attention.__init__, attention.forward, softmax.forward_torch_softmax = init, forward, forward_softmax


def _gather_keys_and_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the keys and values of all positions, and the causal mask of this rank's queries.

    With context parallelism a rank has two chunks of the sequence: one from the front, and its mirror from the back.
    """
    state: Any = import_module("megatron.core.parallel_state")
    group, rank = state.get_context_parallel_group(), state.get_context_parallel_rank()
    size = group.size()
    order = [chunk for r in range(size) for chunk in (r, 2 * size - 1 - r)]
    key, value = (_in_sequence_order(_Gather.apply(tensor, group), order) for tensor in (key, value))
    length = key.shape[0] // (2 * size)
    rows = torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in (rank, 2 * size - 1 - rank)])
    return key, value, (torch.arange(key.shape[0])[None, :] > rows[:, None])[None, None]


def _in_sequence_order(gathered: Any, order: Sequence[int]) -> torch.Tensor:
    parts = gathered.chunk(len(order), dim=0)
    return torch.cat([parts[order.index(chunk)] for chunk in range(len(order))], dim=0)


class _Gather(torch.autograd.Function):
    """Gathers a tensor along its first dimension; the gradient is the sum over ranks of this rank's part."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        own, ctx.group = inputs
        parts = [torch.empty_like(own) for _ in range(ctx.group.size())]
        dist.all_gather(parts, own.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient = grad_outputs[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        length, rank = gradient.shape[0] // ctx.group.size(), ctx.group.rank()
        return gradient[rank * length : (rank + 1) * length], None


def _broadcast_layers() -> None:
    optimizer: Any = import_module("megatron.core.optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
    optimizer.allgather_params = optimizer.broadcast_params


def _load_sharded_state() -> None:
    """Lets the distributed optimizer load its own checkpoints with torch's Adam.

    Before its first update, megatron-core asks torch's Adam for a step that does not exist yet.  It then writes fp32
    weights with gradients enabled, and gives all parameters the same tensor as their step, and Adam increments it
    once for each parameter.  No checkpoint has a step among the moments.
    """
    module = import_module("megatron.core.optimizer.distrib_optimizer")
    if module.HAVE_APEX_OR_TE:
        return
    optimizer: Any = module.DistributedOptimizer
    real_state, real_load = optimizer.state_dict, optimizer.load_state_dict
    real_set = optimizer._set_main_param_and_optimizer_states

    def state_dict(self):
        inner = self.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if not inner.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[parameter].update(step=torch.tensor(0.0), **zeros)
        return real_state(self)

    def load_state_dict(self, state_dict):
        real_load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_states(self, model_param, tensors):
        return real_set(self, model_param, {**tensors, "step": None})

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    optimizer._set_main_param_and_optimizer_states = set_states


def _offload_everything() -> None:
    """Lets the optimizer in host memory copy all parameters to host memory, where they are anyway."""
    optimizer: Any = import_module("megatron.core.optimizer.cpu_offloading").HybridDeviceOptimizer

    def split(self, offload_fraction):
        groups, copies = [], {}
        for group in self.param_groups:
            masters = [parameter.detach().clone().float() for parameter in group["params"]]
            copies |= zip(group["params"], masters, strict=True)
            groups += [{**group, "params": masters}] if masters else []
        return groups, [], copies, {master: parameter for parameter, master in copies.items()}, {**copies}

    optimizer._get_sub_optimizer_param_groups = split


def let_stock_loop_run() -> None:
    """Lets Megatron-LM's own loop start without CUDA, for comparisons with ours; does nothing with CUDA."""
    if torch.cuda.is_available():
        return
    training: Any = import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    training.set_jit_fusion_options = lambda **_: None
