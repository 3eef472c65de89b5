"""Tracks module state: values of modules that forward, backward and gradient reduction change, by operator.

There are three kinds:

* Persistent buffers of megatron-core's modules, such as the routers' balancing biases, are equal on all data-parallel
  ranks.  A committed copy of each is part of the training state.
* Modules of users, and modules of torch with buffers, may keep any buffers, tensors, numbers and small containers.
  Each rank has its own values.  Values that changed since the model was built are serialized into one tensor of bytes
  per operator and rank, which is also part of the training state.
* All other values, such as the routers' token counts, only need to be restored after a discarded iteration.

Snapshots read the committed copies.  These change only in :meth:`ModuleState.commit`, after the copies of the previous
iteration are complete.  So a forward pass or reduction cannot change a snapshot that is being copied.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.pretraining.engine.owned import is_frozen
from megatron.pretraining.model.parameters import Pieces, buffer_pieces, unwrap
from megatron.pretraining.process.cpu import device
from moc.private_interfaces import state_holders
from moc.state.module_bytes import ModuleStateError, pack, size_of, unpack
from moc.state.operators import MODULE_STATE, SHARED_BUFFERS, Piece, Region, operator_of
from moc.state.undo_log import Location, UndoLog, differs, locations, record

_LIBRARIES = ("megatron.core.", "megatron.pretraining.", "transformer_engine.", "apex.", "deepspeed.")
_SPARE = 4096
"""Bytes that the values of an operator may grow beyond twice their initial size."""


class ModuleState:
    """Module state of this rank's model chunks.

    Attributes:
        committed: the committed copy of each persistent buffer that data-parallel ranks share.
        user_state: the bytes of user modules' values, by operator.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        models = [unwrap(chunk) for chunk in chunks]
        self._paths = {module: path for model in models for module, path in paths_of(model)}
        users = [module for module in self._paths if _keeps_values(module)]
        buffers = (item for module in users for item in module.named_buffers(recurse=False))
        user_buffers = {id(buffer) for name, buffer in buffers if name not in SHARED_BUFFERS}
        self._shared = {buffer: own for buffer, own in buffer_pieces(models).items() if id(buffer) not in user_buffers}
        self.committed = {buffer: buffer.detach().clone() for buffer in self._shared}
        self._modules_of = {b: module for module in self._paths for b in module.buffers(recurse=False)}
        self._undo = UndoLog(self._paths, state_holders(), excluded=self.committed)
        self._suspended_buffers: list[torch.Tensor] | None = None
        self._is_open = False
        self._users = self._by_operator(users)
        self._built = {location.id: record(location.value, copies=False) for location in self._own_locations(users)}
        self._loaded: set[tuple[int, str]] = set()
        self.user_state = {operator: _memory(self._values(operator, self._own_locations)) for operator in self._users}

    def begin(self) -> None:
        """Records the state before an iteration; first restores it if the previous iteration was not committed."""
        self.discard()
        self._suspended_buffers, self._is_open = None, True
        self._undo.begin()

    @torch.no_grad()
    def commit(self, skipped: bool = False) -> None:
        """Commits the values after an iteration, including a suspended one.

        Buffers that change with an update, such as expert biases, keep their values if the update is ``skipped`` or the
        operator is frozen.

        Raises:
            ModuleStateError: values of a user module have outgrown their memory.
        """
        self._undo.commit()
        if self._suspended_buffers is not None:
            _copy(self.committed, self._suspended_buffers)
        elif not self._is_open:
            return
        for buffer, committed in self.committed.items():
            if skipped or self._is_frozen(buffer):
                buffer.copy_(committed)
        _copy(self.committed.values(), self.committed)
        self._suspended_buffers, self._is_open = None, False
        for operator, target in self.user_state.items():
            pack(self._values(operator, self._changed), target)

    def discard(self) -> None:
        """Restores the committed values; does nothing between iterations."""
        if self._is_open:
            self._is_open = False
            self._undo.discard()
            _copy(self.committed, self.committed.values())

    def suspend(self) -> None:
        """Restores the committed values, and keeps the new ones for :meth:`commit`; does nothing between iterations."""
        if self._is_open:
            self._is_open = False
            self._suspended_buffers = [buffer.detach().clone() for buffer in self.committed]
            self._undo.suspend()
            _copy(self.committed, self.committed.values())

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Provides a context for computation, such as an evaluation, that does not change the state."""
        self._undo.begin(full=True)
        self._is_open = True
        try:
            yield
        finally:
            self.discard()

    @property
    def changing(self) -> list[Location]:
        """Locations of values that iterations change, other than :attr:`committed` buffers."""
        return self._undo.changing

    def shared_pieces(self) -> Pieces:
        """Returns the tensor chunks of each buffer of :attr:`committed`."""
        return self._shared

    def user_state_pieces(self) -> Pieces:
        """Returns the chunk of each :attr:`user_state` tensor; each rank has a separate tensor per operator."""
        if not self.user_state:
            return {}
        stage: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return {
            data: [
                Piece(
                    name=f"{MODULE_STATE}{operator}.{stage.rank()}",
                    global_shape=(data.numel(),),
                    region=Region((0,), (data.numel(),)),
                    view=data,
                    start=0,
                    replica=(0, 0, 0),
                    padded=True,  # its size depends on the modules of this rank
                )
            ]
            for operator, data in self.user_state.items()
        }

    def forget(self) -> None:
        """Drops the values of a suspended iteration, because a recovery loads the state."""
        self._suspended_buffers = None
        self._undo.forget()

    def take_over(self) -> None:
        """Commits the modules' current values, after they were loaded into the modules."""
        self.forget()
        _copy(self.committed.values(), self.committed)

    def loaded(self, tensor: torch.Tensor) -> None:
        """Updates modules after values were loaded into a committed copy, or into the bytes of an operator.

        Raises:
            ModuleStateError: the bytes are invalid, or belong to other modules.
        """
        self.forget()
        if tensor in self.committed:
            tensor.detach().copy_(self.committed[tensor])
        for operator in [operator for operator, data in self.user_state.items() if data is tensor]:
            self._fill(operator)

    def _fill(self, operator: str) -> None:
        location_of = {path: location for path, location in self._locations(operator)}
        for path, value in unpack(
            self.user_state[operator], {path: location.value for path, location in location_of.items()}
        ).items():
            location = location_of.get(path) or self._new_location(operator, path)
            location.owner[location.key] = value
            self._loaded.add(location.id)

    def _new_location(self, operator: str, path: str) -> Location:
        """Returns the location of a value that the model does not have when it is built."""
        parent, _, key = path.rpartition(".")
        for module in self._users[operator]:
            if self._paths[module] == parent and key.isidentifier() and not hasattr(module, key):
                return Location(vars(module), key)
        raise ModuleStateError(
            f"module state: the snapshot has a value of {path}, which this model cannot have. Fix: resume with the "
            "modules that the snapshot was written with"
        )

    def _values(self, operator: str, select) -> dict[str, Any]:
        selected = {location.id for location in select(self._users[operator])}
        return {path: location.value for path, location in self._locations(operator) if location.id in selected}

    def _changed(self, modules: Collection[torch.nn.Module]) -> Iterator[Location]:
        """Yields locations of values that changed since the model was built; on a GPU, without reading values."""
        changing = {location.id for location in self._undo.changing} | self._loaded
        for location in self._own_locations(modules):
            built = self._built.get(location.id)
            if location.id in changing or built is None or differs(built, location.value):
                yield location

    def _locations(self, operator: str) -> Iterator[tuple[str, Location]]:
        for module in self._users[operator]:
            for location in self._own_locations([module]):
                yield f"{self._paths[module]}.{location.key}", location

    def _own_locations(self, modules: Iterable[torch.nn.Module]) -> Iterator[Location]:
        """Returns locations of values that only this rank has."""
        shared = {id(buffer) for buffer in self.committed}
        return (location for location in locations(modules) if id(location.value) not in shared)

    def _by_operator(self, modules: Iterable[torch.nn.Module]) -> dict[str, list[torch.nn.Module]]:
        by_operator: dict[str, list[torch.nn.Module]] = defaultdict(list)
        for module in modules:
            if any(self._own_locations([module])):
                by_operator[operator_of_module(self._paths[module])].append(module)
        return dict(by_operator)

    def _is_frozen(self, buffer: torch.Tensor) -> bool:
        parameters = list(self._modules_of[buffer].parameters(recurse=False))
        return bool(parameters) and all(map(is_frozen, parameters))


def _keeps_values(module: torch.nn.Module) -> bool:
    """Returns whether a module may keep values: modules of users, and of torch with buffers, such as BatchNorm."""
    package = type(module).__module__
    if package.startswith("torch."):
        return any(True for _ in module.buffers(recurse=False))
    return not package.startswith(_LIBRARIES)


def paths_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yields the modules of a bare model chunk, with their paths in the unpartitioned model."""
    for path, module in model.named_modules():
        yield module, _LAYER.sub(lambda match: _global_number(model, match), path)


_LAYER = re.compile(r"^(decoder\.layers)\.\d+(\.mlp\.experts\.local_experts\.\d+)?")


def _global_number(model: torch.nn.Module, match: re.Match[str]) -> str:
    layer: Any = model.get_submodule(match[0].split(".mlp.")[0])
    path = f"{match[1]}.{layer.layer_number - 1}"
    if not match[2]:
        return path
    return f"{path}.mlp.experts.experts.{layer.mlp.local_expert_indices[int(match[2].rpartition('.')[2])]}"


def operator_of_module(path: str) -> str:
    """Returns the operator that a module's own state belongs to; a layer's own state belongs to its ``mlp``."""
    with contextlib.suppress(ValueError):
        return operator_of(f"{path}.state")
    if layer := re.match(r"decoder\.layers\.(\d+)", path):
        return f"layers.{layer[1]}.mlp"
    return "output" if path.startswith("output") else "embedding"


def _memory(values: dict[str, Any]) -> torch.Tensor:
    size = 2 * size_of(values) + _SPARE
    return torch.zeros(size, dtype=torch.uint8, device=device())


def _copy(targets: Collection[torch.Tensor], sources: Collection[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # no other copies in one launch
            copy([t.detach() for t in targets], [s.detach() for s in sources])
