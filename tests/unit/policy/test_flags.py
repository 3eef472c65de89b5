"""The estimate of a pipeline's bubbles, against a schedule that is played."""

import pytest

from moc.policy.flags import bubble_share
from tests.cases import each_row


def played(stages: int, micro_batches: int) -> float:
    """Share of the time for which stages wait, as 1F1B computes: forwards take 1, backwards 2."""
    ends: dict[tuple, float] = {}
    orders = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, micro_batches)
        order = [("f", i) for i in range(warm_up)]
        for i in range(micro_batches - warm_up):
            order += [("f", warm_up + i), ("b", i)]
        orders.append([*order, *(("b", i) for i in range(micro_batches - warm_up, micro_batches))])
    now = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, i = order[0]
                last = stage == stages - 1
                needs = ("f", stage - 1, i) if kind == "f" else ("f", stage, i) if last else ("b", stage + 1, i)
                if needs not in ends and not (kind == "f" and stage == 0):
                    break
                now[stage] = max(now[stage], ends.get(needs, 0.0)) + (1 if kind == "f" else 2)
                ends[kind, stage, i] = now[stage]
                order.pop(0)
    return 1 - 3 * micro_batches / max(now)


@each_row(("stages", "micro_batches"), [(1, 4), (2, 2), (4, 4), (4, 16), (8, 3)])
def test_bubble_share_matches_played_1f1b_schedule(stages, micro_batches):
    assert bubble_share(stages, micro_batches) == pytest.approx(played(stages, micro_batches))


def test_virtual_stages_shorten_bubbles():
    assert bubble_share(4, 8, 2) == 1.5 / 9.5 and bubble_share(1, 8, 2) == 0.0
