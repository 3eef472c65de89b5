"""What is said before training of what a fault will cost."""

import pytest

from moc.policy import Every
from moc.policy.pec import Pec
from moc.state.shape import ModelShape, model_operators
from tests.unit.pretraining.flags import parse

TIERS = {
    "disk": "--pec-k 1",
    "memory alone": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier memory",
    "peers alone": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier peers",
    "memory and storage": "--pec-k-snapshot 4 --pec-k-persist 1 --ckpt-tier memory --persist-interval 50",
}


def told(flags: str, **settings) -> tuple[str, dict] | None:
    """Of 16 experts, with a snapshot in every tenth of 10,000 iterations."""
    snapshot = parse(f"--ckpt-policy pec --ckpt-dir x --snapshot-interval 10 {flags}").snapshot
    shape = ModelShape((1,), 8, 16, 8, 8, 4, 100, num_experts=16, expert_ffn_hidden_size=16)
    k, k_persist = snapshot.experts
    every = (snapshot.persist_interval or 10) // 10
    policy = Pec(model_operators(shape), Every(10), k, k_persist, persist_every=every, **settings)
    in_memory = snapshot.ckpt_tier != "disk"
    return policy.fault_cost(10_000, in_memory, in_storage=not in_memory or snapshot.persist_interval is not None)


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_expected_follows_from_the_flags(tier):
    text, fields = told(TIERS[tier])
    if tier == "disk":  # ages of 0 to 15 snapshots
        assert fields == {"plt": pytest.approx(75 / 10_000), "oldest": 150}
        assert "0.750%" in text and " 150 iterations" in text
        return
    assert fields["plt"] == pytest.approx(15 / 10_000) and fields["oldest"] == 30
    assert "0.150%" in text and " 30 iterations" in text
    if tier == "memory and storage":  # one expert of 16 in every fifth snapshot
        assert fields["plt_storage"] == pytest.approx(375 / 10_000) and fields["oldest_storage"] == 750
        assert "3.750%" in text and " 750 iterations" in text and "--persist-interval" not in text
    else:
        assert fields.keys() == {"plt", "oldest"} and "--persist-interval" in text


def test_nothing_is_said_of_what_load_decides():
    assert told(TIERS["disk"], selection="load_aware") is None
