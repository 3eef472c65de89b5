"""What the memory of several nodes holds together."""

from moc.recovery.inventory import Summary, in_memory, in_storage, list_checkpoints, merge_complete
from moc.recovery.sources import BEFORE, MEMORY, STORAGE, AvailableCheckpoint
from moc.state.operators import Operator
from moc.store.manifest import FileEntry, Manifest, OperatorEntry
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.unit.recovery.test_carrying import in_full, save

OPERATORS = [Operator("output", "output", None, None, 10), Operator("layers.0.router", "router", 0, None, 6)]


def node(files, **operators):
    return [Summary(3, 3, files, operators)]


def full(elements):
    return "full", {"master": elements, "exp_avg": elements}


def test_all_parts_together_are_complete():
    nodes = [node(1, output=("compute", {"param": 4})), node(2, output=("compute", {"param": 6}))]
    assert in_memory(nodes, OPERATORS) == [AvailableCheckpoint(3, MEMORY, {"output": "compute"})]
    assert in_memory(nodes[:1], OPERATORS) == [AvailableCheckpoint(3, MEMORY, {})]


def test_operator_without_state_on_lost_node_is_complete():
    (one,) = in_memory([node(1, output=("compute", {"param": 10}), **{"layers.0.router": full(6)})], OPERATORS)
    assert one.operators == {"output": "compute", "layers.0.router": "full"}
    (one,) = in_memory([node(1, output=full(9), **{"layers.0.router": ("compute", {"param": 5})})], OPERATORS)
    assert one.operators == {}


def test_router_biases_do_not_count_as_parameters():
    (one,) = in_memory([node(1, **{"layers.0.router": ("compute", {"param": 6 + 4})})], OPERATORS)
    assert one.operators == {"layers.0.router": "compute"}
    (one,) = in_memory([node(1, **{"layers.0.router": ("full", {"param": 6})})], OPERATORS)
    assert one.operators == {}


def test_manifest_summary_and_unreadable_manifest(tmp_path):
    store = Store(LocalStorage(tmp_path))
    for iteration in (3, 4):
        save(store, iteration, in_full(0))
    elements = {"master": 128, "exp_avg": 128}
    expected = Summary(3, 2, 2, {name: ("full", elements) for name in in_full(0)}, "", "pec")
    (tmp_path / checkpoint_name(4) / "manifest.json").write_text("{")
    summaries, (problem,) = list_checkpoints(store)
    assert summaries == [expected] and problem.startswith(f"{tmp_path}/iter_0000004/manifest.json is damaged")
    (held,) = in_storage(summaries)
    assert held == AvailableCheckpoint(3, STORAGE, dict.fromkeys(in_full(0), "full")) and held.policy == "pec"


def test_launch_with_most_state_counts():
    def part(files, job, **operators):
        return [Summary(3, 3, files, operators, job, job)]

    nodes = [part(1, "a", output=full(10)), part(1, "b", output=full(5)), part(1, "b", output=full(4))]
    assert [(one.operators, one.policy) for one in in_memory(nodes, OPERATORS)] == [({}, "b")]
    assert [one.policy for one in in_memory(reversed(nodes), OPERATORS)] == ["b"]
    assert [one.policy for one in in_memory(nodes[:2], OPERATORS)] == ["a"]  # of two with as much, the first


def test_superseded_memory_provides_only_experts():
    expert = Operator("layers.0.expert.0", "expert", 0, 0, 4)
    nodes = [node(3, output=full(10), **{expert.name: full(4)})]
    assert in_memory(nodes, [*OPERATORS, expert], BEFORE) == [AvailableCheckpoint(3, BEFORE, {expert.name: "full"})]
    assert in_memory(nodes, [*OPERATORS, expert])[0].operators == {"output": "full", expert.name: "full"}


def test_operator_partly_on_lost_node_is_excluded():
    def part(rank, **elements):
        entries = {name: OperatorEntry("full", 3, {"master": number}) for name, number in elements.items()}
        return Manifest(3, "pec", 3, {f"rank_{rank:05d}.safetensors": FileEntry(9, 8, "")}, entries, {}, {})

    lost = [part(0, output=5, **{"layers.0.router": 4}), part(1, output=5)]
    assert merge_complete(OPERATORS, lost).operators == {"output": OperatorEntry("full", 3, {"master": 10})}
    assert merge_complete(OPERATORS, [*lost, part(2, **{"layers.0.router": 2})]).operators.keys() == {
        "output",
        "layers.0.router",
    }


def test_identical_replicas_are_complete_on_each_node():
    """Each node resumes from its own memory."""
    alike = {"output": 2}
    parts = [[Summary(3, 4, 1, {"output": full(10)}, replica_counts=alike)] for _ in range(2)]
    assert [one.operators for one in in_memory(parts, OPERATORS)] == [{"output": "full"}]
    assert [one.operators for one in in_memory(parts[:1], OPERATORS)] == [{}]
    (part,) = parts[0]
    assert part.shares("output", 10) and not part._replace(replica_counts={}).shares("output", 10)
