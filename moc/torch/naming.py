"""Assigns the tensors of any module to operators: blocks, routers and experts, found by the structure of the module.

    model.embed                       embedding             modules before the first block
    model.blocks.0.attention          layers.0.mlp          a block: an element of a ModuleList, or a top-level module
    model.blocks.0.moe.gate           layers.0.router       a module with one row for each expert, next to them
    model.blocks.0.moe.experts.3      layers.0.expert.3     an element of a ModuleList of experts in a block
    model.blocks.1.moe.experts.w1     layers.1.expert.E     stacked experts: the leading dimension is the expert
    model.blocks.1.moe.w1             layers.1.expert.E     the same, if the module has the router, too
    model.norm                        output                modules after the last block

A list in a block contains experts if its name contains ``expert``, or if a module next to it has one row for each of
its elements.  A user's patterns have precedence.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from moc.state.operators import UnsupportedStateError, is_operator

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A parameter or buffer, or one expert of a stacked parameter.

    Attributes:
        operator: operator that it belongs to.
        name: its name in the module.
        tensor: the parameter or buffer.
        index: index in the leading dimension; None for the complete tensor.
    """

    operator: str
    name: str
    tensor: Tensor
    index: int | None = None


@dataclass(frozen=True)
class Router:
    """A router, and the number of its experts; ``module`` is a name in the model."""

    layer: int
    module: str
    experts: int


@dataclass(frozen=True, eq=False)
class Structure:
    """The operators of a module.

    Attributes:
        tensors: parameters and persistent buffers, in forward order.
        routers: routers of layers with one router.
        layers: number of blocks.
    """

    tensors: tuple[NamedTensor, ...]
    routers: tuple[Router, ...]
    layers: int


def structure_of(module: nn.Module, patterns: Mapping[str, str] | None = None) -> Structure:
    """Returns the operators of a module.

    Args:
        module: any module.
        patterns: operators by parameter names: ``N`` and ``E`` are numbers, ``*`` is any text.  An operator
            ``layers.N.expert.*`` splits a parameter along its leading dimension.

    Raises:
        UnsupportedStateError: a pattern matches nothing, or its operator does not exist.
    """
    blocks = list(_blocks(module, ""))
    finder = _Finder(module, blocks, patterns or {})
    tensors = [named for name, tensor in _tensors(module) for named in finder.named(name, tensor)]
    if unused := sorted(set(patterns or ()) - finder.used):
        raise UnsupportedStateError(
            f"the pattern {unused[0]!r} of operators matches no parameter. Fix: write it as in print(model), such as "
            "'blocks.N.moe.experts.E.*'",
            code="operator-pattern-invalid",
        )
    tensors.sort(key=lambda named: _forward_order(named.operator))  # stable
    layers = 1 + max((_layer(named.operator) for named in tensors if "." in named.operator), default=-1)
    experts = Counter(_layer(name) for name in {named.operator for named in tensors} if ".expert." in name)
    names_by_layer: dict[int, set[str]] = {}
    for named in tensors:
        if named.operator.endswith(".router") and experts[layer := _layer(named.operator)]:
            names_by_layer.setdefault(layer, set()).add(named.name.rpartition(".")[0])
    routers = [Router(layer, min(names), experts[layer]) for layer, names in names_by_layer.items() if len(names) == 1]
    return Structure(tuple(tensors), tuple(routers), layers)


def clean_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of wrappers such as ``torch.compile``."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _forward_order(operator: str) -> float:
    return {"embedding": -1.0, "output": math.inf}[operator] if "." not in operator else _layer(operator)


def _layer(operator: str) -> int:
    return int(operator.split(".")[1])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved_ids = {  # without state_dict(), whose hooks may communicate
        id(buffer)
        for child in module.modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) in saved_ids)


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yields the names of blocks: elements of the outermost lists, or otherwise top-level modules."""
    lists = list(_outermost_lists(module, prefix))
    if lists:
        for name, elements in lists:
            yield from (f"{name}.{key}" for key, _ in elements.named_children())
        return
    yield from (f"{prefix}{name}" for name, child in module.named_children() if any(True for _ in child.parameters()))


def _outermost_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not _is_list(child):
            yield from _outermost_lists(child, f"{path}.")
        elif not _are_experts(module, name, child) and any(True for _ in child.parameters()):
            yield path, child


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one kind; a ModuleDict of different ones is only a namespace."""
    kinds = {type(child) for child in module.children()}
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and len(kinds) == 1)


def _rows(module: nn.Module) -> int | None:
    """Returns the number of rows of a module whose weight is a matrix."""
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _router_of(parent: nn.Module, experts: str, count: int) -> str | None:
    """Returns the child of ``parent``, or of a child, that has one row for each expert, outside of ``experts``."""
    for name, child in parent.named_modules():
        if name and name.split(".")[0] != experts and name.count(".") < 2 and _rows(child) == count:
            return name
    return None


def _are_experts(parent: nn.Module, name: str, elements: nn.Module) -> bool:
    count = len(list(elements.children()))
    shapes = [[tuple(p.shape) for p in element.parameters()] for element in elements.children()]
    are_equal = count > 1 and bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)
    return are_equal and ("expert" in name or _router_of(parent, name, count) is not None)


def _stack_size(module: nn.Module) -> int | None:
    """Returns the leading dimension of a module's own parameters, if some have three dimensions and it is the same."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")  # such as a convolution
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    sizes = {int(p.shape[0]) for p in own}
    if is_of_torch and not isinstance(module, nn.ParameterList | nn.ParameterDict):
        return None
    return sizes.pop() if len(sizes) == 1 and any(p.dim() > 2 for p in own) else None


class _Finder:
    """Finds the operator of each tensor of a module."""

    def __init__(self, module: nn.Module, blocks: list[str], patterns: Mapping[str, str]):
        self._module, self._blocks = module, {name: number for number, name in enumerate(blocks)}
        self._patterns = {name: _compiled(name, operator) for name, operator in patterns.items()}
        self.used: set[str] = set()
        self._experts: dict[str, int] = {}  # by name of a list or a stacked module, the number of its experts
        self._first: dict[str, int] = {}  # number of its first expert in the layer
        self._routers: set[str | None] = set()
        totals: dict[int, int] = {}
        for name, child in module.named_modules():
            if not name or any(name.startswith(f"{outer}.") for outer in self._experts):
                continue
            count, router = self._experts_in(name, child)
            if count is not None:
                layer = self._layer_of(name) or 0
                self._experts[name], self._first[name] = count, totals.get(layer, 0)
                totals[layer] = totals.get(layer, 0) + count
                self._routers |= {router} - {None}
        self._seen_block = False

    def _experts_in(self, name: str, child: nn.Module) -> tuple[int | None, str | None]:
        """Returns the number of experts that a module contains, and the name of their router; None if unknown."""
        path, _, own = name.rpartition(".")
        parent = self._module.get_submodule(path)
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            is_list, count = True, len(list(child.children()))
            if not _are_experts(parent, own, child):
                return None, None
        elif (count := _stack_size(child)) is None or count < 2:
            return None, None
        else:
            is_list = False
        sibling_router = None if name in self._blocks else _router_of(parent, own, count)
        inner_router = None if is_list else _router_of(child, "", count)
        if inner_router is not None:
            return count, f"{name}.{inner_router}"
        if sibling_router is not None:
            return count, f"{path}.{sibling_router}" if path else sibling_router
        is_named = is_list or "expert" in name or getattr(child, "num_experts", None) == count
        return (count if is_named else None), None

    def named(self, name: str, tensor: Tensor) -> Iterator[NamedTensor]:
        """Yields the parts of a tensor with their operators."""
        for pattern, (expression, operator) in self._patterns.items():
            if match := expression.fullmatch(clean_name(name)):
                self.used.add(pattern)
                yield from self._by_pattern(name, tensor, operator, match)
                return
        layer = self._layer_of(name)
        self._seen_block |= layer is not None
        experts = next((prefix for prefix in self._experts if name.startswith(f"{prefix}.")), None)
        if any(name.startswith(f"{router}.") for router in self._routers):
            yield NamedTensor(f"layers.{layer or 0}.router", name, tensor)
        elif experts is not None:
            yield from self._expert(name, tensor, experts, self._experts[experts], layer or 0)
        elif layer is not None:
            yield NamedTensor(f"layers.{layer}.mlp", name, tensor)
        else:
            is_after = self._seen_block and "." in name  # of a module that is defined after the first block
            yield NamedTensor("output" if is_after else "embedding", name, tensor)

    def _expert(self, name: str, tensor: Tensor, experts: str, count: int, layer: int) -> Iterator[NamedTensor]:
        first = self._first[experts]
        module = self._module.get_submodule(experts)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            keys = [key for key, _ in module.named_children()]
            number = keys.index(name[len(experts) + 1 :].split(".")[0])
            yield NamedTensor(f"layers.{layer}.expert.{first + number}", name, tensor)
        elif "." not in name[len(experts) + 1 :] and tensor.dim() and tensor.shape[0] == count:
            for index in range(count):
                yield NamedTensor(f"layers.{layer}.expert.{first + index}", name, tensor, index)
        else:
            yield NamedTensor(f"layers.{layer}.mlp", name, tensor)

    def _by_pattern(self, name: str, tensor: Tensor, operator: str, match: re.Match) -> Iterator[NamedTensor]:
        target = re.sub("[NE]", lambda letter: match[letter[0]], operator)
        for index in range(tensor.shape[0]) if target.endswith("*") else (None,):
            indexed_target = target if index is None else f"{target[:-1]}{index}"
            if not is_operator(indexed_target):
                raise UnsupportedStateError(
                    f"{indexed_target} is no operator. Fix: use embedding, output, layers.N.mlp, layers.N.attention, "
                    "layers.N.router, layers.N.expert.E or layers.N.expert.*",
                    code="operator-pattern-invalid",
                )
            yield NamedTensor(indexed_target, name, tensor, index)

    def _layer_of(self, name: str) -> int | None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if (number := self._blocks.get(".".join(parts[:end]))) is not None:
                return number
        return None


def _compiled(pattern: str, operator: str) -> tuple[re.Pattern[str], str]:
    escaped = re.escape(pattern).replace(r"\*", ".+")
    letters = re.sub(r"(?<![A-Za-z])([NE])(?![A-Za-z])", r"(?P<\1>\\d+)", escaped)
    if missing := set(re.findall("[NE]", operator)) - set(re.findall(r"\?P<([NE])>", letters)):
        raise UnsupportedStateError(
            f"the operator {operator} needs {min(missing)}, which the pattern {pattern!r} lacks. Fix: write "
            f"{min(missing)} in place of the number",
            code="operator-pattern-invalid",
        )
    return re.compile(letters), operator
