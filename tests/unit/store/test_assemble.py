"""What would lack something is not published."""

from moc.state.operators import Operator
from moc.store.manifest import FileEntry, OperatorEntry, RankReport, assemble, merge_manifests
from tests.cases import each_row
from tests.errors import raises

EXPERT = Operator("layers.0.expert.1", "expert", 0, 1, parameters=10)
ROUTER = Operator("layers.0.router", "router", 0, None, parameters=4)
FULL = {"master": 5, "exp_avg": 5, "exp_avg_sq": 5}


def part(rank, **entries):
    named = {"expert": EXPERT.name, "router": ROUTER.name}
    return RankReport(f"rank_{rank}", FileEntry(4, 2, "aa"), {named[name]: entry for name, entry in entries.items()})


def full(**elements):
    return OperatorEntry("full", 7, {**FULL, **elements})


def made(parts, planned=(EXPERT,), writers=None):
    return assemble(parts, 20, "full", writers or len(parts), planned, {"world": 2}, {"scale": 1.0})


def test_complete_reports_form_manifest():
    manifest = made([part(0, expert=full()), part(1, expert=full())])
    assert (manifest.iteration, manifest.policy, manifest.writers) == (20, "full", 2)
    assert manifest.operators[EXPERT.name] == OperatorEntry("full", 7, dict.fromkeys(FULL, 10))
    assert manifest.is_complete and manifest.state == {"scale": 1.0} and manifest.layout == {"world": 2}


@each_row(
    "entry, lack",
    [
        (full(exp_avg=4), "1 of 10 exp_avg of layers.0.expert.1"),
        (full(master=0), "5 of 10 master of layers.0.expert.1"),
        (full(exp_avg_sq=6), "exp_avg_sq of layers.0.expert.1"),  # saved twice
    ],
)
def test_incomplete_operator_is_named(entry, lack):
    with raises("operator-incomplete", "iteration 20", lack):
        made([part(0, expert=full()), part(1, expert=entry)])


def test_unwritten_operator_is_named():
    with raises("operator-incomplete", "layers.0.router"):
        made([part(0, expert=full()), part(1, expert=full())], planned=(EXPERT, ROUTER))


def test_slot_missing_in_one_operator_is_named():
    router = OperatorEntry("full", 7, {"master": 4, "exp_avg": 4})
    whole = OperatorEntry("full", 7, dict.fromkeys(FULL, 10))
    with raises("operator-incomplete", "4 of 4 exp_avg_sq of layers.0.router"):
        made([part(0, expert=whole, router=router)], planned=(EXPERT, ROUTER))


def test_router_with_only_biases_is_incomplete():
    biases = OperatorEntry("full", 7, {"param": 2})
    with raises("operator-incomplete", "layers.0.router"):
        made([part(0, router=biases)], planned=(ROUTER,))
    whole = OperatorEntry("full", 7, {"param": 2, "master": 4, "momentum_buffer": 4})
    assert made([part(0, router=whole)], planned=(ROUTER,)).is_complete


def test_compute_weights_must_be_complete():
    assert made([part(0, expert=OperatorEntry("compute", None, {"param": 10}))]).is_complete
    with raises("operator-incomplete", "1 of 10 param of"):
        made([part(0, expert=OperatorEntry("compute", None, {"param": 9}))])


def test_manifest_of_one_node_lists_its_own_files():
    manifest = made([part(0, expert=full())], writers=2)
    assert not manifest.is_complete and list(manifest.files) == ["rank_0"]


def test_contradictory_ranks_are_refused():
    with raises("parts-contradictory"):
        made([part(0, expert=full()), part(1, expert=OperatorEntry("full", 8, FULL))])


def test_manifests_of_all_nodes_are_merged():
    parts = [part(rank, expert=full(), router=OperatorEntry("full", 7, dict.fromkeys(FULL, 1))) for rank in range(4)]
    nodes = [made(parts[:2], writers=4), made(parts[2:3], writers=4), made(parts[3:], writers=4)]
    whole = merge_manifests(nodes)
    assert whole == made(parts, planned=(ROUTER,))
    assert whole.is_complete and not merge_manifests(nodes[:2]).is_complete
    assert merge_manifests([whole]) == whole
    other = made([part(3, expert=OperatorEntry("full", 8, FULL))], writers=4)
    with raises("parts-contradictory", "layers.0.expert.1"):
        merge_manifests([*nodes[:2], other])
