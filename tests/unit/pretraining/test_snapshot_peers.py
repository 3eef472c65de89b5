"""Who may keep copies for whom: what is refused, and what is said, before anything is copied."""

from megatron.pretraining.process import cpu

cpu.install()

import pytest  # noqa: E402

from megatron.pretraining.config import ConfigError, compose  # noqa: E402
from megatron.pretraining.session.peers import copies_wanted, join_peers  # noqa: E402
from megatron.pretraining.session.tiers import Tiers  # noqa: E402
from moc.policy import Every  # noqa: E402
from moc.policy.full import Full  # noqa: E402
from moc.runtime import environment  # noqa: E402

FULL = Full([], Every(1))
PEERS = dict(ckpt_policy="full", ckpt_tier="peers", save="nowhere")


class Said:
    """A log of one line."""

    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def config(**flags):
    model = dict(num_layers=2, hidden_size=8, num_attention_heads=2, max_position_embeddings=8, seq_length=8)
    training = dict(micro_batch_size=1, train_iters=1, lr=1.0, mock_data=True, tokenizer_type="NullTokenizer")
    return compose(model | training | dict(vocab_size=10) | flags)


def tiers(*nodes):
    return Tiers(None, None, nodes, True, (0,), None, 2)


def test_as_many_copies_as_there_are_other_nodes_up_to_two():
    assert [copies_wanted(None, nodes) for nodes in (1, 2, 3, 4, 9)] == [0, 1, 2, 2, 2]
    assert copies_wanted(3, 4) == 3
    with pytest.raises(ConfigError, match="--replicas 4 is more than the 3 other nodes"):
        copies_wanted(4, 4)
    with pytest.raises(ConfigError, match="--replicas 1 is more than the 0 other nodes"):
        copies_wanted(1, 1)


def test_another_tier_has_no_peers():
    assert join_peers(config(**PEERS | dict(ckpt_tier="memory")), tiers("0", "1"), FULL, Said(), again=False) is None


def test_torchrun_has_nothing_that_keeps_copies(monkeypatch):
    monkeypatch.delenv(environment.KEEPER, raising=False)
    with pytest.raises(ConfigError, match="python -m moc.launch"):
        join_peers(config(**PEERS), tiers("0", "1"), FULL, Said(), again=False)


def test_one_node_has_no_peers_and_that_is_said_once(monkeypatch):
    monkeypatch.setenv(environment.KEEPER, "unix:nowhere")
    said = Said()
    for again in (False, True):
        assert join_peers(config(**PEERS), tiers("0", "0"), FULL, said, again) is None
    (line,) = said.lines
    assert "with one node there are no peers" in line and "--ckpt-dir" in line


@pytest.mark.parametrize("flag", [dict(replicas=1), dict(replication_rate=0.5)], ids=str)
def test_its_flags_need_it(flag):
    config(**PEERS | flag)
    with pytest.raises(ConfigError, match="needs --ckpt-tier peers"):
        config(**PEERS | flag | dict(ckpt_tier="memory"))
