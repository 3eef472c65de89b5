"""Prices of snapshots that hold the gradients of experts in place of their state (MoEtion, section 5.2)."""

from __future__ import annotations

import math

from moc.policy.prices import Machine, Price
from moc.policy.selection import steady_risk


def always_cost(gradient: float, max_age: int) -> float:
    """The mean cost of an expert that is in every snapshot, in states: its base is renewed after ``max_age``.

    Args:
        gradient: bytes of its gradients relative to its state.
        max_age: iterations after which its state is saved again.
    """
    return gradient + (1 - gradient) / (max_age + 1)


def price(machine: Machine, k: int) -> Price:
    """A snapshot with the bytes of K experts of each layer in the steady state; gradients are used where they can be.

    Memory keeps, and a recovery repeats, as many chains as fit: at most their longest, and half of that on average.

    Args:
        machine: has experts, and ``gradient`` where gradients are used.
        k: S, as many states as have the bytes of a snapshot.
    """
    number = machine.num_experts
    if machine.gradient is None:
        risk = None if machine.at_risk is None else machine.at_risk(k / number, 1.0)
        return Price(machine.with_experts(k), k=k, at_risk=risk)
    max_age = 4 * -(-number // k)
    cost = always_cost(machine.gradient, max_age)
    if machine.at_risk is None:
        risk = steady_risk([1 / number] * number, k, cost)  # as if equally busy
    else:
        risk = machine.at_risk(k / number, cost)
    share = min(1.0, k / (cost * number))
    one, every = machine.with_experts(1).total, machine.everything.total
    experts = (every - one) * number / max(1, number - 1)
    size = machine.with_experts(min(k, math.ceil(cost * number)))
    chained = share * machine.gradient * max_age * experts
    return Price(size, k=k, at_risk=risk, folded=share * max_age / 2, chained=chained)
