"""Every policy and tier under DeepSpeed's ZeRO-2: workers, a node and at last everything are killed, and it goes on."""

import pytest

from benchmarks.faults.run import End, damages, differences, end_of, mistakes
from benchmarks.live.job import Events
from moc.policy import AUTO, POLICIES
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.test_deepspeed import DP4_EP2, HARD, ZERO2
from tests.integration.test_peers import left_in, lose, memory_of
from tests.integration.tiny import train
from tests.shared import ALL

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
LAYOUT, MODEL = "EP4", HARD | DP4_EP2 | ZERO2 | dict(num_experts=8)
EACH = dict(snapshot_interval=1)
POLICY = {
    "full": EACH,
    "pec": EACH | dict(pec_k=2),
    "selective": EACH | dict(selective_experts=2),
    "sparse": dict(sparse_window=3),
    AUTO: {},
}
TIER = {
    "disk": {},
    "memory": dict(persist_interval=4),
    "peers": dict(persist_interval=4, replicas=1, max_snapshot_lag=1),
}
CASES = {
    f"{policy}, {tier}": flags | more | dict(ckpt_policy=policy, ckpt_tier=tier)
    for policy, flags in POLICY.items()
    for tier, more in TIER.items()
}
CASES["auto, memory"]["persist_interval"] = CASES["auto, peers"]["persist_interval"] = None  # it is chosen
FULL = dict(ckpt_policy="full", ckpt_tier="disk")
CASES |= {
    "Megatron-DeepSpeed": FULL | dict(ckpt_blocking=True, ckpt_sharding="baseline", snapshot_interval=3),
    "CheckFreq": FULL | dict(snapshot_interval="auto"),
    "Gemini": CASES["full, peers"] | dict(persist_interval=None),
}
AT_FIRST = ("selective, memory", "Gemini")
MEASURING = ("auto, disk", "auto, memory", "auto, peers", "CheckFreq")
MEASURES = 40  # iterations after which they take snapshots, and have chosen a policy


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """By its number of iterations, how a job ends to which nothing is done."""
    known: dict[int, End] = {}

    def end(iterations: int) -> End:
        if iterations not in known:
            files = tmp_path_factory.mktemp("undisturbed")
            places = dict(ckpt_dir=str(files / "snapshots"), log_dir=str(files))
            at_end = FULL | dict(snapshot_interval=iterations, train_iters=iterations)
            train(LAYOUT, data | MODEL | places | at_end)
            known[iterations] = end_of(files / "snapshots", iterations, Events(files / "events.jsonl"))
        return known[iterations]

    return end


@pytest.mark.parametrize("case", CASES if ALL else AT_FIRST)
def test_run_is_bit_identical_or_counts_lost_tokens(case, data, undisturbed, tmp_path):
    snapshots, nodes = CASES[case], 2 if "peers" in CASES[case]["ckpt_tier"] else 1
    start = MEASURES if case in MEASURING else 0
    faults = [f"kill rank=1 iteration={start + 5} point=forward_backward"]
    faults += [f"kill ranks=0,3 iteration={start + 9} point=after_commit"]
    iterations = start + 18
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory)
        flags = data | MODEL | snapshots | places | dict(train_iters=iterations, inject=faults)
        with Launched(LAYOUT, flags, tmp_path / "job", nodes=nodes) as job:
            job.reach(start + 12)
            if nodes > 1:
                lose(job, 1, memory_of(flags, "1"))
                job.start(1)
            job.reach(start + 14)
            for node in range(nodes):
                job.lose(node)
            for node in range(nodes):
                job.start(node)
            assert job.wait() == 0, job.console[-4000:]
        assert not left_in(flags)
    log = Events(job.log / "events.jsonl")
    (policy,) = {event["ckpt_policy"] for event in log.of("choice")} or {snapshots["ckpt_policy"]}
    ended, expected = end_of(tmp_path / "c", iterations, log), undisturbed(iterations)
    assert judged(policy, ended, expected, log) == damages(tmp_path / "c") == []
    assert len(log.of("inject")) == 3 and len(log.of("resume")) >= 2 + nodes
    assert {event["of"] for event in log.of("restore")} == ({"1"} if nodes > 1 else set())


def judged(policy: str, ended: End, expected: End, log: Events) -> list[str]:
    """In what a run has ended otherwise than it should."""
    return differences(ended, expected) if POLICIES[policy].is_exact else mistakes(ended, expected, log)
