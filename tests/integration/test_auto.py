"""A run that chooses its policy by itself, and goes on under it."""

import signal

import pytest

from moc.policy.interval import BLOCK, PROFILE_BLOCKS, WARM_UP
from tests.integration.snapshot_files import events, node_memory, start, stores, train
from tests.integration.tiny import FLAGS, known

SMALL = dict(global_batch_size=2, train_iters=60)
MEASURED = WARM_UP + BLOCK * PROFILE_BLOCKS
EXPERTS_TAKE_1_S = dict(bytes_per_s=12 * FLAGS["num_experts"] * 3 * 32 * 48)  # far longer than forward and backward


@pytest.fixture
def flags(data, tmp_path):
    """Of a run with ``--ckpt-policy auto``."""
    return data | SMALL | dict(ckpt_policy="auto", ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))


def killed_after(iteration: int, flags: dict, body: str, **how) -> dict:
    """Trains until everything is killed; what was chosen by then."""
    killed = start("EP2", flags, body, iteration=iteration, **how).wait()
    assert {result.exit for result in killed} == {-signal.SIGKILL}, killed[0].output[-4000:]
    (choice,) = events(flags, "choice")
    assert MEASURED < choice["iteration"] < iteration
    assert choice["reason"].startswith(choice["ckpt_policy"])
    return choice


@pytest.mark.recovery
def test_auto_policy_is_chosen_and_run_is_bit_identical(data, flags):
    with node_memory() as memory:
        flags |= dict(exact_only=True, ckpt_tier="memory", ckpt_memory_dir=memory)
        choice = killed_after(48, flags, "auto_bodies:die_after", policy="sparse")
        assert choice["ckpt_policy"] == "sparse" and events(flags, "resume")[0]["kept"] == 2
        resumed = train("EP2", flags | dict(exit_interval=52), "auto_bodies:train", policy="sparse")
        straight = known("EP2", data | SMALL)
        assert choice["iteration"] <= resumed.start <= 48  # of the switch, all is in storage
        assert resumed.records == straight.records[resumed.start : 52]
        newest = stores(flags)["storage"].read_manifest(52)
    assert newest.policy == "sparse" and newest.state["auto"]["measured"]["faults"] == 1
    assert len(events(flags, "choice")) == 1  # who went on has kept it


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("policy", "number", "limits"),
    [
        ("pec", "pec_k", {}),
        ("pec", "pec_k", dict(ckpt_policy="pec", pec_k="auto")),
        ("selective", "selective_experts", dict(selective_mlt_limit=1.0)),
    ],
)
def test_switch_to_inexact_policy_loses_nothing(policy, number, limits, data, flags):
    """Where both may lose that much, the one that is expected to lose less is chosen."""
    flags |= dict(mtbf_hours=0.01, pec_plt_limit=1.0) | limits
    choice = killed_after(44, flags, "pec_bodies:die_after_slow_copies", **EXPERTS_TAKE_1_S)
    assert choice["ckpt_policy"] == policy
    assert "selective_bytes" in choice or int(choice[number]) < FLAGS["num_experts"]
    resumed, straight = train("EP2", flags | dict(exit_interval=46)), known("EP2", data | SMALL)
    assert choice["iteration"] <= resumed.start  # or where pec has begun, with everything
    has_partial_snapshot = events(flags, "resume")[-1]["stale"] > 0  # taken after the first one, on a slow machine
    assert has_partial_snapshot or resumed.records == straight.records[resumed.start : 46]
    newest = stores(flags)["storage"].read_manifest(46)
    assert newest.policy == policy
    assert newest.state["ledger"]["iteration"] == 46 and min(newest.state["ledger"]["routed"]) == 46 * 2 * 2 * 16
