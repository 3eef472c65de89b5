"""A job is killed, and goes on with another policy, on either tier; or it says in one sentence what to do."""

from pathlib import Path

import pytest

from benchmarks.live.job import Events
from moc.errors import codes_in
from moc.policy import POLICIES
from tests.errors import only_code
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory, start, stores
from tests.integration.test_pec import SMALL, kill_at
from tests.integration.tiny import train
from tests.shared import ALL

SETTINGS = {
    "full": dict(snapshot_interval=1),
    "pec": dict(snapshot_interval=1, pec_k=1),
    "sparse": dict(sparse_window=2),
}
OTHER = {"disk": "memory", "memory": "disk"}
CHANGES = [  # every one; each policy is the old and the new one on both tiers
    *[("full", "pec", "disk"), ("pec", "sparse", "disk"), ("sparse", "full", "disk")],
    *[("pec", "full", "memory"), ("sparse", "pec", "memory"), ("full", "sparse", "memory")],
]


def flags_of(policy, tier, tmp_path, memory):
    flags = SMALL | SETTINGS[policy] | dict(ckpt_policy=policy, ckpt_tier=tier, ckpt_dir=str(tmp_path / "c"))
    in_memory = {} if tier == "disk" else dict(ckpt_memory_dir=memory, persist_interval=4)
    return flags | in_memory | dict(log_dir=str(tmp_path / "log"))


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("old", "new", "tier"),
    [*CHANGES, *ALL * [(old, new, OTHER[tier]) for old, new, tier in CHANGES]],
    ids=str,
)
def test_killed_job_resumes_with_other_policy_or_names_remedy(old, new, tier, data, tmp_path):
    with node_memory() as memory:
        before, after = (data | flags_of(policy, tier, tmp_path, memory) for policy in (old, new))
        kill_at("1", before, iteration=12)
        at = max(iteration for store in stores(before).values() for iteration in store.iterations())
        if not POLICIES[old].is_exact and POLICIES[new].is_exact:
            (result,) = start("1", after).wait()
            (said,) = (line for line in result.output.splitlines() if "pretrain_gpt_moe.py: error" in line)
            assert result.exit == 1 and "Traceback" not in result.output
            assert only_code(said) == "policy-change-refused" and f"--ckpt-policy {old}" in said, said
            assert set(train("1", before | dict(exit_interval=at + 2)).codes) == {0}  # as it says
            assert train("1", after | dict(exit_interval=at + 4)).start == at + 2
            return
        kill_at("1", after, iteration=at + 10)  # it persists some, and goes on from its own
        told = Events(tmp_path / "log" / "events.jsonl")
        (resumed,) = told.of("resume")
        assert at - 2 <= resumed["iteration"] <= at
        if new == "pec":  # its first one is of everything: what others have saved tells nothing of tokens
            first, *others = (one["bytes"] for one in told.of("snapshot") if one["time"] > resumed["time"])
            assert first > 1.5 * max(others)
        rest = train("1", after | dict(exit_interval=at + 14))
        assert set(rest.codes) == {0} and at < rest.start <= at + 14
        assert stores(after)["storage"].iterations()[-1] == at + 14


@pytest.mark.recovery
@pytest.mark.parametrize(("old", "new"), [("full", "pec"), ("pec", "full")], ids=lambda policy: policy)
def test_policy_changes_after_kill_with_peer_copies(old, new, data, tmp_path):
    """All processes of both nodes are killed, and their memory stays."""
    with node_memory() as memory:
        before, after = (data | flags_of(policy, "peers", tmp_path, memory) for policy in (old, new))
        with Launched("EP2", before, tmp_path / "killed", nodes=2) as job:
            job.reach(12)
            newest = max(one["iteration"] for one in job.events("snapshot"))  # not of 12 if copies are slow
            for node in (0, 1):
                job.lose(node)
        if POLICIES[new].is_exact:
            with Launched("EP2", after, tmp_path / "refused", nodes=2) as job:
                assert job.wait() == 1 and not job.events("iteration")
                assert "policy-change-refused" in codes_in(job.console)
            assert ended(before, tmp_path / "in order", 20) >= newest  # as it says
        at = ended(after, tmp_path / "changed", 24)
        assert at == 20 if POLICIES[new].is_exact else at >= newest


def ended(flags, directory, iteration):
    """Where a run that ended in good order at an iteration had gone on."""
    with Launched("EP2", flags | dict(exit_interval=iteration), directory, nodes=2) as job:
        assert job.wait() == 0, job.console[-4000:]
        return job.events("resume")[0]["iteration"]


@pytest.mark.recovery
def test_exact_policy_does_not_use_partial_snapshots(data, tmp_path):
    """The first one of everything still is there, when few were taken after it."""
    flags = data | SMALL | dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"), snapshot_interval=1)
    kill_at("1", flags | dict(ckpt_policy="pec", ckpt_keep=50, ckpt_blocking=True), iteration=4)
    assert 1 in stores(flags)["storage"].iterations()
    (result,) = start("1", flags | dict(ckpt_policy="full")).wait()
    assert result.exit == 1 and "policy-change-refused" in codes_in(result.output)
    assert train("1", flags | dict(ckpt_policy="full", ckpt_step=1, exit_interval=2)).start == 1  # if it is meant
    assert Path(flags["ckpt_dir"]).is_dir()


def test_expected_fault_cost_is_printed_before_training(data, tmp_path):
    with node_memory() as memory:
        flags = (
            data
            | flags_of("pec", "memory", tmp_path, memory)
            | dict(persist_interval=None, exit_interval=1, num_experts=8)
        )
        said = start("1", flags).wait()[0].output
        (line,) = (line for line in said.splitlines() if "with experts equally busy" in line)
        assert "3.500% of the tokens" in line and "7 iterations behind" in line and "add --persist-interval" in line
        (event,) = Events(tmp_path / "log" / "events.jsonl").of("expected")
        assert event["plt"] == pytest.approx(0.035) and event["oldest"] == 7
