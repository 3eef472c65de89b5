"""An elastic job of MIN to MAX nodes: workers go on in the same processes when nodes are lost, and when nodes come."""

import contextlib
import time
from collections import Counter

import pytest

from moc.elastic.plan import Plan
from moc.inspect import verify
from moc.policy.interval import BLOCK, PROFILE_BLOCKS, WARM_UP
from moc.store.storage import LocalPlace
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import DEEP, LAYOUTS, SHALLOW, known
from tests.shared import ALL

pytestmark = pytest.mark.recovery
ITERATIONS = 16
FLAGS = SHALLOW | dict(
    global_batch_size=10,
    micro_batch_size=1,
    calculate_per_token_loss=True,
    use_distributed_optimizer=False,
    elastic=True,
    elastic_slots=3,
    elastic_rebalance_interval=5,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    train_iters=ITERATIONS,
)
MORE = {  # name: faults
    "voted": ["kill node=1 iteration=6 point=after_vote"],
    "landed": ["kill node=2 iteration=4", "kill node=3 iteration=4 point=landed"],
    "meeting": ["kill node=1 iteration=4", "kill node=3 iteration=4 point=meeting"],
    "one after the other": ["kill node=1 iteration=4", "kill node=3 iteration=9"],
    "first": ["kill node=0 iteration=5"],
}

ZERO = dict(use_distributed_optimizer=True)
HOW = {  # name: flags
    "full": {},
    "full, ZeRO": ZERO,
    "pec": dict(ckpt_policy="pec", pec_k=1, snapshot_interval=3),
    "selective": dict(ckpt_policy="selective", selective_experts=1, snapshot_interval=3),
    "sparse": dict(ckpt_policy="sparse", sparse_window=2, snapshot_interval=1),
    "domains": dict(elastic_domain=2),
    "pec, ZeRO, bf16": ZERO | dict(ckpt_policy="pec", pec_k=1, snapshot_interval=3, bf16=True),
}
AGAIN = ("meeting", "one after the other", "first")  # elsewhere a moment decides who completes what


def job_of(data, tmp_path, faults, least=2, candidates=1, layout="DP4", nodes=None, **more):
    """A job of nodes, of a worker each unless they are fewer; an injected kill loses one as a whole."""
    saved = dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "snapshots"))
    saved |= {} if "ckpt_policy" in more else dict(snapshot_interval=100)
    nodes = dict(nodes=nodes or LAYOUTS[layout][0], least=least, candidates=candidates)
    own = ["--silence-timeout", "5", "--grow-wait", "600"]
    program = "tests/integration/losing_pretrain_gpt_moe.py"
    return Launched(
        layout, data | FLAGS | saved | more | dict(inject=faults), tmp_path / "job", *own, **nodes, program=program
    )


def assert_as_of_fixed_members(job, data, again=False, layout="DP4", close=CLOSE, **more):
    """Losses are those of all workers throughout; no iteration was computed twice, unless ``again``.

    Copies of weights, masters and moments, and their numbers of updates, are equal.
    """
    held, whole = Counter(), {}
    for worker in job.states():
        held.update(worker.keys())
        for key, digest in worker.items():
            assert whole.setdefault(key, digest) == digest, f"copies of {key} differ"
    assert max(count for key, count in held.items() if "experts." in key) > 1 or len(job.states()) < 3
    expected = [record["loss"] for record in known(layout, data | FLAGS | more).records]
    assert [event["iteration"] for event in job.events("iteration")] == [*range(1, len(expected) + 1)] or again
    assert [record[1] for record in job.records()] == pytest.approx(expected, abs=close)


@pytest.mark.parametrize("how", HOW if ALL else ["full", "full, ZeRO"])
def test_nodes_are_lost_and_come_back(data, tmp_path, how):
    lost = (2, 3) if how == "domains" else (1, 3)  # a domain as a whole: the other one has all experts
    first, second = (f"kill node={node} iteration=4" for node in lost)
    with job_of(data, tmp_path, [first, f"{second} point=rebalancing"], **HOW[how]) as job:  # while experts move
        job.tells("training continues on 2 of 4 nodes")
        before = job.pids
        job.reach(6)
        for node in lost:
            job.start(node)
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    plain = dict(close=6e-4, bf16=True) if "bf16" in how else {}
    assert_as_of_fixed_members(job, data, **plain)
    left = {0, 1, 2, 3} - {*lost}
    assert {job.pids[rank] for rank in left} == {before[rank] for rank in left}
    assert {event["tier"] for event in job.events("resume")} == {"live"}  # no checkpoint is read
    assert [event["nodes"] for event in job.events("migration")] == [2, 4]  # that to three was cut off
    assert [event["world_size"] for event in job.events("start")] == [4, 2, 4]
    assert {event["plt"] for event in job.events("lost")} <= {0.0}  # of policies that count lost tokens


@pytest.fixture
def growing(data, tmp_path, monkeypatch):
    """Starts a job of three nodes that loses one, which comes back, and is ready while all are in iteration 5."""
    monkeypatch.setenv("TEST_WAITS_IN", "5")
    with contextlib.ExitStack() as stack:

        def start(*faults, **more):
            of_job = dict(layout="DP3", elastic_rebalance_interval=0, elastic_slots=4) | more
            job = stack.enter_context(job_of(data, tmp_path, ["kill node=1 iteration=3", *faults], **of_job))
            job.is_in(5, workers=2)
            job.start(1)
            job.tells("nodes that have come are ready")
            return job

        yield start


def begun_again(job):
    """Iterations that a worker of the nodes that stayed has begun more than once, but for that of the first loss."""
    counts = [Counter(job.begun()[job.pids[rank]]) for rank in (0, 2)]
    return [iteration for found in counts for iteration, count in found.items() if count > 1 and iteration != 3]


def test_nodes_are_taken_in_between_two_iterations_so_that_none_is_dropped(data, growing):
    job = growing()
    before = job.pids
    job.go_on()
    job.tells("3 nodes continue from iteration 5")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert not begun_again(job) and job.pids == before
    for rank, first in ((0, 1), (1, 6), (2, 1)):
        assert sorted({*job.begun()[before[rank]]}) == [*range(first, ITERATIONS + 1)]
    reasons = [event["reason"] for event in job.events("generation")]
    assert reasons[-1] == "nodes have come: training continues on 3 of 3 nodes"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes while others are about to be taken in")
@pytest.mark.parametrize("moment", ["before the vote", "after it"])
def test_a_node_is_lost_before_it_has_met_one_that_comes(data, growing, moment):
    """The other one is seated in its place, and gets what it had."""
    job = growing(*["kill node=2 iteration=5 point=parting"] * (moment == "after it"))
    if moment == "before the vote":
        job.lose(2)
        job.tells("node 2 is lost: training continues on 2 of 3 nodes")
    job.go_on()
    job.tells("node 2 is lost: training continues on 2 of 3 nodes")
    assert job.wait() == 0, job.console[-4000:]
    assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert [event["nodes"] for event in job.events("migration")] == [2, 2]
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes that are about to be taken in")
@pytest.mark.parametrize("how", ["worker", "node"])
def test_whoever_comes_is_lost_before_all_have_met(data, growing, how):
    """The others go on without it and drop no iteration; it comes again."""
    job = growing()
    first = job.pids[1]
    job.kill(1) if how == "worker" else job.lose(1)
    time.sleep(1.0)  # the controller hears of it
    job.go_on()
    job.tells("nodes that were ready are gone again")
    if how == "node":
        job.start(1)
    job.tells("3 nodes continue from iteration")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert job.pids[1] != first and not begun_again(job)


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 stops a worker while others wait for it")
def test_a_worker_that_hangs_before_it_has_left_is_replaced_and_the_others_meet_who_has_come(data, growing):
    job = growing("stop node=2 iteration=5 point=parting")
    job.go_on()
    job.tells("had said nothing for")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert job.events("start")[-1]["world_size"] == 3
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes at more moments")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_nodes_are_lost_at_any_moment_and_the_same_history_is_repeated(data, tmp_path, name, zero):
    records = []
    for run in ("first", "second") if name in AGAIN else ("first",):
        more = dict(candidates=3 if name == "first" else 1, use_distributed_optimizer=zero)
        with job_of(data, tmp_path / run, MORE[name], **more) as job:
            if name == "first":
                job.is_lost(0)
            assert job.wait() == 0, job.console[-4000:]
        assert_as_of_fixed_members(job, data)
        assert {event["tier"] for event in job.events("resume")} == {"live"}
        records.append(job.records())
    assert records[0] == records[-1]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 goes through a longer history, twice")
@pytest.mark.parametrize(("domain", "zero"), [(256, False), (2, False), (256, True)])
def test_from_six_nodes_to_five_to_three_to_six_and_the_same_again(data, tmp_path, monkeypatch, domain, zero):
    """The last two are lost at once: one of them when it is to meet the others after the loss of the first."""
    monkeypatch.setenv("TEST_HELD_BEFORE", "6")
    faults = ["kill node=1 iteration=3", "kill node=4 iteration=6", "kill node=5 iteration=6 point=meeting"]
    three, records = dict(elastic_min_replicas=3, use_distributed_optimizer=zero), []  # of five nodes, two may be lost
    for run in ("first", "second"):
        with job_of(data, tmp_path / run, faults, least=3, layout="DP6", **three, elastic_domain=domain) as job:
            job.reach(ITERATIONS - 6)
            for node in (1, 4, 5):
                job.start(node)
            job.tells(f"6 nodes continue from iteration {ITERATIONS - 6}")
            assert job.wait() == 0, job.console[-4000:]
            assert job.left() == []
        assert_as_of_fixed_members(job, data, layout="DP6", **three)
        assert [event["world_size"] for event in job.events("start")] == [6, 5, 3, 6]
        assert {event["tier"] for event in job.events("resume")} == {"live"}
        records.append(job.records())
    assert records[0] == records[1]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes with several pipeline stages")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("layout", "fixed"), [("PP2xDP3", "PP2xDP2"), ("PP2xTP2xDP3", "PP2xTP2")])
def test_nodes_with_all_pipeline_stages_are_lost_and_come_back(data, tmp_path, layout, fixed, zero):
    """The same history twice, and one in which the node comes back."""
    records = []
    for run in ("first", "second", "third"):
        more = dict(layout=layout, nodes=3, use_distributed_optimizer=zero)
        fault = f"kill rank={LAYOUTS[layout][0] // 3} iteration=4"  # the second node's first worker
        with job_of(data, tmp_path / run, [fault], **more) as job:
            job.tells("2 nodes continue from iteration")
            before = job.pids
            if run == "third":
                job.start(1)
                job.tells("3 nodes continue from iteration")
            assert job.wait() == 0, job.console[-4000:]
            assert job.left() == []
        assert_as_of_fixed_members(job, data, layout=fixed)
        assert {job.pids[rank] for rank in (0, 1)} == {before[0], before[1]}
        assert {event["tier"] for event in job.events("resume")} == {"live"}
        records.append(job.records())
    assert records[0] == records[1]


CHOSEN = WARM_UP + BLOCK * PROFILE_BLOCKS
LONGER = dict(train_iters=CHOSEN + 24, lr_decay_iters=CHOSEN + 24)


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 measures and chooses a policy")
def test_a_job_that_has_chosen_its_policy_goes_on_under_it(data, tmp_path):
    auto = LONGER | dict(ckpt_policy="auto", mtbf_hours=1.0)
    with job_of(data, tmp_path, [f"kill node=1 iteration={CHOSEN + 8}"], **auto) as job:
        job.tells("training continues on 3 of 4 nodes")
        before = job.pids
        job.reach(CHOSEN + 9)  # state has moved
        job.start(1)
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, **LONGER)
    (choice,) = job.events("choice")
    kept = Store(LocalPlace(tmp_path / "snapshots")).manifest(LONGER["train_iters"]).state["auto"]
    assert kept["flags"]["ckpt_policy"] == choice["ckpt_policy"]  # it holds for any number of nodes
    assert kept["measured"]["faults"] == 1  # a node that comes is none
    assert choice["iteration"] <= CHOSEN + 8
    assert {job.pids[rank] for rank in (0, 2, 3)} == {before[rank] for rank in (0, 2, 3)}
    assert {event["tier"] for event in job.events("resume")} == {"live"}
    assert [event["nodes"] for event in job.events("migration")] == [3, 4]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses a node that is about to be taken in")
@pytest.mark.parametrize("zero", [False, True])
def test_a_newcomer_is_lost_while_state_moves_to_it(data, tmp_path, zero):
    faults = ["kill node=1 iteration=4", "kill node=1 iteration=0 point=rebalancing"]
    with job_of(data, tmp_path, faults, use_distributed_optimizer=zero) as job:
        job.tells("3 nodes continue from iteration")
        job.start(1)
        job.tells("training continues on 4 of 4 nodes")
        job.launchers[1].wait(120)
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data)
    assert [event["nodes"] for event in job.events("migration")] == [3, 3]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes that pass on what they have got")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("lost", [2, 3])
def test_a_node_is_lost_while_those_that_come_pass_parts_of_experts_on(data, tmp_path, lost, zero):
    """Of two that come, or of those that were left: what was in force still is, and nothing has to be loaded."""
    faults = ["kill node=1 iteration=4", "kill node=3 iteration=4", f"kill node={lost} iteration=0 point=passing_on"]
    more = dict(elastic_slots=4, use_distributed_optimizer=zero)
    with job_of(data, tmp_path, faults, **more) as job:
        job.tells("2 nodes continue from iteration")
        job.reach(6)
        for node in (1, 3):
            job.start(node)
        job.launchers[lost].wait(120)
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, **more)
    assert [event["nodes"] for event in job.events("migration")][-1] == 3
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("fallback")


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses experts")
def test_where_experts_are_lost_all_go_back_to_the_newest_checkpoint(data, tmp_path):
    tight = dict(elastic_everywhere="0", elastic_slots=2, elastic_rebalance_interval=0)  # two nodes hold the same
    saved = dict(snapshot_interval=3, ckpt_blocking=True)
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **tight, **saved) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    assert "no worker that is left holds expert" in job.events("fallback")[-1]["reason"]
    assert job.events("resume")[-1]["tier"] == "storage"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses shards")
def test_where_shards_are_lost_all_go_back_to_the_newest_checkpoint(data, tmp_path):
    """All nodes have all experts, and two hold the same shard."""
    more = dict(elastic_slots=4, snapshot_interval=3, ckpt_blocking=True) | ZERO
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **more) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    reasons = [event["reason"] for event in job.events("fallback")]
    assert reasons == ["no worker that is left holds a shard of the optimizer's state"]
    assert job.events("resume")[-1]["tier"] == "storage"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses all of a run")
def test_where_experts_are_lost_and_there_is_no_checkpoint_the_run_begins_again(data, tmp_path):
    tight = dict(elastic_everywhere="0", elastic_slots=2, elastic_rebalance_interval=0)
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **tight) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    assert sum(event["iteration"] == 1 for event in job.events("iteration")) == 2
    assert "was killed by signal" not in str([event["reason"] for event in job.events("generation")])


SPREAD = dict(elastic_min_replicas=1, elastic_slots=4)  # of one copy, a worker alone has all experts of its stage
TIED = SPREAD | dict(untie_embeddings_and_output_weights=False)


@pytest.mark.parametrize("number", range(1 + ALL))
def test_a_node_with_a_stage_is_lost_and_comes_back(data, tmp_path, number):
    """One copy of the model goes on, and the former partner helps; then there are two again, in the same processes."""
    lost = 2 - number  # of the first stage, or of the second one
    with job_of(data, tmp_path, [f"kill rank={lost} iteration=4"], layout="PP2xDP2", **TIED) as job:
        job.tells("training continues on 3 of 4 nodes, 1 of which helps")
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
def test_nodes_that_help_are_replicas_and_the_same_history_is_repeated(data, tmp_path, how, first):
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
def test_a_node_that_helps_is_lost_or_takes_over_from_a_lost_one(data, tmp_path, zero, helper):
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
def test_an_expert_that_a_node_that_helps_holds_survives(data, tmp_path):
    """Of three nodes of the second stage, the third helps, and has an expert that only one of the others has."""
    faults = ["kill node=0 iteration=4", "kill node=3 iteration=10"]
    more = dict(layout="PP2xDP3", least=4, candidates=3, elastic_slots=3, snapshot_interval=8, ckpt_keep=9)
    with job_of(data, tmp_path, faults, **more) as job:
        job.is_lost(0)
        assert job.wait() == 0, job.console[-4000:]
    plan = Plan.from_json(Store(LocalPlace(tmp_path / "snapshots")).manifest(8).state["elastic"]["1"])
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
def test_a_node_with_several_workers_and_a_part_of_the_model_is_lost_and_comes_back(data, tmp_path, monkeypatch, name):
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
def test_a_surplus_node_moves_to_the_stage_that_has_lost_more_and_the_same_history_is_repeated(data, tmp_path, zero):
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
def test_a_node_that_waits_is_seated_as_soon_as_another_is_lost(data, tmp_path):
    """Five nodes: one has no partner, and gets the stage of a node that is lost, while one copy goes on."""
    more = SPREAD | dict(layout="PP2xDP2, 5 nodes")
    with job_of(data, tmp_path, ["kill node=1 iteration=4"], **more) as job:
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="PP2xDP2", **SPREAD)
    assert [event["reason"] for event in job.events("generation")] == [
        "node 1 is lost: training continues on 3 of 5 nodes, 1 of which helps",  # as long as the other one builds
        "nodes have waited, and are ready: training continues on 4 of 5 nodes",
    ]
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses a stage")
def test_where_a_stage_is_lost_a_node_moves_to_it_and_all_go_back_to_the_newest_checkpoint(data, tmp_path):
    saved = dict(snapshot_interval=3, ckpt_blocking=True, ckpt_policy="full", ckpt_dir=str(tmp_path / "snapshots"))
    faults = ["kill node=1 iteration=8", "kill node=3 iteration=8"]
    with job_of(data, tmp_path, faults, layout="PP2xDP2", **SPREAD, **saved) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True, layout="PP2xDP2", **SPREAD)
    assert job.events("fallback")[-1]["reason"] == "no worker that is left holds pipeline stage 2"
    assert job.events("resume")[-1]["tier"] == "storage"
