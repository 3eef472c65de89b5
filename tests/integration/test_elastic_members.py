"""An elastic job of MIN to MAX nodes: workers go on in the same processes when nodes are lost, and when nodes come."""

import contextlib
import time
from collections import Counter

import pytest

from moc.elastic.plan import Plan
from moc.elastic.transfers import expert_operator
from moc.policy.interval import BLOCK, PROFILE_BLOCKS, WARM_UP
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.elastic_jobs import FLAGS, ITERATIONS, ZERO, assert_as_of_fixed_members, job_of
from tests.integration.test_layouts import CLOSE
from tests.integration.tiny import LAYOUTS, known
from tests.shared import ALL

pytestmark = pytest.mark.recovery
MORE = {  # name: faults
    "voted": ["kill node=1 iteration=6 point=after_commit"],
    "landed": ["kill node=2 iteration=4", "kill node=3 iteration=4 point=landed"],
    "meeting": ["kill node=1 iteration=4", "kill node=3 iteration=4 point=ready"],
    "one after the other": ["kill node=1 iteration=4", "kill node=3 iteration=9"],
    "first": ["kill node=0 iteration=5"],
}

HOW = {  # name: flags
    "full": {},
    "full, ZeRO": ZERO,
    "pec": dict(ckpt_policy="pec", pec_k=1, snapshot_interval=3),
    "selective": dict(ckpt_policy="selective", selective_experts=1, snapshot_interval=3),
    "sparse": dict(ckpt_policy="sparse", sparse_window=2, snapshot_interval=1),
    "domains": dict(elastic_domain=2),
    "pec, ZeRO, bf16": ZERO | dict(ckpt_policy="pec", pec_k=1, snapshot_interval=3, bf16=True),
}
FLIPPING = "tests/integration/flipping_pretrain_gpt_moe.py"
AGAIN = ("meeting", "one after the other", "first")  # elsewhere a moment decides who completes what


@pytest.mark.parametrize("how", HOW if ALL else ["full, ZeRO"])
def test_elastic_job_survives_lost_and_returning_nodes(data, tmp_path, how):
    lost = (2, 3) if how == "domains" else (1, 3)  # a domain as a whole: the other one has all experts
    first, second = (f"kill node={node} iteration=4" for node in lost)
    faults = [first, f"{second} point=rebalancing"]  # while experts move
    with job_of(data, tmp_path, faults, **HOW[how]) as job:
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
    resumed = job.events("resume")
    assert {event["tier"] for event in resumed} == {"live"}  # no checkpoint is read
    checked = [(event["verified"] > 0, event["unverified"], event["wrong"]) for event in resumed]
    assert set(map(str, checked)) == {str((True, [], []))}, checked
    assert [event["nodes"] for event in job.events("migration")] == [2, 4]  # that to three was cut off
    assert [event["world_size"] for event in job.events("start")] == [4, 2, 4]
    assert {event["plt"] for event in job.events("lost")} <= {0.0}  # of policies that count lost tokens


def test_a_changed_bit_is_found_with_fewer_nodes(data, tmp_path, monkeypatch):
    """A survivor whose state has changed takes it from the other, though all replicas move afterwards."""
    monkeypatch.setenv("TEST_FLIP", "0 7 kept")
    monkeypatch.setenv("TEST_LOSES", "1")
    faults, of_job = ["kill node=1 iteration=8 point=before_commit"], dict(layout="DP3", elastic_slots=4)
    with job_of(data, tmp_path, faults, program=FLIPPING, **of_job) as job:
        assert job.wait() == 0, job.console[-4000:]
    (warning,) = [line for line in job.console.splitlines() if "state-digest-differs" in line]
    assert (tmp_path / "job" / "flipped").read_text() in warning
    (resumed,) = job.events("resume")
    assert (resumed["iteration"], resumed["unverified"], resumed["wrong"]) == (7, [], []) and resumed["verified"]
    assert_as_of_fixed_members(job, data, **of_job)


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
            job.tells("new nodes are ready")
            return job

        yield start


def begun_again(job):
    """Iterations that a worker of the nodes that stayed has begun more than once, but for that of the first loss."""
    counts = [Counter(job.begun()[job.pids[rank]]) for rank in (0, 2)]
    return [iteration for found in counts for iteration, count in found.items() if count > 1 and iteration != 3]


def test_nodes_join_between_iterations_without_loss(data, growing):
    job = growing()
    before = job.pids
    job.go_on(5)
    job.tells("3 nodes continue from iteration 5")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert not begun_again(job) and job.pids == before
    for rank, first in ((0, 1), (1, 6), (2, 1)):
        assert sorted({*job.begun()[before[rank]]}) == [*range(first, ITERATIONS + 1)]
    reasons = [event["reason"] for event in job.events("generation")]
    assert reasons[-1] == "nodes have joined: training continues on 3 of 3 nodes"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes while others are about to be taken in")
@pytest.mark.parametrize("moment", ["before the vote", "after it"])
def test_node_lost_before_connecting_to_joining_node(data, growing, moment):
    """The other one is seated in its place, and gets what it had."""
    job = growing(*["kill node=2 iteration=5 point=draining"] * (moment == "after it"))
    if moment == "before the vote":
        job.lose(2)
        job.tells("node 2 is lost: training continues on 2 of 3 nodes")
    job.go_on(5)
    job.tells("node 2 is lost: training continues on 2 of 3 nodes")
    assert job.wait() == 0, job.console[-4000:]
    assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert [event["nodes"] for event in job.events("migration")] == [2, 2]
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes that are about to be taken in")
@pytest.mark.parametrize("how", ["worker", "node"])
def test_joining_node_lost_before_connecting_is_left_out(data, growing, how):
    """The others go on without it and drop no iteration; it comes again."""
    job = growing()
    first = job.pids[1]
    job.kill(1) if how == "worker" else job.lose(1)
    time.sleep(1.0)  # the controller hears of it
    job.go_on(5)
    job.tells("nodes that were ready are gone again")
    if how == "node":
        job.start(1)
    job.tells("3 nodes continue from iteration")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert job.pids[1] != first and not begun_again(job)


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 stops a worker while others wait for it")
def test_worker_hanging_before_drain_is_replaced_during_scale_up(data, growing):
    job = growing("stop node=2 iteration=5 point=draining")
    job.go_on(5)
    job.tells("sent no heartbeat for")
    assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", elastic_slots=4)
    assert job.events("start")[-1]["world_size"] == 3
    assert {event["tier"] for event in job.events("resume")} == {"live"}


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses nodes at more moments")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_nodes_lost_at_any_moment_repeat_same_history(data, tmp_path, name, zero):
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
def test_membership_6_5_3_6_is_repeatable(data, tmp_path, monkeypatch, domain, zero):
    """The last two are lost at once: one of them when it is to meet the others after the loss of the first."""
    monkeypatch.setenv("TEST_HELD_BEFORE", "6")
    faults = ["kill node=1 iteration=3", "kill node=4 iteration=6", "kill node=5 iteration=6 point=ready"]
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
def test_nodes_with_all_stages_are_lost_and_return(data, tmp_path, layout, fixed, zero):
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
def test_job_with_auto_policy_keeps_it_after_node_loss(data, tmp_path):
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
    kept = Store(LocalStorage(tmp_path / "snapshots")).read_manifest(LONGER["train_iters"]).state["auto"]
    assert kept["flags"]["ckpt_policy"] == choice["ckpt_policy"]  # it holds for any number of nodes
    assert kept["measured"]["faults"] == 1  # a node that comes is none
    assert choice["iteration"] <= CHOSEN + 8
    assert {job.pids[rank] for rank in (0, 2, 3)} == {before[rank] for rank in (0, 2, 3)}
    assert {event["tier"] for event in job.events("resume")} == {"live"}
    assert [event["nodes"] for event in job.events("migration")] == [3, 4]


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses a node that is about to be taken in")
@pytest.mark.parametrize("zero", [False, True])
def test_joining_node_is_lost_during_state_transfer(data, tmp_path, zero):
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
def test_node_lost_while_joining_nodes_forward_experts(data, tmp_path, lost, zero):
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
def test_lost_experts_roll_back_to_newest_checkpoint(data, tmp_path):
    tight = dict(elastic_everywhere="0", elastic_slots=2, elastic_rebalance_interval=0)  # two nodes hold the same
    saved = dict(snapshot_interval=3, ckpt_blocking=True)
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **tight, **saved) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    assert "no worker that is left holds expert" in job.events("fallback")[-1]["reason"]
    assert job.events("resume")[-1]["tier"] == "storage"


@pytest.mark.parametrize("policy", [dict(ckpt_policy="pec", pec_k=1), *ALL * [dict(ckpt_policy="selective")]])
def test_only_lost_experts_are_restored_from_older_versions(data, tmp_path, policy):
    """The others keep the state of the last iteration, which nobody repeats; the ledger has each lost token."""
    tight = dict(elastic_everywhere="0", elastic_slots=2, elastic_rebalance_interval=0)  # two nodes hold the same
    saved = dict(snapshot_interval=1, ckpt_blocking=True, ckpt_keep=99) | policy
    saved |= dict(selective_experts=1) if policy["ckpt_policy"] == "selective" else {}
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **tight, **saved) as job:
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert [event["iteration"] for event in job.events("iteration")] == [*range(1, ITERATIONS + 1)]
    resumed, fallback = job.events("resume")[-1], job.events("fallback")[-1]
    store, at = Store(LocalStorage(tmp_path / "snapshots")), resumed["iteration"]
    before, after = (store.read_manifest(iteration) for iteration in (at, ITERATIONS))
    lost = Plan.from_json(before.state["elastic"]["0"]).lost_experts((0, 1))
    newest = {}
    for manifest in map(store.read_manifest, range(1, at + 1)):
        newest |= {name: manifest for name, entry in manifest.operators.items() if entry.detail == "full"}
    of_lost = {(layer, expert): newest[expert_operator(layer, expert)] for layer, expert in lost}
    stale = {one: manifest for one, manifest in of_lost.items() if manifest.iteration < at}
    assert fallback["experts"] == len(lost) > 0 and resumed["stale"] == len(stale) > 0
    assert len(job.events("storage_awaited")) == 1  # what is lost has to come from there
    ledger = after.state["ledger"]
    for number, layer in enumerate(ledger["layers"]):
        for expert, given in enumerate(ledger["given"][number]):
            tokens = given - ledger["learned"][number][expert]
            source = stale.get((layer, expert), before)
            of = (manifest.state["ledger"]["given"][number][expert] for manifest in (before, source))
            assert tokens == next(of) - next(of), (layer, expert)


@pytest.mark.parametrize("policy", [dict(ckpt_policy="pec", pec_k=1), dict(ckpt_policy="full")])
def test_second_node_is_lost_while_lost_experts_load(data, tmp_path, policy):
    """Six nodes have one slot each: nodes 0 and 1 have the only replicas of two experts."""
    tight = dict(elastic_everywhere="0", elastic_slots=1, elastic_min_replicas=1, elastic_rebalance_interval=0)
    saved = dict(snapshot_interval=1, ckpt_blocking=True, ckpt_keep=99) | policy
    faults = ["kill node=1 iteration=8", "kill node=0 iteration=0 point=loading"]
    with job_of(data, tmp_path, faults, least=4, candidates=3, layout="DP6", **tight, **saved) as job:
        job.is_lost(0)
        job.is_lost(1)
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert [event["point"] for event in job.events("inject")][-1] == "loading"
    assert job.events("generation")[0]["cause"] == "node-lost"
    assert [event["world_size"] for event in job.events("start")] == [6, 4]
    assert all(event["reason"].startswith("no worker that is left holds") for event in job.events("fallback"))
    assert job.events("resume")[-1]["wrong"] == []
    assert [event["iteration"] for event in job.events("iteration")] == [*range(1, ITERATIONS + 1)]
    is_exact = policy["ckpt_policy"] == "full"
    assert (job.events("resume")[-1]["stale"] == 0) == is_exact
    expected = [record["loss"] for record in known("DP6", data | FLAGS | tight).records]
    assert ([record[1] for record in job.records()] == pytest.approx(expected, abs=CLOSE)) == is_exact


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses shards")
def test_lost_shards_roll_back_to_newest_checkpoint(data, tmp_path):
    """All nodes have all experts, and two hold the same shard."""
    more = dict(elastic_slots=4, snapshot_interval=3, ckpt_blocking=True) | ZERO
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **more) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    reasons = [event["reason"] for event in job.events("fallback")]
    assert reasons == ["no worker that is left holds a shard of the optimizer's state"]
    assert job.events("resume")[-1]["tier"] == "storage"


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 loses all of a run")
def test_lost_experts_without_checkpoint_start_over(data, tmp_path):
    tight = dict(elastic_everywhere="0", elastic_slots=2, elastic_rebalance_interval=0)
    with job_of(data, tmp_path, ["kill node=2 iteration=8", "kill node=3 iteration=8"], **tight) as job:
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, again=True)
    assert sum(event["iteration"] == 1 for event in job.events("iteration")) == 2
    assert "was killed by signal" not in str([event["reason"] for event in job.events("generation")])
