"""Which of the experts in a snapshot go on to storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def persist_selection(
    candidates: Mapping[int, Sequence[int]], persisted: Mapping[int, Sequence[int]], k: int, ep: int
) -> dict[int, list[int]]:
    """The K_persist experts of every layer that go to storage, of the K_snapshot in a snapshot (MoC, section 5.1).

    Those that have not been there for longest; of equal ones, one of the expert-parallel rank that gives the fewest so
    far, and then the lowest number.  So no expert that comes up again and again waits for ever, and the ranks write
    about the same as long as they are served in turn.  The paper does not say which ones it takes.

    Args:
        candidates: by layer, the experts in the snapshot.
        persisted: by layer and expert, when it went to storage last, as a number that grows.
        k: K_persist; where a layer has no more candidates than that, all of them go.
        ep: expert-parallel ranks; each holds as many neighbouring experts of a layer.

    Returns:
        By layer, their numbers, ascending.
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
