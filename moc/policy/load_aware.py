"""Which experts a partial checkpoint saves, by how much each has learned since it was last saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def load_aware_experts(unsaved: Mapping[int, Sequence[int]], k: int, ep: int) -> dict[int, list[int]]:
    """The k experts of every layer that a checkpoint saves (PEC, section 3.1, Algorithm 1).

    From the last layer to the first, the k experts with the most unsaved tokens, of equal ones the lowest number, but
    for those whose expert-parallel rank has given ceil(layers * k / ep) already.  That may leave a layer with fewer
    than k, where Algorithm 1 would save fewer; here exactly k are saved.  What is missing comes from ranks that are
    full: each time from the rank that has given the fewest so far, of its experts the one with the most unsaved tokens,
    and in a tie the lowest number.  So the capacity is exceeded only where a layer leaves no other choice.

    Args:
        unsaved: by layer, the tokens that each expert was given since it was last saved; the same on all ranks.
        k: K_pec, how many to save in each layer.
        ep: expert-parallel ranks (N_rank); each holds as many neighbouring experts of a layer.

    Returns:
        By layer, in the order of ``unsaved``, the numbers of the experts, ascending.

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
    """Chooses k experts, and counts them in ``given``, by rank."""
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
