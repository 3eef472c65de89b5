"""Checks that boxes of tensors cover the complete state of a model exactly once."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta

from moc.files import decode
from moc.inspect.checkpoint import Checkpoint, StoredBox
from moc.policy import is_full_policy
from moc.state.operators import Operator, Region, is_module_state, operator_of
from moc.store import dense_files
from moc.store.manifest import OperatorEntry

SLOTS = {"adam": ("master", "exp_avg", "exp_avg_sq"), "sgd": ("master", "momentum_buffer")}
"""Slots of every parameter, by optimizer.  With others, such as Muon, slots depend on the kind of parameter."""
MASTER = "master"
"""Slot that every parameter has with any optimizer."""
PARAM = "param"
"""Slot of compute weights, and of module state, which no optimizer updates."""
MAX_OPERATORS = 1 << 18
"""Maximum number of operators of a model that is read from a file."""
_NUMBER = r"(?:0|[1-9]\d{0,8})"
_NAMES = rf"^(?:embedding|output|layers\.{_NUMBER}\.(?:attention|mlp|router|expert\.{_NUMBER}))\Z"
_Parameters = Annotated[dict[Annotated[str, Meta(pattern=_NAMES)], decode.Count], Meta(max_length=MAX_OPERATORS)]
"""Number of parameters of each operator of a model built by Megatron-LM."""
_MAX_COMPARED = 100_000  # coordinates compared between boxes and holes
_MAX_SWEPT, _SWEEP_STEP_COST = 3_000_000, 200  # coordinates of box pairs, and the cost of a sweep step in this unit
_PRIME = (1 << 61) - 1


def required_slots(optimizer: str | None) -> tuple[str, ...]:
    """Returns the slots that every parameter has with an optimizer; the first is the master."""
    return SLOTS.get(optimizer, (MASTER,)) if optimizer else ()


def coverage_problems(checkpoint: Checkpoint, boxes: Iterable[StoredBox]) -> list[str]:
    """Returns missing and duplicate elements in the boxes of all region files of a checkpoint, one sentence each."""
    state, operators = checkpoint.state, checkpoint.operators
    tensors: dict[str, dict[str, list[StoredBox]]] = defaultdict(lambda: defaultdict(list))
    for box in boxes:
        tensors[box.name][box.slot].append(box)
    if operators is None:
        problems = list(_missing_slots(tensors, state.get("optimizer")))
        if tensors and state.get("optimizer"):
            problems += _missing_operators(tensors, state.get("shape"), dense_files.STATE_FILE)
    else:
        problems = list(_count_mismatches(tensors, operators))
        is_megatron = state.get("shape") is not None
        # other engines also save tensors that no optimizer updates, such as buffers and averages of weights
        optimizer = state.get("optimizer") if is_megatron else state.get("optimizer") and "of another engine"
        problems += _missing_slots_of_details(tensors, operators, optimizer)
        if is_full_policy(checkpoint.policy) and is_megatron:
            problems += _missing_operators(tensors, state.get("shape"), dense_files.MANIFEST)
    for name in sorted(tensors):
        problems += _problems_of_tensor(name, tensors[name])
    return problems


def _count_mismatches(tensors: Mapping[str, Mapping[str, list[StoredBox]]], operators: Mapping[str, OperatorEntry]):
    """Yields, for Format v1, differences between the element counts of operators in the manifest and in the files."""
    held_elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, slots in tensors.items():
        for slot, boxes in slots.items():
            held_elements[operator_or_other(name)][slot] += sum(box.region.numel for box in boxes)
    for operator in sorted(held_elements.keys() | operators.keys()):
        listed = operators[operator].elements if operator in operators else {}
        for slot in sorted(held_elements[operator].keys() | listed.keys()):
            stored, expected = held_elements[operator][slot], listed.get(slot, 0)
            if stored != expected:
                yield (
                    f"{operator}: files hold {stored:,} elements of {slot}, {dense_files.MANIFEST} promises "
                    f"{expected:,}"
                )


def _missing_slots_of_details(
    tensors: Mapping[str, Mapping[str, list[StoredBox]]], operators: Mapping[str, OperatorEntry], optimizer: str | None
) -> Iterator[str]:
    """Yields, for Format v1, the slots that a tensor lacks at the detail of its operator."""
    for name in sorted(tensors):
        entry = operators.get(operator_or_other(name))
        if entry is None:
            continue  # already reported
        if missing := sorted(set(required_slots_at(name, entry.detail, optimizer)) - tensors[name].keys()):
            yield f"{name}: has no {' and no '.join(missing)}"


def required_slots_at(name: str, detail: str, optimizer: str | None) -> tuple[str, ...]:
    """Returns the slots that a tensor must have at a detail of ``moc.state.operators``."""
    if is_module_state(name):
        return () if detail in ("moments", "grad") else (PARAM,)
    full = required_slots(optimizer)
    parts = {"compute": (PARAM,), "master": full[:1], "moments": full[1:], "grad": ("grad",)}
    return parts.get(detail, full)


def missing_operators(names: Iterable[str], shape: Any) -> list[str]:
    """Returns the operators of a model that have no tensor among these; the shape is as in training_state.json.

    Raises:
        ValueError: the shape is invalid.
    """
    present = {operator_or_other(name) for name in names}
    try:
        expected = _operators(shape)
    except ValueError as error:
        raise ValueError(f"does not describe the shape of a model ({error})") from None
    return [operator for operator in expected if operator not in present]


def operators_of(shape: Any) -> list[Operator]:
    """Returns the operators of a model; only names and positions are set.

    Raises:
        ValueError: the shape is invalid.
    """
    operators = []
    for name in missing_operators((), shape):
        _, *inside = name.split(".")  # layers.N.kind, or layers.N.expert.E
        kind, layer = (inside[1], int(inside[0])) if inside else (name, None)
        operators.append(Operator(name, kind, layer, int(inside[2]) if len(inside) > 2 else None, 0))
    return operators


def _missing_operators(tensors: Iterable[str], shape: Any, where: str) -> list[str]:
    try:
        missing = missing_operators(tensors, shape)
    except ValueError as error:
        return [f"{where}: {error}"]
    saved_kind = "optimizer state" if where == dense_files.STATE_FILE else "state"
    return [f"{operator}: no file holds any {saved_kind} of it" for operator in missing]


@dataclass(frozen=True)
class _Shape:
    """Part of a model's shape that determines its operators."""

    num_layers: Annotated[int, Meta(ge=0, le=MAX_OPERATORS)]
    num_experts: Annotated[int, Meta(ge=0, le=MAX_OPERATORS)] | None
    moe_layer_freq: Annotated[int, Meta(ge=1, le=decode.MAX_COUNT)] | list[Literal[0, 1]]
    """Experts are in the first of every N layers; or 0 or 1 for each layer."""

    def expert_layers(self) -> list[bool]:
        """Returns, for each layer, whether it has experts."""
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            return [layer % frequency == 0 for layer in range(self.num_layers)]
        if len(frequency) < self.num_layers:
            raise ValueError("moe_layer_freq lists too few layers")
        return [bool(is_expert) for is_expert in frequency[: self.num_layers]]


def _operators(shape: Any) -> list[str]:
    """Returns the operators of a model's shape, by operator or by sizes; raises ValueError if they are too many."""
    if is_by_operator(shape):
        by_operator: Any = _Parameters
        return [*decode.convert(shape, by_operator)]
    return _operators_of_sizes(decode.convert(shape, _Shape))


def is_by_operator(shape: Any) -> bool:
    """Returns whether a shape counts the parameters of each operator, and does not list sizes of a GPT model."""
    return isinstance(shape, dict) and bool(shape) and "num_layers" not in shape


def _operators_of_sizes(shape: _Shape) -> list[str]:
    experts, operators = shape.num_experts or 0, ["embedding"]
    with_experts = shape.expert_layers()
    if len(with_experts) * 2 + sum(with_experts) * (experts + 1) > MAX_OPERATORS:
        raise ValueError(f"it has more than {MAX_OPERATORS:,} operators")
    for layer, has_experts in enumerate(with_experts):
        operators += [f"layers.{layer}.attention", f"layers.{layer}.mlp"]
        if experts and has_experts:
            operators += [f"layers.{layer}.router", *(f"layers.{layer}.expert.{expert}" for expert in range(experts))]
    return [*operators, "output"]


def operator_or_other(name: str) -> str:
    """Returns the operator of a tensor; ``other`` if it belongs to no known operator."""
    try:
        return operator_of(name)
    except ValueError:
        return "other"


def _missing_slots(tensors: dict[str, dict[str, list[StoredBox]]], optimizer: str | None) -> Iterator[str]:
    present_slots = {slot for slots in tensors.values() for slot in slots}
    for slot in required_slots(optimizer):
        if tensors and slot not in present_slots:
            yield f"{slot}: no file holds it for any tensor"
    # Megatron-LM's own format does not record the optimizer
    expected = present_slots if optimizer in SLOTS else {MASTER}
    for name in sorted(tensors):
        if missing := sorted(expected - tensors[name].keys()):
            yield f"{name}: has no {' and no '.join(missing)}"


def _problems_of_tensor(name: str, slots: dict[str, list[StoredBox]]) -> Iterator[str]:
    shapes = {box.global_shape for boxes in slots.values() for box in boxes}
    if len(shapes) > 1:
        yield f"{name}: its boxes are of tensors of different shapes, {' and '.join(map(str, sorted(shapes)))}"
        return
    for slot, boxes in sorted(slots.items()):
        for problem in _problems_of_boxes([box for box in boxes if box.region.numel]):
            yield f"{name}: {slot} {problem}"


def _problems_of_boxes(boxes: list[StoredBox]) -> Iterator[str]:
    if not boxes:
        return
    tensor = Region((0,) * len(boxes[0].global_shape), boxes[0].global_shape)
    for box in boxes:
        if box.region.intersect(tensor) != box.region:
            bounds, tensor_bounds = _format_bounds(box.region), _format_bounds(tensor)
            yield f"{bounds} in {box.file} reaches out of the tensor, which is {tensor_bounds}"
            return
    if _is_exact_cover(tensor, [box.region for box in boxes]):
        return
    overlap, holes = _find_overlap(boxes), _find_holes(tensor, boxes)
    if overlap is not None:
        first, second, common = overlap
        yield f"overlaps at {_format_bounds(common)} in {first.file} and {second.file}"
    if holes:
        lost = sum(hole.numel for hole in holes)
        yield f"has a hole at {_format_bounds(holes[0])}: {lost:,} of {tensor.numel:,} elements are in no file"
    elif overlap is None:  # the search was stopped at its limit
        stored = sum(box.region.numel for box in boxes)
        yield f"has holes, or boxes that overlap: files hold {stored:,} elements, and the tensor has {tensor.numel:,}"


def _is_exact_cover(tensor: Region, boxes: list[Region]) -> bool:
    """Returns whether boxes inside a region hold each of its elements exactly once, in linear time for any boxes.

    It compares two sums of indicator functions.  The indicator of a box is a product over axes of differences of step
    functions, one step at each end.  Any steps are linearly independent.  So with random numbers modulo a prime in
    their place, different sums are equal with a probability below 2^-54.  The numbers are secret, so no file can be
    made to fit.
    """
    steps = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in tensor.shape]

    def indicator(box: Region) -> int:
        product = 1
        for step, offset, size in zip(steps, box.offset, box.shape, strict=True):
            product = product * (step[offset + size] - step[offset]) % _PRIME
        return product

    return sum(map(indicator, boxes)) % _PRIME == indicator(tensor)


def _find_overlap(boxes: list[StoredBox]) -> tuple[StoredBox, StoredBox, Region] | None:
    """Returns two overlapping boxes and their overlap, by a time-bounded sweep along the axis with most offsets."""
    offsets = numpy.array([box.region.offset for box in boxes], dtype=numpy.int64)
    ends = offsets + numpy.array([box.region.shape for box in boxes], dtype=numpy.int64)
    axes = offsets.shape[1]
    if axes == 0:  # scalars
        return (boxes[0], boxes[1], boxes[1].region) if len(boxes) > 1 else None
    axis = max(range(axes), key=lambda axis: len(numpy.unique(offsets[:, axis])))
    reached = numpy.empty(0, dtype=numpy.int64)  # boxes that reach beyond the start of the next one
    compared = 0
    for number in numpy.argsort(offsets[:, axis], kind="stable"):
        compared += (_SWEEP_STEP_COST + len(reached)) * axes
        if compared > _MAX_SWEPT:
            return None
        reached = reached[ends[reached, axis] > offsets[number, axis]]
        overlaps = ((offsets[reached] < ends[number]) & (ends[reached] > offsets[number])).all(axis=1)
        if overlaps.any():
            first, second = boxes[reached[overlaps.argmax()]], boxes[number]
            return first, second, first.region.intersect(second.region) or second.region
        reached = numpy.append(reached, number)
    return None


def _find_holes(tensor: Region, boxes: list[StoredBox]) -> list[Region] | None:
    """Returns the parts of a tensor that no box holds; None if there are too many boxes and holes to compare."""
    holes, compared = [tensor], 0
    for box in boxes:
        compared += len(holes) * len(tensor.shape)
        if compared > _MAX_COMPARED:
            return None
        common = ((part, part.intersect(box.region)) for part in holes)
        holes = [
            hole for part, common_part in common for hole in (part.without(common_part) if common_part else [part])
        ]
    return sorted(holes, key=lambda region: region.offset)


def _format_bounds(region: Region) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(region.offset, region.shape, strict=True)) + "]"
