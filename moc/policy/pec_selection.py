"""Selects the experts of partial checkpoints, and how many.

Also computes the age of the other experts at a fault, and raises the number with the cost of past faults (Dynamic-K).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from moc.policy.errors import PolicyError


def sequential_experts(checkpoint: int, moe_layer: int, k: int, num_experts: int, ep: int) -> list[int]:
    """Selects the k experts of one layer that a checkpoint saves, only by position (MoC, section 3.2, Figure 4).

    The experts of a layer form a circle whose neighbours belong to different expert-parallel ranks. Each checkpoint
    takes the next k of them, and each layer starts where the previous one stops. So the experts taken from consecutive
    layers form one arc over ranks 0, 1, ... in turn. No rank saves more than one expert more than any other, in the
    model and in each pipeline stage. Every expert is saved at least once in any ceil(num_experts / k) checkpoints.

    Args:
        checkpoint: index of the checkpoint, from 0.
        moe_layer: index of the layer among layers with experts, from 0.
        k: K_pec, number of experts to save.
        num_experts: experts of the layer.
        ep: expert-parallel ranks, each holding num_experts / ep consecutive experts.

    Returns:
        Global expert numbers, ascending.
    """
    if not 1 <= k <= num_experts:
        raise PolicyError(
            f"K = {k} is not possible with {num_experts} experts in a layer. Fix: set K from 1 to {num_experts}",
            code="experts-per-snapshot-invalid",
        )
    first = (checkpoint + moe_layer) * k
    positions = ((first + i) % num_experts for i in range(k))
    return sorted(position % ep * (num_experts // ep) + position // ep for position in positions)


def load_aware_experts(unsaved: Mapping[int, Sequence[int]], k: int, ep: int) -> dict[int, list[int]]:
    """Selects the k experts of every layer that a checkpoint saves (PEC, section 3.1, Algorithm 1).

    From the last layer to the first, the k experts with the most unsaved tokens are taken (ties: lowest number).
    Experts are skipped if their expert-parallel rank has already contributed ceil(layers * k / ep).

    If this leaves a layer with fewer than k, Algorithm 1 would save fewer. Here exactly k are saved. Each further
    expert is from the full rank with the fewest contributed so far, and has its most unsaved tokens (ties: lowest
    number). So the capacity is exceeded only where a layer leaves no other choice.

    Args:
        unsaved: tokens given to each expert since it was last saved, by layer; identical on all ranks.
        k: K_pec, number of experts to save in each layer.
        ep: expert-parallel ranks (N_rank), each holding an equal number of consecutive experts of a layer.

    Returns:
        Expert numbers, ascending, by layer in the order of ``unsaved``.

    Raises:
        ValueError: k or ep does not fit a layer's experts.
    """
    for layer, tokens in unsaved.items():
        if not 1 <= k <= len(tokens):
            raise PolicyError(
                f"K = {k} is not possible with the {len(tokens)} experts of layer {layer}. Fix: set K from 1 to "
                f"{len(tokens)}",
                code="experts-per-snapshot-invalid",
            )
        if ep < 1 or len(tokens) % ep:
            raise PolicyError(
                f"the {len(tokens)} experts of layer {layer} are not a multiple of ep = {ep}. Fix: change the "
                "number of experts, or --expert-model-parallel-size",
                code="experts-not-divisible",
            )
    capacity = -(-len(unsaved) * k // ep)
    selected = [0] * ep
    chosen = {layer: _select_in_layer(unsaved[layer], k, selected, capacity) for layer in sorted(unsaved, reverse=True)}
    return {layer: chosen[layer] for layer in unsaved}


def _select_in_layer(tokens: Sequence[int], k: int, selected: list[int], capacity: int) -> list[int]:
    """Selects k experts, and adds them to ``selected``, the count by rank."""
    per_rank = len(tokens) // len(selected)
    waiting = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))
    chosen = []
    for expert in waiting:
        if len(chosen) < k and selected[expert // per_rank] < capacity:
            chosen.append(expert)
            selected[expert // per_rank] += 1
    while len(chosen) < k:
        unchosen = (expert for expert in waiting if expert not in chosen)
        expert = min(unchosen, key=lambda e: (selected[e // per_rank], -tokens[e], e))
        chosen.append(expert)
        selected[expert // per_rank] += 1
    return sorted(chosen)


def persist_selection(
    candidates: Mapping[int, Sequence[int]], persisted: Mapping[int, Sequence[int]], k: int, ep: int
) -> dict[int, list[int]]:
    """Selects K_persist experts of every layer to persist, of the K_snapshot in a snapshot (MoC, section 5.1).

    The least recently persisted experts are first; ties go to the expert-parallel rank with the fewest selected so far,
    then to the lowest number. So no recurring candidate starves. If experts are saved in turn, ranks write about
    equally. The paper does not specify the selection.

    Args:
        candidates: experts in the snapshot, by layer.
        persisted: by layer and expert, an increasing number that marks when the expert was last persisted.
        k: K_persist; a layer with at most k candidates persists all of them.
        ep: expert-parallel ranks, each holding an equal number of consecutive experts of a layer.
    """
    selected, chosen = [0] * ep, {}
    for layer, waiting in candidates.items():
        when, per_rank = persisted[layer], len(persisted[layer]) // ep
        unchosen, taken = list(waiting), []
        while unchosen and len(taken) < k:
            expert = min(unchosen, key=lambda e: (when[e], selected[e // per_rank], e))
            unchosen.remove(expert)
            taken.append(expert)
            selected[expert // per_rank] += 1
        chosen[layer] = sorted(taken)
    return chosen


SaveMarks = Sequence[Sequence[int]]
"""By layer and expert, an increasing number that marks when the expert was last saved."""


def next_rotation_step(
    first: int, k: int, num_experts: int, ep: int, layers: Sequence[int], marks: Sequence[SaveMarks]
) -> int:
    """Returns the place in the rotation with the expert that has waited longest.

    Ties are decided by the second longest wait, and so on, then by the next criterion, and then by the next place. A
    place is a ``checkpoint`` of :func:`sequential_experts`.

    Args:
        first: next place of the rotation.
        k: experts of each layer in a snapshot.
        num_experts: experts of each of the layers.
        ep: expert-parallel ranks.
        layers: indices of the layers, as in :func:`sequential_experts`.
        marks: marks of each of ``layers``, by criterion.
    """
    steps, holders = _rotation(k, num_experts, ep, tuple(layers))
    oldest = min(map(min, marks[0]))
    waiting = {
        step
        for row, steps_by_expert in zip(marks[0], holders, strict=True)
        for expert, mark in enumerate(row)
        if mark == oldest
        for step in steps_by_expert[expert]
    }

    def waited(step: int) -> tuple[list[list[int]], int]:
        rows = [zip(of_layers, steps[step], strict=True) for of_layers in marks]
        return [sorted(row[e] for row, experts in criterion for e in experts) for criterion in rows], (
            step - first
        ) % len(steps)

    return min(waiting, key=waited)


def storage_cycle_length(num_experts: int, k: int, k_persist: int) -> int:
    """Returns the number of persisted snapshots until storage has all experts of a layer, with equal turns."""
    return num_experts // math.gcd(num_experts, k) * -(-k // k_persist)


def is_starved(persisted: SaveMarks, iteration: int, cycle: int) -> bool:
    """Returns whether storage has waited too long for an expert: for one cycle, at the speed of its last write.

    Storage receives snapshots at its own speed, and may receive the same part of the rotation every time.

    Args:
        persisted: iteration of the newest persisted version, by layer and expert.
        iteration: iteration of the next persisted snapshot.
        cycle: as :func:`storage_cycle_length`.
    """
    return iteration - min(map(min, persisted)) >= cycle * (iteration - max(map(max, persisted)))


@lru_cache(maxsize=64)
def _rotation(
    k: int, num_experts: int, ep: int, layers: tuple[int, ...]
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Returns the experts by place and layer, and the places by layer and expert."""
    period = num_experts // math.gcd(num_experts, k)
    steps = [[sequential_experts(step, layer, k, num_experts, ep) for layer in layers] for step in range(period)]
    holders: list[list[list[int]]] = [[[] for _ in range(num_experts)] for _ in layers]
    for step, of_layers in enumerate(steps):
        for steps_by_expert, experts in zip(holders, of_layers, strict=True):
            for expert in experts:
                steps_by_expert[expert].append(step)
    return steps, holders


class Ages(NamedTuple):
    """Mean and maximum age of a layer's experts at a fault, relative to the newest checkpoint."""

    mean: float
    oldest: int

    def scaled(self, iterations: int) -> Ages:
        """Returns the ages in iterations, for checkpoints that many iterations apart."""
        return Ages(self.mean * iterations, self.oldest * iterations)


@cache
def expert_ages(num_experts: int, k_snapshot: int, k_persist: int, persist_every: int = 1) -> tuple[Ages, Ages]:
    """Returns the ages of equally busy experts that are saved in turn (MoC-System, sections 3.2 and 5.1).

    Args:
        num_experts: N.
        k_snapshot: experts of each layer in a snapshot.
        k_persist: number of these that are persisted.
        persist_every: snapshots per persisted one.
    """
    turns = storage_cycle_length(num_experts, k_snapshot, k_persist)
    settled, ends = 2 * turns * persist_every, 4 * turns * persist_every
    memory, storage = [1] * num_experts, [1] * num_experts  # the first snapshot is full
    ages_seen: tuple[list[int], list[int]] = [], []
    for snapshot in range(2, ends + 1):
        persists = snapshot % persist_every == 0
        marks = [[storage], [memory]] if persists and is_starved([storage], snapshot, turns) else [[memory]]
        step = next_rotation_step(snapshot - 2, k_snapshot, num_experts, 1, [0], marks)
        chosen = sequential_experts(step, 0, k_snapshot, num_experts, 1)
        for expert in chosen:
            memory[expert] = snapshot
        if persists:
            for expert in persist_selection({0: chosen}, {0: storage}, k_persist, 1)[0]:
                storage[expert] = snapshot
        if snapshot > settled:
            ages_seen[0].extend(snapshot - when for when in memory)
            ages_seen[1].extend((snapshot - when) // persist_every for when in storage if persists)
    in_memory, in_storage = (Ages(sum(ages) / len(ages), max(ages)) for ages in ages_seen)
    return in_memory, in_storage


PLT_LIMIT = 0.0375
"""Largest PLT without a loss of accuracy in MoC (section 3.1.2, Figure 5)."""


@dataclass(frozen=True)
class DynamicK:
    """K and its cost so far (MoC, section 5.3 and Figure 15(b)).

    Each recovery adds its lost tokens to the cost of K. When the cost exceeds K's share of the limit, K doubles, until
    all experts are saved and nothing is lost. MoC does not specify the share of a K. Here all shares are equal: from
    ``first`` on, K takes m values before it reaches N, and the limit is divided into m + 1 shares.

    Cost beyond a share is added to the next K. So all K together cost at most m shares and the fault that exceeded the
    last one, for which one share is reserved. If no single fault costs more than a share, the PLT never exceeds the
    limit, however many faults occur.

    Attributes:
        k: experts of each layer saved now.
        num_experts: N, experts of a layer.
        limit: maximum proportion of lost tokens.
        first: K at the start of the run; by default ``k``.
        booked: PLT booked on this K.

    Raises:
        ValueError: K is not between 1 and N, or the limit is not in (0, 1].
    """

    k: int
    num_experts: int
    limit: float = PLT_LIMIT
    first: int = 0
    lost: float = 0.0

    def __post_init__(self):
        if not self.first:
            object.__setattr__(self, "first", self.k)
        if not 1 <= self.first <= self.k <= self.num_experts:
            raise PolicyError(
                f"K = {self.k} is not possible with {self.num_experts} experts in a layer. Fix: set K from 1 to "
                f"{self.num_experts}",
                code="experts-per-snapshot-invalid",
            )
        if not 0 < self.limit <= 1:
            raise PolicyError(
                f"a limit of {self.limit} for lost tokens is not possible. Fix: take one up to 1, such as 0.0375",
                code="value-out-of-range",
            )

    @property
    def share(self) -> float:
        """The PLT that each K may cost."""
        steps = (-(-self.num_experts // self.first) - 1).bit_length()  # doublings of K until it is N
        return self.limit / (steps + 1)

    def after_recovery(self, plt: float) -> DynamicK:
        """Returns the state after a recovery.

        ``plt`` is the increase of the PLT over the complete training (eq. 7): relative to the tokens so far, an early
        fault would weigh too much.

        Raises:
            ValueError: ``plt`` is negative.
        """
        if not plt >= 0:
            raise PolicyError(
                f"a recovery cannot have lost a proportion of {plt} of the tokens. Fix: report one from 0 to 1",
                code="tokens-not-counted",
            )
        k, lost = self.k, self.lost + plt
        while k < self.num_experts and lost > self.share:
            k, lost = min(2 * k, self.num_experts), lost - self.share
        return dataclasses.replace(self, k=k, lost=lost)


def candidate_expert_counts(num_experts: int) -> list[int]:
    """Returns the candidate values of K: 1 to N, or powers of two and N if N is large."""
    return [k for k in range(1, num_experts + 1) if num_experts <= 16 or k == num_experts or k & (k - 1) == 0]


def mean_age(num_experts: int, k: int) -> float:
    """Returns the mean age in snapshots of a layer's experts, if each snapshot has the next K of them.

    Each equally busy expert of a layer loses the tokens of its age. So this is the expected PLT of a fault in each
    iteration, with a snapshot in each iteration. (Follows from eq. 7; the paper measures it.)
    """
    return sum(position // k for position in range(num_experts)) / num_experts
