"""Settings and engines that are refused before anything is created."""

from types import SimpleNamespace

import pytest

from moc.errors import code_of
from moc.policy import POLICIES
from moc.policy.sparse import Sparse
from moc.runtime import environment
from moc.session import session
from moc.session.engine import Engine
from moc.session.session import Session, make_policy
from moc.session.settings import Settings, SettingsError
from moc.state.operators import Operator
from tests.cases import each_row
from tests.errors import raises


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
    (dict(directory="", policy="full"), "setting-invalid", ["Settings.directory"]),
    (dict(tier="ram"), "setting-invalid", ["Settings.tier", "'ram'", "disk, memory, peers"]),
    (dict(snapshot_interval=0), None, ["Settings.snapshot_interval", "0"]),
    (dict(snapshot_interval="often"), None, ["Settings.snapshot_interval", "often"]),
    (dict(snapshot_interval="auto", overhead_budget=0), None, ["Settings.snapshot_interval", "0"]),
    (dict(sharding="EEE"), None, ["Settings.sharding", "'EEE'"]),
    (dict(node_of_rank="a,../b"), "node-names-invalid", ["Settings.node_of_rank", "a,../b"]),
    (dict(keep=0), "setting-invalid", ["Settings.keep"]),
    (dict(max_snapshot_lag=0), "setting-invalid", ["Settings.max_snapshot_lag"]),
    (dict(tier="memory", persist_interval=0), "setting-invalid", ["Settings.persist_interval"]),
    (dict(tier="peers", replicas=0), "setting-invalid", ["Settings.replicas"]),
    (dict(tier="peers", replication_rate=0), "setting-invalid", ["Settings.replication_rate"]),
    (dict(persist_interval=1), "setting-without-effect", ["Settings.persist_interval", "'disk'", "memory or peers"]),
    (dict(tier="memory", replicas=1), "setting-without-effect", ["Settings.replicas", "'memory'", "peers"]),
    (dict(replication_rate=1), "setting-without-effect", ["Settings.replication_rate", "'disk'", "peers"]),
]
"""Settings, the code of the error, None for that of another package, and what it names."""


@each_row(("given", "code", "named"), REFUSED, ids=str)
def test_invalid_settings_are_named(given, code, named):
    with pytest.raises(SettingsError) as refused:
        Settings(**{"directory": "x", "train_iters": 1} | given)
    assert code is None or code_of(refused.value) == code
    assert all(name in str(refused.value) for name in named)


def test_settings_allowed_by_flags_are_accepted():
    assert Settings("", 1).policy is None  # no snapshots need no directory
    assert Settings("x", 1, "full", snapshot_interval=7).snapshot_interval == "7"
    Settings(
        "x", 1, "auto", "auto", tier="peers", node_of_rank="0,a1", replicas=1, replication_rate=0.5, persist_interval=1
    )


@each_row("engine", [Bare, Inherits])
@each_row("policy", ["pec", "selective"])
def test_counting_policies_require_counting_engine(policy, engine):
    with raises("engine-incomplete", f"--ckpt-policy {policy}", "router_tally", engine.__name__):
        make_policy(Settings("x", 1, policy), engine())
    assert make_policy(Settings("x", 1, policy), Counts()).name == policy
    assert make_policy(Settings("x", 1, "full"), engine()).name == "full"


def test_replaying_policies_require_replaying_engine(monkeypatch):
    frozen = []
    monkeypatch.setattr(session, "check_freezing", frozen.append)
    with raises("engine-incomplete", "--ckpt-policy sparse", "replay"):
        make_policy(Settings("x", 1, "sparse"), Counts())
    assert frozen == [None] and POLICIES[Sparse.name].can_replay


def test_unknown_policy_options_are_named():
    with raises("policy-option-unknown", "--ckpt-policy full", "'window'"):
        make_policy(Settings("x", 1, "full", options={"window": 3}), Bare())


@each_row(
    ("given", "named"),
    [
        (dict(policy="auto"), "--ckpt-policy auto"),
        (dict(policy="nothing"), "--ckpt-policy nothing"),
        (dict(policy="pec"), "router_tally"),
        (dict(node_of_rank="0,1"), "--node-of-rank"),
        (dict(tier="peers"), "--ckpt-tier peers"),
    ],
    ids=str,
)
def test_refused_settings_create_no_files(given, named, tmp_path, monkeypatch):
    monkeypatch.delenv(environment.REPLICA_SERVER, raising=False)
    monkeypatch.setattr("moc.session.tiers.gather", lambda mine: [mine])  # as in a world of one
    monkeypatch.setattr("moc.session.tiers.run_on_rank0", lambda work, _: work())
    places = dict(directory=str(tmp_path / "snapshots"), memory_dir=str(tmp_path / "memory"))
    settings = Settings(**places, **{"train_iters": 1, "policy": "full", "tier": "memory", "node_of_rank": "0"} | given)
    with pytest.raises(SettingsError, match=named):
        Session(Bare(), settings, SimpleNamespace(message=print)).resume()
    assert not list(tmp_path.iterdir())
