"""Measures how much work on another processor slows a computing thread through shared caches and memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from statistics import median

import torch

from moc.store.manifest import compute_digest

MB = 1 << 20
ROUNDS, TURN_S, PAUSE_S = 60, 0.06, 0.02
_RESTS, _WORKS, _ENDS = range(3)


def slowed(amount: int) -> dict[str, float]:
    """Returns the relative slowdown of a product while another process copies or hashes ``amount`` bytes.

    The baseline is the processor time of the product while the other process sleeps.  Values are medians of rounds that
    alternate between both.
    """
    return {name: _slowed(beside, amount) for name, beside in (("copies", _copy), ("hashes", _hash))}


def _slowed(beside: Callable[[torch.Tensor, torch.Tensor], object], amount: int) -> float:
    torch.set_num_threads(1)  # like a worker; more threads would compete for the other processor
    forked = multiprocessing.get_context("fork")
    asked = forked.Value("i", _RESTS)
    other = forked.Process(target=_other, args=(asked, beside, amount), daemon=True)
    other.start()
    factors = torch.randn(16, 256, 256).bfloat16()
    ratios = []
    for _ in range(ROUNDS):
        took = {}
        for what in (_RESTS, _WORKS):
            asked.value = what
            time.sleep(PAUSE_S)
            took[what] = _product_s(factors)
        ratios.append(took[_WORKS] / took[_RESTS] - 1)
    asked.value = _ENDS
    other.join()
    return median(ratios)


def _product_s(factors: torch.Tensor) -> float:
    """Returns the processor time of a product."""
    begun, end, count = time.thread_time(), time.perf_counter() + TURN_S, 0
    while time.perf_counter() < end:
        for factor in factors:
            torch.mm(factor, factor)
        count += 1
    return (time.thread_time() - begun) / count


def _other(asked: Synchronized, beside: Callable[[torch.Tensor, torch.Tensor], object], amount: int) -> None:
    source, target = torch.ones(amount, dtype=torch.uint8), torch.zeros(amount, dtype=torch.uint8)
    while asked.value != _ENDS:
        if asked.value == _WORKS:
            beside(source, target)
        else:
            time.sleep(1e-3)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    for one, other in zip(source.split(4 * MB), target.split(4 * MB), strict=True):
        other.copy_(one)


def _hash(source: torch.Tensor, _: torch.Tensor) -> None:
    for one in source.split(4 * MB):
        compute_digest(one.numpy())
