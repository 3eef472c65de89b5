"""Elastic training with the same workers throughout: results do not depend on their number."""

import pytest

from tests.integration.test_layouts import CLOSE, assert_alike
from tests.integration.test_precision import BF16
from tests.integration.tiny import FLAGS, LAYOUTS, Trained, known, train
from tests.shared import ALL
from tests.worlds import run_world

PLAIN = dict(calculate_per_token_loss=True, global_batch_size=4)
ELASTIC = dict(elastic=True, elastic_slots=3)
ALONE = dict(elastic_min_replicas=1, elastic_slots=4)
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize(
    ("layout", "plain", "zero"),
    [("DP4", "EP4", False), ("PP2xDP2", "PP2xEP2", True), ("TP2xDP2", "TP2xEP2", False)]
    + ALL * [("DP4", "EP4", True), ("PP2xDP2", "PP2xEP2", False), ("TP2xDP2", "TP2xEP2", True)],
)
def test_thirty_iterations_as_with_expert_parallelism(layout, plain, zero, data):
    """Gradients are clipped, and experts have between one and all workers as holders."""
    flags = data | PLAIN | dict(train_iters=30, use_distributed_optimizer=zero, clip_grad=0.5)
    assert_alike(train(layout, flags | ELASTIC), known(plain, flags))


@pytest.mark.parametrize(("layout", "alone"), [("DP4", "1"), ("PP2xDP2", "PP2"), ("TP2xDP2", "TP2")])
def test_with_dropout_as_with_one_worker(layout, alone, data):
    """Five micro batches: in the last round, all workers but the first have ghosts."""
    flags = data | ELASTIC | DROPOUT | dict(calculate_per_token_loss=True, global_batch_size=5, train_iters=30)
    end = 30 if ALL or layout == "DP4" else 12
    assert_alike(train(layout, flags | dict(exit_interval=end)), known(alone, flags | ALONE), end)


def moving(layout: str, flags: dict, **arguments) -> Trained:
    """Trains with replicas that move."""
    size, parallel = LAYOUTS[layout]
    return Trained(run_world(size, "tests.integration.elastic_bodies:train", flags=FLAGS | parallel | flags, **arguments))


def assert_replicas_alike(trained: Trained) -> None:
    """Copies of weights, masters and moments of experts, and their numbers of updates, are equal."""
    whole: dict[str, str] = {}
    for worker in trained.workers:
        for key, value in [*worker["state"].items(), *worker["steps"].items()]:
            assert whole.setdefault(key, value) == value, key
    copies = sum(len(worker["state"]) for worker in trained.workers)
    assert len(whole) < copies  # there are replicas


@pytest.mark.parametrize(("layout", "more"), [("DP4", {}), ("PP2xDP2", BF16 | dict(use_distributed_optimizer=False))])
def test_replicas_stay_alike_while_they_move(layout, more, data):
    flags = data | PLAIN | ELASTIC | more | dict(train_iters=50, elastic_rebalance_interval=10)
    moved, stayed = moving(layout, flags), moving(layout, flags, pays=False)
    assert sum(sum(worker["moved"]) for worker in moved.workers)
    assert not any(worker["moved"] for worker in stayed.workers)
    assert_replicas_alike(moved)
    assert moved.losses == pytest.approx(stayed.losses, abs=6e-4 if more else CLOSE)
    assert moved.samples == stayed.samples


@pytest.mark.parametrize("policy", ["full", "pec", "sparse"])
def test_a_snapshot_after_a_move_loads_in_another_layout(policy, data, tmp_path):
    """The last one is taken right after experts have moved."""
    places = dict(ckpt_dir=str(tmp_path / "snapshots"), log_dir=str(tmp_path / "log"))
    options = {"pec": dict(pec_k=2), "sparse": dict(sparse_window=2)}.get(policy, {})
    flags = data | PLAIN | ELASTIC | places | options | dict(ckpt_policy=policy, snapshot_interval=1, train_iters=20)
    moved = moving("DP4", flags | dict(elastic_rebalance_interval=4, exit_interval=13))
    assert sum(sum(worker["moved"]) for worker in moved.workers)
    assert_replicas_alike(moved)
    straight = train("EP2", data | PLAIN | dict(train_iters=20))
    plain = {name: value for name, value in flags.items() if name not in ELASTIC}
    resumed = train("EP2", plain)
    assert resumed.start == 13
    assert resumed.losses == pytest.approx(straight.losses[13:], abs=CLOSE)
    assert resumed.norms == pytest.approx(straight.norms[13:], abs=10 * CLOSE)
