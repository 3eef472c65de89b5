"""Load-aware selection of the experts of a partial checkpoint: the most unsaved tokens first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def load_aware_experts(unsaved: Mapping[int, Sequence[int]], k: int, ep: int) -> dict[int, list[int]]:
    """Selects the k experts of every layer that a checkpoint saves (PEC, section 3.1, Algorithm 1).

    From the last layer to the first, the k experts with the most unsaved tokens are taken (ties: lowest number), except
    those whose expert-parallel rank has already contributed ceil(layers * k / ep).  Where that leaves a layer with
    fewer than k, Algorithm 1 would save fewer; here exactly k are saved: the rest comes from full ranks, each time from
    the rank with the fewest contributed so far, its expert with the most unsaved tokens (ties: lowest number).  So the
    capacity is exceeded only where a layer leaves no other choice.

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
        _check(layer, len(tokens), k, ep)
    capacity = -(-len(unsaved) * k // ep)
    given = [0] * ep
    chosen = {layer: _of_layer(unsaved[layer], k, given, capacity) for layer in sorted(unsaved, reverse=True)}
    return {layer: chosen[layer] for layer in unsaved}


def _check(layer: int, experts: int, k: int, ep: int) -> None:
    if not 1 <= k <= experts:
        raise ValueError(f"K must be from 1 to {experts}, the experts of layer {layer}, not {k}")
    if ep < 1 or experts % ep:
        raise ValueError(f"the {experts} experts of layer {layer} are not a multiple of ep = {ep}")


def _of_layer(tokens: Sequence[int], k: int, given: list[int], capacity: int) -> list[int]:
    """Selects k experts, and adds them to ``given``, the count by rank."""
    per_rank = len(tokens) // len(given)
    waiting = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))
    chosen = []
    for expert in waiting:
        if len(chosen) < k and given[expert // per_rank] < capacity:
            chosen.append(expert)
            given[expert // per_rank] += 1
    while len(chosen) < k:
        left = (expert for expert in waiting if expert not in chosen)
        expert = min(left, key=lambda e: (given[e // per_rank], -tokens[e], e))
        chosen.append(expert)
        given[expert // per_rank] += 1
    return sorted(chosen)
