"""Elastic training with the same workers throughout: results do not depend on their number, nor on who holds what."""

import itertools
from collections import Counter

import pytest

from moc.elastic.plan import Plan
from moc.elastic.transfers import count_new_replicas, expert_holders, plan_expert_transfers
from tests.integration.launched import Launched
from tests.integration.test_layouts import CLOSE, assert_alike
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS, Trained, known, train
from tests.shared import ALL
from tests.worlds import run_world

PLAIN = dict(calculate_per_token_loss=True, global_batch_size=4, clip_grad=0.5, train_iters=30)
ELASTIC = dict(elastic=True, elastic_slots=3)
GHOSTS = dict(global_batch_size=5)  # in the last round, all data-parallel ranks but the first have ghosts
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
ALONE = dict(elastic_min_replicas=1, elastic_slots=4)
REPLICATED = dict(use_distributed_optimizer=False)


def elastic(layout: str, flags: dict, **arguments) -> Trained:
    """Trains as :func:`tests.integration.elastic_bodies.train` does."""
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | parallel | ELASTIC | flags
    return Trained(run_world(size, "tests.integration.elastic_bodies:train", flags=flags, **arguments))


def moved(trained: Trained) -> int:
    """Bytes of experts that have moved."""
    return sum(sum(worker["moved"]) for worker in trained.workers)


def assert_replicas_alike(trained: Trained) -> None:
    """Copies of weights, masters and moments, and their numbers of updates, are equal, and there are some of each kind.

    Of dense optimizer state, too: with ZeRO-1, each block has a shadow.
    """
    whole: dict[str, str] = {}
    for worker in trained.workers:
        for key, value in [*worker["state"].items(), *worker["steps"].items()]:
            assert whole.setdefault(key, value) == value, key
    held = Counter(key for worker in trained.workers for key in worker["state"])
    for kind in ("embedding.word_embeddings.weight exp_avg ", "experts."):
        assert max(count for key, count in held.items() if kind in key) > 1


@pytest.mark.parametrize(
    ("layout", "plain", "more", "end"),
    [("DP4", "EP4", {}, 20), ("PP2xDP2", "PP2xEP2", REPLICATED, 6), ("TP2xDP2", "TP2xEP2", {}, 6)]
    + ALL * [("DP4", "EP4", REPLICATED, 30), ("PP2xDP2", "PP2xEP2", {}, 30), ("TP2xDP2", "TP2xEP2", REPLICATED, 30)],
)
def test_elastic_training_matches_expert_parallelism(layout, plain, more, end, data):
    """Gradients are clipped, and experts have from one to all workers as holders."""
    flags, end = data | PLAIN | more, 30 if ALL else end
    found = elastic(layout, flags | dict(exit_interval=end))
    assert_alike(found, known(plain, flags | dict(exit_interval=end)))
    assert_replicas_alike(found)


@pytest.mark.parametrize(
    ("layout", "slots", "most"), [("DP4", 3, 2), *ALL * [("DP4", 4, 1), ("PP2xDP2", 4, 1), ("TP2xDP2", 3, 2)]]
)
def test_training_in_several_domains_matches_one_domain(layout, slots, most, data):
    """Tokens stay in the domain, and replicas in all of them are alike, also after they have moved."""
    flags = data | PLAIN | GHOSTS | REPLICATED | dict(elastic_slots=slots, train_iters=8)
    one = elastic(layout, flags | dict(elastic_rebalance_interval=0))
    found = elastic(layout, flags | dict(elastic_domain=most, elastic_rebalance_interval=3))
    assert {worker["dispatch"] for worker in found.workers} == {most}
    assert {worker["dispatch"] for worker in one.workers} == {2 if layout == "PP2xDP2" else 4}
    assert bool(moved(found)) == (slots < 4)
    assert_replicas_alike(found)
    assert_alike(found, one)


OPTIONS = {  # name: flags
    "GPT-2 like": dict(
        swiglu=False, add_bias_linear=True, position_embedding_type="learned_absolute", moe_layer_freq=2
    ),
    "shared experts": dict(moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True),
    "expert bias": EXPERT_BIAS,
    "z-loss, dropped tokens": dict(moe_z_loss_coeff=0.01, moe_expert_capacity_factor=0.8),
    "Algorithm 1": dict(elastic_dispatch="even"),
    "hottest everywhere": dict(elastic_everywhere="1"),
    "SGD": dict(optimizer="sgd", lr=0.1, use_distributed_optimizer=False),
    "tied embeddings": dict(untie_embeddings_and_output_weights=False),
}


@pytest.mark.parametrize("option", OPTIONS if ALL else ["GPT-2 like"])
def test_option_trains_elastic_job_as_single_worker(option, data):
    flags = data | PLAIN | dict(train_iters=4) | OPTIONS[option]
    plain = {name: value for name, value in flags.items() if not name.startswith("elastic")}
    assert_alike(elastic("DP2", flags | dict(elastic_rebalance_interval=2)), known("1", plain))


@pytest.mark.parametrize("layout", ["DP4", *ALL * ["PP2xDP2", "TP2xDP2"]])
def test_dropout_and_moves_train_as_single_worker(layout, data):
    alone = {"DP4": "1", "PP2xDP2": "PP2", "TP2xDP2": "TP2"}[layout]
    seed = dict(seed=1)  # with the usual one, rounding decides where a router sends a token of iteration 8
    flags = data | PLAIN | DROPOUT | GHOSTS | seed | dict(train_iters=50, exit_interval=50 if ALL else 24)
    found = elastic(layout, flags | dict(elastic_rebalance_interval=10 if ALL else 5))
    assert moved(found)
    assert_replicas_alike(found)
    assert_alike(found, known(alone, flags | ELASTIC | ALONE))


def test_workers_send_only_planned_bytes(data):
    """Bytes between any two workers are those of the plan of transfers, in which new holders pass on what they get."""
    few = dict(num_experts=8, elastic_slots=3, elastic_min_replicas=1)  # some experts have a holder, and get more
    found = elastic("DP4", data | PLAIN | few | REPLICATED | dict(train_iters=9, elastic_rebalance_interval=2))
    rounds, flows = Counter(), list(zip(*(worker["flows"] for worker in found.workers), strict=True))
    for of_workers in flows:
        before, after, sizes, _ = of_workers[0]
        old, new = (Plan.from_json(told["0"]) for told in (before, after))
        planned, came = Counter(), [0] * len(of_workers)
        flow = plan_expert_transfers(expert_holders(old), new, {int(layer): n for layer, n in sizes.items()})
        for one in itertools.chain.from_iterable(flow.values()):
            planned[one.source, one.target] += one.chunk.nbytes
            came[one.target] += one.chunk.nbytes
            rounds[one.round] += 1
        sent = {(rank, int(to)): n for rank, worker in enumerate(of_workers) for to, n in worker[3].items()}
        assert sent == planned
        assert sum(came) == count_new_replicas(old, new) * max(sizes.values())  # and no byte more than must move
    assert flows and set(rounds) == {0, 1}
    assert_replicas_alike(found)


@pytest.mark.parametrize("layout", ["DP2", *ALL * ["PP2xDP2", "TP2xDP2"]])
def test_differing_rebalance_plans_stop_all_workers(layout, data):
    """Also those of other stages, and of other tensor-parallel ranks."""
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | parallel | ELASTIC | data | PLAIN | dict(elastic_slots=4)
    for told in run_world(size, "tests.integration.elastic_bodies:cuts_that_differ", flags=flags):
        assert told == {"codes": ["elastic-plans-differ"], "iterations": 1}


@pytest.mark.parametrize("layout", ["PP2xDP2", *ALL * ["DP4", "TP2xDP2"]])
def test_recomputed_dummy_batches_and_empty_slots_train_equally(layout, data):
    """Layers that are computed again in the backward pass know which micro batches are ghosts."""
    whole = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    flags = data | PLAIN | GHOSTS | whole | REPLICATED | dict(train_iters=6)
    found = elastic(layout, flags | dict(elastic_rebalance_interval=2), vacant=True)
    assert moved(found)
    assert_replicas_alike(found)
    reference = elastic({"PP2xDP2": "PP2", "TP2xDP2": "TP2"}.get(layout, "1"), flags | ALONE)
    assert_alike(found, reference)


@pytest.mark.parametrize("policy", ["full", *ALL * ["pec", "sparse"]])
def test_snapshot_after_move_loads_in_other_layout(policy, data, tmp_path):
    places = dict(ckpt_dir=str(tmp_path / "snapshots"), log_dir=str(tmp_path / "log"))
    options = {"pec": dict(pec_k=2), "sparse": dict(sparse_window=2)}.get(policy, {})
    snapshots = places | options | dict(ckpt_policy=policy, snapshot_interval=1)
    flags = data | PLAIN | snapshots | dict(elastic_rebalance_interval=4)
    assert moved(elastic("DP4", flags | dict(exit_interval=13)))
    straight = known("EP4", data | PLAIN | dict(exit_interval=30 if ALL else 20))
    resumed = train("EP2", data | PLAIN | snapshots | dict(exit_interval=20))
    assert resumed.start == 13
    assert resumed.losses == pytest.approx(straight.losses[13:20], abs=CLOSE)
    assert resumed.norms == pytest.approx(straight.norms[13:20], abs=10 * CLOSE)


def test_resumed_run_keeps_expert_placement(data, tmp_path):
    flags = data | PLAIN | DROPOUT | BF16 | dict(elastic_rebalance_interval=4, train_iters=8)
    snapshots = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_policy="full")
    straight = elastic("DP2", flags)
    elastic("DP2", flags | snapshots | dict(exit_interval=5))
    resumed = elastic("DP2", flags | snapshots)
    assert moved(resumed)  # from the first plan to that of the fourth iteration
    assert resumed.start == 5
    assert resumed.records == straight.records[5:]
    assert resumed.weights == straight.weights


@pytest.mark.recovery
def test_worker_lost_while_experts_move_loses_no_iteration(data, tmp_path):
    """Before a layer's experts have landed, and after it, while others fill their slots and begin the next layer.

    No iteration is lost, and no checkpoint is read: other holders have all experts.
    """
    flags = data | PLAIN | REPLICATED | dict(train_iters=14, elastic_rebalance_interval=4)
    snapshots = dict(ckpt_policy="full", snapshot_interval=2, ckpt_dir=str(tmp_path / "snapshots"))
    faults = ["kill rank=1 iteration=4 point=rebalancing", "kill rank=2 iteration=8 point=landed"]
    program = "tests/integration/moving_pretrain_gpt_moe.py"
    with Launched("DP4", flags | ELASTIC | snapshots | dict(inject=faults), tmp_path / "job", program=program) as job:
        assert job.wait(240) == 0, job.console[-4000:]
    assert sorted(event["rank"] for event in job.events("inject")) == [1, 2], job.console[-4000:]
    assert [(event["tier"], event["iteration"]) for event in job.events("resume")] == [("live", 4), ("live", 8)]
    assert job.events("rebalance")
    found = {iteration: (loss, norm) for iteration, loss, norm in job.records()}
    straight = known("EP4", data | PLAIN | dict(exit_interval=30 if ALL else 20))
    assert [found[i + 1][0] for i in range(14)] == pytest.approx(straight.losses[:14], abs=CLOSE)
    assert [found[i + 1][1] for i in range(14)] == pytest.approx(straight.norms[:14], abs=CLOSE)
