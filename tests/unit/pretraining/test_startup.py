"""The description of a run: ranks, parameters, data and the cost of a failure are computed from facts."""

import re
from types import SimpleNamespace

import pytest

from megatron.pretraining.logging import startup
from megatron.pretraining.logging.startup import DataSizes, WorkerFacts
from moc.policy import POLICIES, policy_named, recovers_exactly
from moc.state.operators import Operator

OPERATORS = [
    Operator("embedding", "embedding", None, None, 1000),
    *(Operator(f"layers.1.expert.{number}", "expert", 1, number, 400) for number in range(8)),
]


def numbers_in(text):
    """Returns the numbers of a text, as they are written."""
    return re.findall(r"\d[\d.,-]*\d|\d", text)


def worker(stage, parameters=10, **device):
    return WorkerFacts(**dict(node="a", device="", allocated_bytes=0, device_bytes=0) | device, stage=stage,
                       parameters=parameters)  # fmt: skip


def test_active_parameters_count_chosen_experts():
    assert numbers_in(startup.describe_parameters(OPERATORS, 2)) == ["4,200", "1,800"]


class Counted(list):
    """A list that counts how often it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def test_description_reads_model_twice_and_gathers_once(monkeypatch):
    calls, model = [], Counted(OPERATORS * 1000)
    monkeypatch.setattr(startup, "gather", lambda facts: calls.append(facts) or [facts])
    world = SimpleNamespace(device=SimpleNamespace(type="cpu"), pipeline_rank=0)
    assert startup.gather_facts(world, 5) == calls and len(calls) == 1
    startup.describe_parameters(model, 2)
    assert model.reads == 2


def test_stage_lines_list_workers_and_layers():
    lines = startup.stage_lines([worker(0), worker(1, 7), worker(0, 12), worker(1)], [0, 0, 1])
    assert [numbers_in(line) for line in lines] == [["0", "2", "1-2", "12"], ["1", "3", "3", "10"]]


def test_fullest_device_is_described():
    cards = [worker(0, device="card", allocated_bytes=size, device_bytes=10**10) for size in (10**9, 3 * 10**9)]
    assert numbers_in(startup.describe_devices(cards)) == ["2", "1", "3.0", "10.0"]


@pytest.mark.parametrize(("data", "epochs"), [(DataSizes(5, 1000), "3.2 epochs"), (None, "3,200 tokens")])
def test_data_description_gives_epochs_or_tokens(data, epochs):
    assert epochs in startup.describe_data(data, 100, 32)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"selective"}))
def test_failure_costs_half_interval_plus_window(name):
    policy = policy_named(name)(OPERATORS, SimpleNamespace(iterations=4))
    cost = startup.expected_failure_cost(policy, 99)
    apart, replays = policy.schedule.snapshot_interval, policy.schedule.window_length - 1
    assert (cost.interval, cost.replays, cost.restarts) == (apart, replays, False)
    numbers = numbers_in(startup.describe_policy(policy, "memory", None, 0.5))
    for iterations in (apart / 2 + replays, apart + replays):
        assert f"{iterations:g}" in numbers and f"{iterations * 0.5:.3g}" in numbers
    assert cost.is_exact == recovers_exactly(policy)


def test_failure_without_snapshots_costs_half_save_interval():
    numbers = numbers_in(startup.describe_policy(None, "disk", 100, 2.0))
    assert numbers == ["100", "50", "100", "100", "200"]
    assert not numbers_in(startup.describe_policy(None, "disk", None, 2.0))


@pytest.mark.parametrize(("numbers", "text"), [([], "none"), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")])
def test_consecutive_numbers_are_formatted_as_ranges(numbers, text):
    assert startup.ranges(numbers) == text
