"""Runs megatron-core without CUDA, on torch's CPU kernels and gloo.

Call ``install()`` before ``megatron.core`` is imported. With CUDA, it only checks the version and silences warnings.
Without CUDA, it maps the small part of ``torch.cuda`` that megatron-core uses unconditionally to the CPU;
``torch.cuda.is_available()`` stays False:

* ``torch.cuda.current_device()`` is ``torch.device("cpu")``; streams, events and memory calls do nothing;
* the "CUDA" random generator is torch's default CPU generator;
* ``device="cuda"`` given to a tensor factory, ``Tensor.cuda()`` and ``Module.cuda()`` mean the CPU;
* ``Tensor.type()`` returns ``torch.cuda.XTensor`` to megatron-core, whose optimizers compare that string;
* megatron-core's JIT fuser is the identity (torch.compile would run a C++ compiler for half a minute).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from typing import Any

import torch

from megatron.pretraining.process.core import check_core
from moc import private_interfaces

_CPU = torch.device("cpu")
_installed = False


def device() -> torch.device:
    """Returns the device that this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def install() -> None:
    """Makes ``import megatron.core`` work on this machine; further calls do nothing.

    Raises:
        CoreError: megatron-core is missing or of an unsupported version.
        UnknownReleaseError: megatron-core lacks a private interface that is replaced here.
        RuntimeError: megatron.core is already imported, and can no longer be adapted.
    """
    global _installed
    if _installed:
        return
    check_core()
    # both are optional; --help describes their use
    warnings.filterwarnings("ignore", message=".*(Apex is not installed|Transformer Engine and Apex are not)")
    warnings.filterwarnings("ignore", message="Only transformer-engine>=.* supports MoE experts")
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    warnings.filterwarnings("ignore", message=".* is experimental and still under active development")
    for name, text in _NOTICES.items():
        logging.getLogger(f"megatron.core.{name}").addFilter(_Without(text))
    # deprecated torch names that megatron-core still calls
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core|torch\.distributed")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if not torch.cuda.is_available():
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron.core was imported before megatron.pretraining.process.cpu.install(): call that first"
            )
        # torch's CUDA build logs on import that there is no GPU, if it finds a CUDA compiler
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        _redirect_torch_cuda()
        _import_megatron_core()
    _installed = True


_NOTICES = {  # megatron-core 0.19 logs these in each job, and a user cannot act on them
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "distributed.distributed_data_parallel": "full_param_layout not provided",
}


class _Without(logging.Filter):
    """Drops the log records that contain a text."""

    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def filter(self, record):
        return self._text not in record.getMessage()


class _Stream:
    """Stream on the CPU; its work is synchronous, so it is always complete."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _Event()


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


def _returning(value=None):
    return lambda *args, **kwargs: value


def means_cuda(device) -> bool:
    """Returns whether the value names a CUDA device."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def on_cpu(factory):
    """Returns a tensor factory that creates tensors for a CUDA device on the CPU."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        if "device" in kwargs and means_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _get_rng_state(device=None, clone=False, graph_safe=False):
    return torch.get_rng_state()


def _set_rng_state(new_state, device=None, graph_safe=False):
    torch.set_rng_state(new_state)


def _redirect_torch_cuda() -> None:
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = _returning(_Stream())
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.current_device = _returning(_CPU)
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, _returning())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _returning(0))
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _returning()
    modules: tuple[Any, ...] = (cuda, cuda.random)
    for module in modules:
        module.get_rng_state = _get_rng_state
        module.set_rng_state = _set_rng_state
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = _returning()
    tensor.type = _cuda_named_type(tensor.type)


def _cuda_named_type(real_type):
    @functools.wraps(real_type)
    def tensor_type(self, *args, **kwargs):
        answer = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core."):
            answer = answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return tensor_type


def _import_megatron_core() -> None:
    real_compile = torch.compile
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda m: m)
    try:
        with private_interfaces.refuse_import():
            import megatron.core.jit  # noqa: F401  # its decorator is the current torch.compile
    finally:
        torch.compile = real_compile
    private_interfaces.require("cpu")
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import token_dispatcher

    core_random._set_cuda_rng_state = _set_rng_state
    # both are the same generator
    logging.getLogger(core_random.__name__).addFilter(_Without("CPU RNG state changed within GPU RNG context"))
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_numpy


def _split_sizes_to_numpy(tensor, as_numpy=False, record_stream=False):
    # megatron-core converts split sizes to numpy only while moving them off a GPU, but torch's all_to_all_single
    # needs sequences of ints on every device
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
