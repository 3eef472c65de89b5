"""Who may keep copies for whom: what is refused, and what is said, before anything is copied."""

from moc.errors import codes_in
from moc.policy import Every
from moc.policy.interface import Full
from moc.recovery.copy_placement import Redundancy, place_copies, validate_replicas
from moc.runtime import environment
from moc.runtime.replica_transfer import CopyResult
from moc.session.helpers import RetentionClient
from moc.session.peers import Peers, join_peers
from moc.session.settings import Settings
from moc.session.tiers import Tiers
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.cases import each_row
from tests.errors import raises

FULL = Full([], Every(1))
PEERS = Settings("nowhere", 1, tier="peers")


class Said:
    """A log of one line."""

    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def tiers(*nodes):
    return Tiers(None, None, nodes, True, (0,), None, 2)


def test_default_number_of_copies_is_other_nodes_up_to_two():
    assert [validate_replicas(None, nodes) for nodes in (1, 2, 3, 4, 9)] == [0, 1, 2, 2, 2]
    assert validate_replicas(3, 4) == 3
    with raises("too-many-replicas", "--replicas 4"):
        validate_replicas(4, 4)
    with raises("too-many-replicas", "--replicas 1"):
        validate_replicas(1, 1)


@each_row(("fewest", "most"), [(1, 0), (2, 1), (4, 3)])
def test_replicas_impossible_at_min_nodes_are_refused(fewest, most):
    assert validate_replicas(None, 6, fewest) == 2
    with raises("too-many-replicas", f"--replicas {most + 1}", f"--nnodes {fewest}:", f"MIN to {most + 2}"):
        validate_replicas(most + 1, 6, fewest)
    assert validate_replicas(most + 1, 6, most + 2) == most + 1  # as the remedy says
    if most:
        assert validate_replicas(most, 6, fewest) == most


def test_peers_under_torchrun_are_refused(monkeypatch):
    monkeypatch.delenv(environment.REPLICA_SERVER, raising=False)
    with raises("launcher-missing", "--ckpt-tier peers", "python -m moc.launch"):
        join_peers(PEERS, tiers("0", "1"), FULL, Redundancy(), RetentionClient(), Said(), is_restart=False)


def test_diverged_or_damaged_worker_is_named_with_remedy(tmp_path):
    store = Store(LocalStorage(tmp_path, in_memory=True))
    peers = Peers(
        Tiers(store, store, ("0", "1"), True, (0,), None, 2),
        FULL,
        ["0", "1"],
        place_copies(2, 1),
        None,
        RetentionClient(),
    )
    names = [f"layers.{number}.attention" for number in range(5)]
    diverged, damaged = peers._replica_problems("1", 7, CopyResult(differs=names, damaged=["output"]))
    assert [*codes_in(diverged), *codes_in(damaged)] == ["replicas-differ", "memory-damaged"]
    assert all(part in diverged for part in ("nodes 1 and 0", ", ".join(names[:3]), "2 more", "iteration 7"))
    assert all(part in damaged for part in ("node 0", "output", "iteration 7"))
    assert not peers._replica_problems("1", 7, CopyResult(10, 20))
    peers.close()


def test_single_node_without_peers_is_reported_once(monkeypatch):
    monkeypatch.setenv(environment.REPLICA_SERVER, "unix:nowhere")
    said = Said()
    for again in (False, True):
        assert join_peers(PEERS, tiers("0", "0"), FULL, Redundancy(), RetentionClient(), said, again) is None
    (line,) = said.lines
    assert "--ckpt-tier peers" in line and "--ckpt-dir" in line
