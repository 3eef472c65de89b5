"""A discarded iteration leaves no trace in modules."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.state.undo_log import FULL_RECORDS, SCANS, UndoLog, UntrackedChangeError, locations
from tests.cases import each_row


class Stateful(torch.nn.Linear):
    """Has each kind of value that may be state."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("none", None)
        self.tensor, self.calls, self.rate, self.name = torch.ones(2), 0, 0.5, "a"
        self.last, self.by_key = collections.deque([1], maxlen=2), {"a": 1, "b": torch.zeros(2)}
        self.items, self.kinds, self.array = [1, torch.ones(1)], {1}, numpy.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.expanded, self.conjugate = torch.ones(1).expand(3), torch.tensor([1 + 2j]).conj()
        self.read_only = numpy.broadcast_to(numpy.ones(1), (2,))


def field_values(module: Stateful) -> dict:
    """Everything that a module keeps, as comparable values."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, numpy.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple, collections.deque)):
            return [plain(part) for part in value]
        return copy.copy(value)

    return {location.key: plain(location.value) for location in locations([module])}


CHANGES = {
    "buffer in place": lambda m: m.seen.add_(1),
    "buffer through .data": lambda m: m.seen.data.add_(1),
    "buffer replaced": lambda m: m._buffers.update(seen=m.seen + 1),
    "buffer that was none": lambda m: m._buffers.update(none=torch.ones(1) if m.none is None else m.none + 1),
    "tensor in place": lambda m: m.tensor.mul_(2),
    "tensor replaced": lambda m: setattr(m, "tensor", m.tensor * 2),
    "tensor replaced after a change": lambda m: (m.tensor.add_(1), setattr(m, "tensor", m.tensor + 1)),
    "counter": lambda m: setattr(m, "calls", m.calls + 1),
    "rate": lambda m: setattr(m, "rate", m.rate * 0.5),
    "name": lambda m: setattr(m, "name", m.name + "a"),
    "deque": lambda m: m.last.append(m.last[-1] + 1),
    "dictionary": lambda m: m.by_key.update(a=m.by_key["a"] + 1, c=3),
    "tensor in a dictionary": lambda m: m.by_key["b"].add_(1),
    "list": lambda m: m.items.append(2),
    "tensor in a list": lambda m: m.items[1].add_(1),
    "set": lambda m: m.kinds.add(len(m.kinds) + 1),
    "array": lambda m: numpy.add(m.array, 1, out=m.array),
    "generator": lambda m: torch.rand(1, generator=m.generator),
    "new attribute": lambda m: setattr(m, "appeared", getattr(m, "appeared", torch.zeros(2)) + 1),
}


@each_row("commits", [0, 1, FULL_RECORDS, FULL_RECORDS + 3])
@each_row("change", CHANGES)
def test_discard_restores_value(change, commits):
    module = Stateful()
    log = UndoLog([module])
    for _ in range(commits):
        log.begin()
        CHANGES[change](module)
        log.commit()
    before = field_values(module)
    log.begin()
    CHANGES[change](module)
    assert field_values(module) != before
    log.discard()
    assert field_values(module) == before


@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.booleans()), max_size=12), st.randoms())
def test_suspended_iteration_is_restored_or_completed(steps, choose: random.Random):
    module, reference = Stateful(), Stateful()
    log = UndoLog([module])
    for change, completes in steps:
        before = field_values(module)
        log.begin(full=True)
        CHANGES[change](module)
        after = field_values(module)
        log.suspend()
        assert field_values(module) == before
        if completes:
            log.commit()
            CHANGES[change](reference)
            assert field_values(module) == after
        elif choose.random() < 0.5:
            log.forget()
    log.begin()
    log.commit()
    assert field_values(module) == field_values(reference)


def test_unchanged_tensors_are_not_copied_after_first_iterations():
    module = Stateful()
    log = UndoLog([module])
    for _ in range(FULL_RECORDS + 1):
        log.begin()
        module.seen.add_(1)
        module.calls += 1
        log.commit()
    assert {place.key for place in log.changing} == {"seen", "calls"}
    log.begin()
    assert log._before is not None
    assert len(log._before) == 2


def test_first_late_change_in_discarded_iteration_is_refused():
    module = Stateful()
    log = UndoLog([module])
    for _ in range(FULL_RECORDS):
        log.begin()
        log.commit()
    log.begin()
    module.seen.add_(1)
    with pytest.raises(UntrackedChangeError):
        log.discard()


def test_late_change_in_committed_iteration_is_recorded():
    module = Stateful()
    log = UndoLog([module])
    for iteration in range(FULL_RECORDS + SCANS + 2):
        log.begin()
        if iteration > FULL_RECORDS:
            module.seen.add_(1)
        log.commit()
    before = field_values(module)
    log.begin()
    module.seen.add_(1)
    log.discard()
    assert field_values(module) == before


def test_evaluation_with_full_record_restores_values():
    module = Stateful()
    log = UndoLog([module])
    for _ in range(FULL_RECORDS):
        log.begin()
        log.commit()
    before = field_values(module)
    log.begin(full=True)
    for change in CHANGES.values():
        change(module)
    log.discard()
    assert field_values(module) == before
    log.begin()
    log.discard()  # the restored values do not pass for changed ones


def test_holder_with_dataclass_entries_is_restored():
    @dataclasses.dataclass
    class Entry:
        values: torch.Tensor
        group: object = None

    class Tracker:
        def __init__(self):
            self.entries = {"a": Entry(torch.zeros(2), object())}

    tracker, counts = Tracker(), {"calls": torch.zeros(1), "group": object()}
    group = tracker.entries["a"].group
    log = UndoLog([], [lambda: tracker, lambda: counts])
    log.begin()
    tracker.entries["a"].values.add_(1)
    tracker.entries["b"] = Entry(torch.ones(2))
    counts["calls"] += 1
    counts["new"] = 1
    log.discard()
    assert list(tracker.entries) == ["a"] and tracker.entries["a"].values.tolist() == [0, 0]
    assert tracker.entries["a"].group is group and counts["calls"].tolist() == [0] and "new" not in counts


def test_parameters_and_training_mode_are_unchanged():
    module = Stateful()
    log = UndoLog([module])
    log.begin()
    module.eval()
    with torch.no_grad():
        module.weight.fill_(7)
    log.discard()
    assert not module.training and module.weight.unique().tolist() == [7]


def test_attributes_of_opaque_packages_are_unchanged():
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.is_initialized = False

    Engine.__module__ = "transformer_engine.pytorch.module"

    class OfUser(Engine):
        def __init__(self):
            super().__init__()
            self.calls = 0

    module = OfUser()
    log = UndoLog([module])
    log.begin()
    module.is_initialized, module.calls = True, 1
    log.discard()
    assert module.is_initialized and module.calls == 0
