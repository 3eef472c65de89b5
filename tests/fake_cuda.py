"""A GPU without memory, where there is none: tensors have no values, and what makes the host wait is noted.

    with FakeCuda() as gpu:
        total = torch.zeros(3, device=GPU).sum()
    assert not gpu.waits

Tensors of different devices in one operation raise, as on a GPU.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GPU = "cuda"
"""Type of the device."""
_ADAPTED = "arange empty empty_like full full_like ones ones_like tensor zeros zeros_like".split()
_READS = {"aten::_local_scalar_dense": 1.0, "aten::equal": True, "aten::is_nonzero": True}
"""Operations that return a value to the host, with one that they may return."""
# one, since tensors of several cannot be mixed, not even cached ones
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")


class FakeCuda(TorchDispatchMode):
    """A GPU that counts what the host launches, and notes the operations whose results the host waits for.

    Attributes:
        launches: number of operations with a tensor on the GPU.
        waits: names of operations that wait.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.waits = 0, []
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        patch = mock.patch.object
        self._patches.enter_context(patch(FakeTensor, "tolist", lambda tensor: self._read(tensor)))
        # other tests let cuda mean the CPU in their process
        for owner, name in [*((torch, name) for name in _ADAPTED), (torch.Tensor, "to")]:
            self._patches.enter_context(patch(owner, name, inspect.unwrap(getattr(owner, name))))
        _FAKE.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _FAKE.__exit__(*error)
        self._patches.close()

    def _read(self, tensor: torch.Tensor) -> list:
        self.waits += ["tolist"] * (tensor.device.type == GPU)
        with _disable_current_modes():
            return torch.zeros(tuple(tensor.shape)).tolist()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Forgets what was counted before the block."""
        self.launches, self.waits = 0, []
        yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Notes an operation, and computes its shapes."""
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        moves_to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if GPU not in devices | {moves_to}:
            is_real = tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
            with _disable_current_modes() if is_real else contextlib.nullcontext():
                return func(*args, **kwargs)
        self.launches += 1
        if name in _COPIES:
            crosses = len(devices | ({moves_to} - {None})) > 1
            blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.waits += [name] * (crosses and blocks)
        elif len(devices) > 1 and any(tensor.dim() and tensor.device.type == "cpu" for tensor in tensors):
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        elif len(devices) > 1 and name in ("aten::stack", "aten::cat", *_READS):
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if name in _READS:
            self.waits.append(name)
            return _READS[name]
        return func(*args, **kwargs)
