"""What nodes hold alike, and what a manifest says of it."""

from moc.recovery.copy_placement import Redundancy, redundancy
from moc.recovery.inventory import summary
from moc.store.manifest import Manifest, OperatorEntry, replicas_entry


def test_stages_are_joined_and_manifest_lists_operators():
    stages = [{("a", "b"): {"embedding": 60, "layers.0.expert.0": 5}, ("a", "b", "c"): {"layers.0.router": 7}}, {}]
    found = redundancy([*stages, {("a", "b"): {"output": 40}}])
    assert found.nbytes == {("a", "b"): 105, ("a", "b", "c"): 7}
    assert found.copies == {"embedding": 2, "layers.0.expert.0": 2, "layers.0.router": 3, "output": 2}
    state = replicas_entry(["layers.0.router", "output", "layers.1.router"], found.copies)
    entries = dict.fromkeys(["layers.0.router", "output", "layers.1.router"], OperatorEntry("full", 1, {"master": 4}))
    manifest = Manifest(3, "full", 4, {}, entries, state=state)
    assert Manifest.from_json(manifest.to_json(), "it").replica_counts == summary(manifest).replica_counts == {
        "layers.0.router": 3, "output": 2
    }  # fmt: skip


def test_no_replicas_entry_without_identical_replicas():
    assert redundancy([{}, {}]) == Redundancy() and replicas_entry(["output"], {}) == {}
