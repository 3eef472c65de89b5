"""An elastic job in which a copy of the model takes several nodes: whole copies train, and other nodes help or move."""

import pytest

from moc.elastic.plan import Plan
from moc.inspect import verify
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.elastic_jobs import FLAGS, ITERATIONS, ZERO, assert_as_of_fixed_members, job_of
from tests.integration.tiny import DEEP, LAYOUTS, known
from tests.shared import ALL

pytestmark = pytest.mark.recovery
SPREAD = dict(elastic_min_replicas=1, elastic_slots=4)  # of one copy, a worker alone has all experts of its stage
TIED = SPREAD | dict(untie_embeddings_and_output_weights=False)


@pytest.mark.parametrize("number", range(1 + ALL))
def test_node_with_one_stage_is_lost_and_returns(data, tmp_path, number):
    """One copy of the model goes on, and the former partner helps; then there are two again, in the same processes."""
    lost = 2 - number  # of the first stage, or of the second one
    with job_of(data, tmp_path, [f"kill rank={lost} iteration=4"], layout="PP2xDP2", **TIED) as job:
        job.tells("training continues on 3 of 4 nodes, 1 of them with a partial model")
        before = job.pids
        job.reach(6)
        job.start(lost)
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="PP2xDP2", **TIED)
    assert {event["tier"] for event in job.events("resume")} == {"live"}  # no checkpoint is read
    assert [event["world_size"] for event in job.events("start")] == [4, 3, 4]
    assert all(job.pids[rank] == before[rank] for rank in {0, 1, 2, 3} - {lost})


TWICE = ZERO | dict(elastic_min_replicas=2, least=4)  # of two copies, each expert and block is on two nodes
HELPED = {  # name: layout, that of fixed members, nodes, those of a copy, flags
    "plain": ("PP2xDP2", "PP2xDP2", 4, 2, {}),
    "ZeRO": ("PP2xDP3", "PP2xDP2", 6, 2, TWICE),
    "tensor parallel": ("PP2xTP2xDP2", "PP2xTP2", 4, 2, {}),
    "tensor parallel, ZeRO": ("PP2xTP2xDP3", "PP2xTP2", 6, 2, TWICE),
    "a stage on each node": ("PP4xDP2", "PP4", 8, 4, DEEP),
    "two stages on each node": ("PP4xDP2", "PP4", 4, 2, DEEP),
    "domains": ("PP2xDP3", "PP2xDP2", 6, 2, dict(elastic_domain=1)),
}


def in_means(records):
    """Gradient norms and auxiliary losses, in which nothing of a node that helps counts."""
    balancing = [record["auxiliary"]["load_balancing_loss"] for record in records]
    return dict(grad_norm=[record["grad_norm"] for record in records], load_balancing_loss=balancing)


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 lets nodes of all stages help")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", HELPED)
def test_partial_model_nodes_repeat_same_history(data, tmp_path, how, first):
    """Until the end, each stage but that of the lost node has one that helps, in evaluations and snapshots, too."""
    layout, fixed, nodes, parts, flags = HELPED[how]
    per_node = LAYOUTS[layout][0] // nodes
    lost, records, more = parts if first else nodes - 1, [], TIED | flags
    for run in ("first", "second"):
        fault = f"kill rank={lost * per_node} iteration=4 point=after_reduce"  # so all have seen the last vote
        more = dict(least=parts, eval_iters=1, eval_interval=6) | more | dict(layout=layout, nodes=nodes)
        with job_of(data, tmp_path / run, [fault], **more) as job:
            assert job.wait() == 0, job.console[-4000:]
            assert job.left() == []
        assert len(job.states()) == (nodes - 1) * per_node
        assert verify.main([str(tmp_path / run / "snapshots")]) == 0
        model = TIED | dict(num_layers=flags.get("num_layers", 2))
        assert_as_of_fixed_members(job, data, layout=fixed, **model)
        for name, values in in_means(known(fixed, data | FLAGS | model).records).items():
            assert [event[name] for event in job.events("iteration")] == pytest.approx(values, rel=1e-4)
        assert [event["world_size"] // per_node for event in job.events("start")] == [nodes, nodes - 1]
        assert {event["tier"] for event in job.events("resume")} == {"live"}
        records.append((job.records(), [event["loss"] for event in job.events("evaluation")]))
    assert records[0] == records[1] and records[0][1]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes that help, and those that they helped")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("helper", [True, False])
def test_partial_model_node_is_lost_or_replaces_lost_node(data, tmp_path, zero, helper):
    """Of the second stage: of its nodes 1, 3 and 5, the last one helps."""
    faults = ["kill node=2 iteration=4", f"kill node={5 if helper else 1} iteration=9"]
    more = TIED | (TWICE if zero else dict(least=4))
    with job_of(data, tmp_path, faults, layout="PP2xDP3", **more) as job:
        job.tells("training continues on 4 of 6 nodes")
        before = job.pids
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="PP2xDP2", **TIED)
    assert [event["world_size"] for event in job.events("start")] == [6, 5, 4]
    assert {event["tier"] for event in job.events("resume")} == {"live"}
    assert job.pids == before and not job.events("fallback")


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses a node that held experts with one that helps alone")
def test_expert_on_partial_model_node_survives_node_loss(data, tmp_path):
    """Of three nodes of the second stage, the third helps, and has an expert that only one of the others has."""
    faults = ["kill node=0 iteration=4", "kill node=3 iteration=10"]
    more = dict(layout="PP2xDP3", least=4, candidates=3, elastic_slots=3, snapshot_interval=8, ckpt_keep=9)
    with job_of(data, tmp_path, faults, **more) as job:
        job.is_lost(0)
        assert job.wait() == 0, job.console[-4000:]
    plan = Plan.from_json(Store(LocalStorage(tmp_path / "snapshots")).read_manifest(8).state["elastic"]["1"])
    assert plan.members == (1, 3, 5)
    assert (1, 2) in {plan.holders(layer, expert) for layer in plan.tables for expert in range(plan.experts)}
    assert_as_of_fixed_members(job, data, layout="PP2xDP2")
    assert [event["world_size"] for event in job.events("start")] == [6, 5, 4]
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("fallback")


SEVERAL = {  # name: layout, that of fixed members, nodes of two workers, MIN, flags
    "two stages on a node": ("PP4xDP2", "PP4", 4, 2, SPREAD | DEEP),
    "tensor-parallel ranks of a stage": ("PP2xTP2xDP2", "PP2xTP2", 4, 2, SPREAD),
    "the same, ZeRO": ("PP2xTP2xDP3", "PP2xTP2", 6, 4, ZERO | dict(elastic_slots=4)),
}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes of several workers, twice")
@pytest.mark.parametrize("name", SEVERAL)
def test_node_with_model_part_is_lost_and_returns(data, tmp_path, monkeypatch, name):
    """Two nodes make a copy.  It comes back at the same iteration in both runs, which have the same bits."""
    monkeypatch.setenv("TEST_HELD_BEFORE", "6")
    layout, fixed, nodes, least, flags = SEVERAL[name]
    records = []
    for run in ("first", "second"):
        faults = ["kill rank=2 iteration=4"]  # of the second node, which has the second part of the first copy
        with job_of(data, tmp_path / run, faults, layout=layout, nodes=nodes, least=least, **flags) as job:
            job.reach(ITERATIONS - 6)
            before = job.pids
            job.start(1)
            job.tells(f"{nodes} nodes continue from iteration {ITERATIONS - 6}")
            assert job.wait() == 0, job.console[-4000:]
            assert job.left() == []
        assert_as_of_fixed_members(job, data, layout=fixed, **flags)
        assert {event["tier"] for event in job.events("resume")} == {"live"}  # no checkpoint is read
        assert not job.events("fallback")
        sizes = [event["world_size"] for event in job.events("start")]
        assert sizes[0] == sizes[-1] == 2 * nodes > min(sizes)
        assert (job.pids[0], job.pids[1]) == (before[0], before[1])
        records.append(job.records())
    assert records[0] == records[1]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 lets a node move to another stage, twice")
@pytest.mark.parametrize("zero", [False, True])
def test_surplus_node_moves_to_stage_that_lost_more(data, tmp_path, zero):
    """Of three copies two are left, the second time since a node that has helped moves, for which all wait."""
    records = []
    for run in ("first", "second"):
        faults = ["kill node=0 iteration=4", "kill node=2 iteration=9"]
        more = dict(layout="PP2xDP3", least=4, candidates=3, elastic_slots=4, use_distributed_optimizer=zero)
        with job_of(data, tmp_path / run, faults, **more) as job:
            job.is_lost(0)
            assert job.wait() == 0, job.console[-4000:]
            assert job.left() == []
        assert_as_of_fixed_members(job, data, layout="PP2xDP2", elastic_slots=4)
        assert {event["tier"] for event in job.events("resume")} == {"live"}
        assert [event["world_size"] for event in job.events("start")] == [6, 5, 4]
        assert not job.events("fallback")
        records.append(job.records())
    assert records[0] == records[1]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 lets a node wait until another stage lacks one")
def test_waiting_node_gets_stage_of_lost_node(data, tmp_path):
    """Five nodes: one has no partner, and gets the stage of a node that is lost, while one copy goes on."""
    more = SPREAD | dict(layout="PP2xDP2, 5 nodes")
    with job_of(data, tmp_path, ["kill node=1 iteration=4"], **more) as job:
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="PP2xDP2", **SPREAD)
    assert [event["reason"] for event in job.events("generation")] == [
        # as long as the other one builds
        "node 1 is lost: training continues on 3 of 5 nodes, 1 of them with a partial model",
        "nodes have waited, and are ready: training continues on 4 of 5 nodes",
    ]
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses a stage")
def test_lost_stage_gets_node_and_all_load_checkpoint(data, tmp_path):
    saved = dict(snapshot_interval=3, ckpt_blocking=True, ckpt_policy="full", ckpt_dir=str(tmp_path / "snapshots"))
    faults = ["kill node=1 iteration=8", "kill node=3 iteration=8"]
    with job_of(data, tmp_path, faults, layout="PP2xDP2", **SPREAD, **saved) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True, layout="PP2xDP2", **SPREAD)
    assert job.events("fallback")[-1]["reason"] == "no worker that is left holds pipeline stage 2"
    assert job.events("resume")[-1]["tier"] == "storage"
