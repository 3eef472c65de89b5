"""Computes prices of snapshots with experts' gradients in place of state (MoEtion, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moc.policy.prices import Machine, Price, Settings
from moc.policy.selection import steady_risk

OFF = "off"
"""The setting of ``gradients`` that saves only states."""


def always_cost(gradient: float, max_age: int) -> float:
    """Returns the mean cost, in states, of an expert in every snapshot whose base is renewed after ``max_age``.

    Args:
        gradient: bytes of its gradients relative to its state.
        max_age: iterations after which its state is saved again.
    """
    return gradient + (1 - gradient) / (max_age + 1)


def hiding(machine: Machine) -> Sequence[int]:
    """Returns the numbers of experts of each layer whose copy hides; the smallest candidate if none does."""
    room = machine.hidden_s * machine.rate
    return [k for k in machine.ks if machine.with_experts(k).busiest <= room] or machine.ks[:1]


def candidates(machine: Machine) -> Iterator[Settings]:
    """Yields snapshots of the experts that hide: with states only, and if possible with gradients in place of state."""
    for k in hiding(machine):
        yield {"experts": k, "gradients": OFF}
        if machine.gradient is not None:
            yield {"experts": k}


def price(machine: Machine, k: int, gradients: bool) -> Price:
    """Returns the price of a snapshot with the bytes of K experts of each layer, in the steady state.

    With gradients, every iteration takes a snapshot. Training waits for the copies of gradients, which the next
    iteration clears. Memory keeps as many chains as fit, at most at their maximum length. A recovery repeats half of
    that on average.

    Args:
        machine: has experts.
        k: S, the number of states with the bytes of a snapshot.
        gradients: they are used where ``machine`` allows them.
    """
    number = machine.num_experts
    if machine.gradient is None or not gradients:
        risk = None if machine.at_risk is None else machine.at_risk(k / number, 1.0)
        return Price(machine.with_experts(k), k=k, at_risk=risk)
    max_age = 4 * -(-number // k)
    cost = always_cost(machine.gradient, max_age)
    if machine.at_risk is None:
        risk = steady_risk([1 / number] * number, k, cost)  # as if equally busy
    else:
        risk = machine.at_risk(k / number, cost)
    share = min(1.0, k / (cost * number))
    size, one = machine.with_experts(min(k, math.ceil(cost * number))), machine.with_experts(1)
    every = machine.everything
    busiest, total = (
        share * machine.gradient * (whole - least) * number / max(1, number - 1)
        for whole, least in ((every.busiest, one.busiest), (every.total, one.total))
    )
    waits = busiest * max_age / (max_age + 1)  # otherwise the state is saved again
    chained = max_age * total
    return Price(size, k=k, at_risk=risk, every=1, waits=waits, folded=share * max_age / 2, chained=chained)
