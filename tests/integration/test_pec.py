"""Partial experts checkpoints in training: what they hold, how large they are, and what comes back from where."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.live.job import Events
from benchmarks.papers.equations import TARGETS, pec_size
from moc.sharding import StateBytes
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.host_memory import find_memory_storage
from tests.integration.snapshot_files import node_memory, start
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS, train
from tests.worlds import run_world, start_world

EXPERTS, LAYERS = 8, FLAGS["num_layers"]  # enough for levels of 1, 4 and all
PEC = dict(num_experts=EXPERTS, ckpt_policy="pec", snapshot_interval=1, train_iters=1000)
SMALL = dict(ffn_hidden_size=96, global_batch_size=2, train_iters=100)


def kill_when(layout: str, flags: dict, condition: Callable[[], bool]) -> None:
    """Trains, and kills all workers at once when a condition holds."""
    size, parallel = LAYOUTS[layout]
    world = start_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags)
    wait_for(lambda: condition() or world.ended())
    world.kill()
    assert {result.exit for result in world.wait()} == {-9}


def kill_at(layout: str, flags: dict, iteration: int) -> None:
    """Trains, and kills all workers at once after an iteration."""
    log = Path(flags["log_dir"])
    kill_when(
        layout, flags, lambda: any(e["iteration"] >= iteration for e in Events(log / "events.jsonl").of("iteration"))
    )


def loaded(layout: str, flags: dict) -> tuple[int, dict[str, str]]:
    """Where a run would go on, and the hash of every fragment that it has then."""
    size, parallel = LAYOUTS[layout]
    told = run_world(size, "tests.integration.pec_bodies:loaded", flags=FLAGS | parallel | flags)
    hashes = {name: digest for worker in told for name, digest in worker["hashes"].items()}
    return told[0]["start"], hashes


def saved(store: Store) -> dict[str, dict[int, str]]:
    """By fragment, its hash in each checkpoint that has it."""
    found: dict[str, dict[int, str]] = {}
    for iteration in store.iterations():
        files = Path(store.storage.name) / checkpoint_name(iteration)
        for source in ShardReader(sorted(files.glob("*.safetensors"))).sources():
            entry = source.box
            key = f"{entry.name} {entry.slot} {entry.region.offset} {entry.region.shape}"
            found.setdefault(key, {})[iteration] = source.digest
    return found


def experts_in(store: Store, iteration: int) -> dict[int, list[int]]:
    """By layer, the experts that a checkpoint has."""
    found: dict[int, list[int]] = {}
    for name in store.read_manifest(iteration).operators:
        if ".expert." in name:
            _, layer, _, expert = name.split(".")
            found.setdefault(int(layer), []).append(int(expert))
    return {layer: sorted(experts) for layer, experts in found.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_partial_snapshot_size_matches_equation_6(target, data, tmp_path):
    flags = dict(pec_k=2, pec_target=target, ckpt_dir=str(tmp_path / "c"), ckpt_keep=9, exit_interval=3)
    assert set(train("EP2", data | PEC | flags).codes) == {0}
    store = Store(LocalStorage(tmp_path / "c"))
    for iteration, k in ((1, EXPERTS), (2, 2), (3, EXPERTS)):  # the first one, and an orderly end, save everything
        operators = store.read_manifest(iteration).operators
        full = [name for name, entry in operators.items() if ".expert." in name and entry.detail == "full"]
        assert len(full) == LAYERS * k
    full, partial = (
        sum(f.bytes - f.header_bytes for f in store.read_manifest(iteration).files.values()) for iteration in (1, 2)
    )
    parameters = {name: entry.elements["master"] for name, entry in store.read_manifest(1).operators.items()}
    experts = sum(n for name, n in parameters.items() if ".expert." in name)
    others, state = sum(parameters.values()) - experts, StateBytes(weights=4, master=0)  # as Format v1 saves them
    assert full == pec_size(others, experts, EXPERTS, EXPERTS, state)
    assert partial == pytest.approx(pec_size(others, experts, 2, EXPERTS, state, target), rel=0.01)


@pytest.mark.recovery
def test_every_tensor_chunk_is_restored_in_newest_version(data, tmp_path):
    log = tmp_path / "log"
    flags = data | PEC | dict(pec_k=1, ckpt_dir=str(tmp_path / "c"), log_dir=str(log))
    kill_at("EP2", flags, iteration=6)
    versions = saved(Store(LocalStorage(tmp_path / "c")))
    newest = max(iteration for versions_of_one in versions.values() for iteration in versions_of_one)
    start, hashes = loaded("EP2", flags)
    assert start == newest
    assert hashes == {fragment: found[max(found)] for fragment, found in versions.items()}
    assert {max(found) for fragment, found in versions.items() if ".experts." not in fragment} == {newest}
    assert len({max(found) for found in versions.values()}) > 2
    lost = Events(log / "events.jsonl").of("lost")[-1]
    assert 0 < lost["plt"] < 1 and lost["plt"] == pytest.approx(lost["raised_by"])


@pytest.mark.recovery
def test_storage_has_one_expert_and_recovery_uses_memory(data, tmp_path):
    log, storage = tmp_path / "log", Store(LocalStorage(tmp_path / "c"))
    with node_memory() as memory:
        flags = data | PEC | dict(pec_k_snapshot=4, pec_k_persist=1, ckpt_tier="memory", persist_interval=2)
        flags |= dict(ckpt_memory_dir=str(memory), ckpt_dir=str(tmp_path / "c"), log_dir=str(log))
        kill_when("EP2", flags, lambda: len(storage.iterations()) > 1)
        first, *others = storage.iterations()
        assert len(experts_in(storage, first)[0]) == EXPERTS
        assert {len(experts_in(storage, iteration)[0]) for iteration in others} == {1}
        assert set(train("EP2", flags | dict(exit_interval=8)).codes) == {0}
    from_memory, plt = Events(log / "events.jsonl").of("resume")[-1], Events(log / "events.jsonl").of("lost")[-1]["plt"]
    assert from_memory["tier"] == "memory" and from_memory["sources"][0] == [from_memory["iteration"], "memory"]
    assert len(from_memory["sources"]) > 1 and 0 < plt < 1
    assert experts_in(storage, max(storage.iterations()))[0] == list(range(EXPERTS))


@pytest.mark.recovery
@pytest.mark.parametrize("target", ["both", "weights"])
def test_stored_snapshot_of_identical_replicas_is_current(target, data, tmp_path):
    """Which rank saves a copy depends on the plan; what goes on to storage has to be what that rank has in memory."""
    log, storage = tmp_path / "log", Store(LocalStorage(tmp_path / "c"))
    with node_memory() as memory:
        flags = data | PEC | EXPERT_BIAS | dict(use_distributed_optimizer=False, pec_target=target)
        flags |= dict(pec_k_snapshot=4, pec_k_persist=1, ckpt_tier="memory", persist_interval=2)
        flags |= dict(ckpt_memory_dir=str(memory), ckpt_dir=str(tmp_path / "c"), log_dir=str(log))
        kill_when("EP2", flags, lambda: len(storage.iterations()) > 1)
    newest = max(storage.iterations())
    steps = {entry.step for entry in storage.read_manifest(newest).operators.values()}
    assert newest > min(storage.iterations()) and steps == {newest}
    start, hashes = loaded("EP2", flags | dict(ckpt_tier="disk", persist_interval=None, pec_k_persist=4))
    versions = saved(storage)
    assert start == newest
    assert {name.split()[1] for name in hashes} == {name.split()[1] for name in versions}


@pytest.mark.recovery
def test_surviving_node_memory_has_newer_experts_than_storage(data, tmp_path):
    """MoC-System, section 5.1 and Figure 8: each worker is a node, and the memory of one is lost."""
    log, storage = tmp_path / "log", tmp_path / "c"
    with node_memory() as memory:
        flags = data | PEC | dict(pec_k_snapshot=EXPERTS, pec_k_persist=1, ckpt_tier="memory", persist_interval=8)
        flags |= dict(node_of_rank="0,1", ckpt_memory_dir=memory, ckpt_dir=str(storage), log_dir=str(log))
        kill_when("EP2", flags, lambda: _memory_is_ahead(Events(log / "events.jsonl")))
        base = max(Store(LocalStorage(storage)).iterations())
        shutil.rmtree(find_memory_storage(memory, str(storage), "1").root)
        first, again = loaded("EP2", flags), loaded("EP2", flags)
        assert first == again  # what is left in memory stays until a new snapshot is safe
        late = ["slow ranks=0,1 iteration=0 point=snapshot_copying seconds=600"]  # it is begun, and not safe
        late.append(f"kill ranks=0,1 iteration={base + 2} point=after_commit")
        assert {result.exit for result in start("EP2", flags | dict(inject=late)).wait()} == {-9}
        assert Events(log / "events.jsonl").of("iteration")[-1]["iteration"] == base + 1
        assert loaded("EP2", flags) == first
        assert train("EP2", flags | dict(exit_interval=base + 2)).start == base
        assert not [path for path in Path(memory).rglob("*") if path.is_file() and not path.name.startswith(".")]
    resume, *others = Events(log / "events.jsonl").of("resume")
    assert resume["sources"] and len(others) == 4
    assert all({i for i, _ in other["sources"]} == {i for i, _ in resume["sources"]} for other in others)
    assert resume["tier"] == "storage" and {tier for _, tier in resume["sources"]} == {"memory", "storage"}
    assert max(i for i, tier in resume["sources"] if tier == "memory") > base
    assert 0 < Events(log / "events.jsonl").of("lost")[0]["plt"] < 1


def _memory_is_ahead(told: Events) -> bool:
    """Whether memory is some iterations ahead of storage, which has a partial snapshot."""
    persisted, complete = told.of("persist"), told.of("iteration")
    return len(persisted) > 1 and complete[-1]["iteration"] >= persisted[-1]["iteration"] + 4


@pytest.mark.recovery
def test_k_doubles_as_faults_consume_loss_limit(data, tmp_path):
    """MoC-System, section 5.3: five faults, and the limit is kept."""
    limit, faults, trained = 0.0375, range(48, 81, 8), 400  # iterations of the whole training
    log, store = tmp_path / "log", Store(LocalStorage(tmp_path / "c"))
    flags = data | PEC | SMALL | dict(pec_dynamic_k=True, ckpt_blocking=True, train_iters=trained)
    flags |= dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(log))
    size, parallel = LAYOUTS["EP2"]
    saved = []
    for iteration in faults:
        body = dict(flags=FLAGS | parallel | flags, iteration=iteration)
        killed = start_world(size, "tests.integration.pec_bodies:die_after", **body).wait()
        assert {result.exit for result in killed} == {-9}
        saved.append(len(experts_in(store, iteration)[0]))
    assert set(train("EP2", flags | dict(exit_interval=84)).codes) == {0}
    ks, booked, share = [1], 0.0, limit / 4  # of K = 1, 2, 4 and 8
    for fault, event in zip(faults, Events(log / "events.jsonl").of("lost"), strict=True):
        assert event["iteration"] == fault and 0 < event["of_training"] < share
        assert event["of_training"] == pytest.approx(event["raised_by"] * fault / trained)
        booked += event["of_training"]
        ks.append(2 * ks[-1] if booked > share else ks[-1])
        booked -= share if booked > share else 0.0
    assert ks[-1] >= 4 and saved == ks[:-1]
    told = Events(log / "events.jsonl").of("iteration")
    assert [e["k_persist"] for e in told] == [ks[sum(e["iteration"] > fault for fault in faults)] for e in told]
    lost = sum(event["of_training"] for event in Events(log / "events.jsonl").of("lost"))
    assert 0 < lost == pytest.approx(told[-1]["plt"] * told[-1]["iteration"] / trained) and lost < limit


@pytest.mark.recovery
def test_storage_keeps_only_required_snapshots(data, tmp_path):
    flags = dict(pec_k=1, ckpt_dir=str(tmp_path / "c"), ckpt_keep=1, log_dir=str(tmp_path / "log"))
    kill_at("1", data | PEC | flags, iteration=2 * EXPERTS)
    store = Store(LocalStorage(tmp_path / "c"))
    versions = saved(store)
    needed = {max(found) for found in versions.values()}
    assert len(needed) >= EXPERTS // 2
    # the last publication may have been cut off before it removed what it superseded
    assert needed <= set(store.iterations()) and len(set(store.iterations()) - needed) <= 1
