"""Selection of the experts of a snapshot that are persisted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def persist_selection(
    candidates: Mapping[int, Sequence[int]], persisted: Mapping[int, Sequence[int]], k: int, ep: int
) -> dict[int, list[int]]:
    """Selects K_persist experts of every layer to persist, of the K_snapshot in a snapshot (MoC, section 5.1).

    The least recently persisted experts come first; ties go to the expert-parallel rank with the fewest selected so
    far, then to the lowest number.  Thus no recurring candidate starves, and ranks write about equally as long as
    experts are saved in turn.  The paper does not specify the selection.

    Args:
        candidates: experts in the snapshot, by layer.
        persisted: by layer and expert, a growing number that marks when the expert was last persisted.
        k: K_persist; a layer with at most k candidates persists all of them.
        ep: expert-parallel ranks, each holding an equal number of consecutive experts of a layer.

    Returns:
        Expert numbers by layer, ascending.
    """
    given, chosen = [0] * ep, {}
    for layer, waiting in candidates.items():
        when, per_rank = persisted[layer], len(persisted[layer]) // ep
        left, taken = list(waiting), []
        while left and len(taken) < k:
            expert = min(left, key=lambda e: (when[e], given[e // per_rank], e))
            left.remove(expert)
            taken.append(expert)
            given[expert // per_rank] += 1
        chosen[layer] = sorted(taken)
    return chosen
