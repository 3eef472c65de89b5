"""Settings and engines that are refused before anything is created."""

from types import SimpleNamespace

import pytest

from moc.policy.sparse import Sparse
from moc.runtime import environment
from moc.session import session
from moc.session.engine import Engine
from moc.session.session import Session, make_policy
from moc.session.settings import Settings, SettingsError
from moc.state.operators import Operator


class Bare:
    """An engine that neither counts tokens nor replays."""

    world = SimpleNamespace(rank=0, size=1)
    operators = (Operator("layers.0.expert.0", "expert", 0, 0, 1),)
    state = None


class Inherits(Bare, Engine):
    """Has only the protocol's own methods, which return nothing."""


class Counts(Bare):
    """Counts tokens, and cannot replay."""

    def router_tally(self, layers, with_probabilities): ...


REFUSED = [
    (dict(directory="", policy="full"), "Settings.directory is empty: name"),
    (dict(tier="ram"), "Settings.tier is 'ram': choose one of disk, memory, peers"),
    (dict(interval=0), "Settings.interval: a snapshot every 0 iterations is not possible"),
    (dict(interval="often"), "Settings.interval: an interval is auto or a number of iterations, not often"),
    (dict(interval="auto", overhead_budget=0), "Settings.interval: an overhead budget of 0"),
    (dict(sharding="EEE"), "Settings.sharding: there is no sharding scheme 'EEE': choose"),
    (dict(nodes="a,../b"), "Settings.nodes: nodes are called by letters and digits"),
    (dict(keep=0), "Settings.keep is 0: take at least 1"),
    (dict(most_behind=0), "Settings.most_behind is 0: take at least 1"),
    (dict(tier="memory", persist_interval=0), "Settings.persist_interval is 0: take at least 1"),
    (dict(tier="peers", replicas=0), "Settings.replicas is 0: take at least 1"),
    (dict(tier="peers", replication_rate=0), "Settings.replication_rate is 0: take more than 0"),
    (dict(persist_interval=1), "Settings.persist_interval has no effect with tier 'disk': .* memory or peers"),
    (dict(tier="memory", replicas=1), "Settings.replicas has no effect with tier 'memory': .* peers"),
    (dict(replication_rate=1), "Settings.replication_rate has no effect with tier 'disk': .* peers"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=str)
def test_settings_that_are_wrong_are_named(given, said):
    with pytest.raises(SettingsError, match=rf"^{said}.*\.$"):
        Settings(**{"directory": "x", "train_iters": 1} | given)


def test_what_flags_allow_is_allowed():
    assert Settings("", 1).policy is None  # no snapshots need no directory
    assert Settings("x", 1, "full", interval=7).interval == "7"
    Settings("x", 1, "auto", "auto", tier="peers", nodes="0,a1", replicas=1, replication_rate=0.5, persist_interval=1)


@pytest.mark.parametrize("engine", [Bare, Inherits])
@pytest.mark.parametrize("policy", ["pec", "selective"])
def test_counting_policies_need_an_engine_that_counts(policy, engine):
    said = rf"^--ckpt-policy {policy} needs router_tally, .* add it to {engine.__name__}, or choose .* full\.$"
    with pytest.raises(SettingsError, match=said):
        make_policy(Settings("x", 1, policy), engine())
    assert make_policy(Settings("x", 1, policy), Counts()).name == policy
    assert make_policy(Settings("x", 1, "full"), engine()).name == "full"


def test_replaying_policies_need_an_engine_that_replays(monkeypatch):
    frozen = []
    monkeypatch.setattr(session, "check_freezing", frozen.append)
    with pytest.raises(SettingsError, match=r"^--ckpt-policy sparse needs replay, which .* such as full\.$"):
        make_policy(Settings("x", 1, "sparse"), Counts())
    assert frozen == [None] and Sparse.replays


def test_options_that_a_policy_does_not_have_are_named():
    with pytest.raises(SettingsError, match="^--ckpt-policy full: .* 'window'"):
        make_policy(Settings("x", 1, "full", options={"window": 3}), Bare())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(policy="auto"), "--ckpt-policy auto needs a chooser"),
        (dict(policy="nothing"), "there is no policy called nothing"),
        (dict(policy="pec"), "needs router_tally"),
        (dict(nodes="0,1"), "--node-of-rank names the nodes of 2 workers, but there are 1"),
        (dict(tier="peers"), "needs a replica server"),
    ],
    ids=str,
)
def test_a_refusal_creates_nothing(given, said, tmp_path, monkeypatch):
    monkeypatch.delenv(environment.REPLICA_SERVER, raising=False)
    monkeypatch.setattr("moc.session.claims.gather", lambda mine: [mine])  # as in a world of one
    monkeypatch.setattr("moc.session.claims.run_on_rank0", lambda work, _: work())
    places = dict(directory=str(tmp_path / "snapshots"), memory_directory=str(tmp_path / "memory"))
    settings = Settings(**places, **{"train_iters": 1, "policy": "full", "tier": "memory", "nodes": "0"} | given)
    with pytest.raises(SettingsError, match=said):
        Session(Bare(), settings, SimpleNamespace(message=print)).resume()
    assert not list(tmp_path.iterdir())
