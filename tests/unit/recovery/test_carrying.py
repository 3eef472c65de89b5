"""Memory keeps each expert's newest version: real files of real snapshots, carried, reduced and dropped."""

import itertools
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import Every, policy_named
from moc.recovery.expert_versions import RETAINED_MANIFEST, ExpertVersions, max_retained, slot_of
from moc.recovery.gradient_chains import operator_file_name
from moc.recovery.inventory import COPIED, in_memory, list_checkpoints
from moc.recovery.sources import MEMORY, AvailableCheckpoint, recovery_paths
from moc.state.operators import Detail, Operator, Region, operator_of
from moc.store.manifest import FileEntry, Manifest, OperatorEntry
from moc.store.reserved_memory import SLOTS_DIRECTORY
from moc.store.shard_file import FileLayout, ShardReader, TensorBox, compute_digest
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name, sub_file_name
from tests.errors import raises

EXPERTS, ROWS = 8, 64
OPERATORS = [Operator(f"layers.0.expert.{e}", "expert", 0, e, 2 * ROWS) for e in range(EXPERTS)]
OPERATORS.append(Operator("output", "output", None, None, 2 * ROWS))
ONES = [one for one in OPERATORS if one.expert is not None]
NAMES = frozenset(one.name for one in ONES)
PARAMETERS = {name: f"decoder.layers.0.mlp.experts.experts.{name.split('.')[-1]}.linear_fc1.weight" for name in NAMES}
PARAMETERS["output"] = "output_layer.weight"


def part_of_rank(rank: int) -> str:
    """Name of a copy of some of the operators that a rank saved."""
    return sub_file_name(shard_file_name(rank), 0)


def save(store: Store, iteration: int, operators: dict[str, Detail], name_of=shard_file_name, ranks: int = 2) -> None:
    """A snapshot of which each rank has some rows of everything; values tell operator and iteration."""
    files, elements = {}, {name: Counter() for name in operators}
    for rank in range(ranks):
        entries = [
            TensorBox(
                PARAMETERS[name], slot, (ROWS, 2), Region((rank * ROWS // ranks, 0), (ROWS // ranks, 2)), torch.float32
            )
            for name, detail in operators.items()
            for slot in ("master", "exp_avg", "grad")
            if detail.holds(slot)
        ]
        layout = FileLayout(entries)
        data = [torch.full(entry.region.shape, float(iteration)).numpy().tobytes() for entry in layout.entries]
        header = layout.header(list(map(compute_digest, data)))
        store.storage.write(f"{checkpoint_name(iteration)}/{name_of(rank)}", [header, *data], is_durable=False)
        files[name_of(rank)] = FileEntry(layout.nbytes, len(header), compute_digest(header))
        for entry in entries:
            elements[operator_of(entry.name)][entry.slot] += entry.region.numel
    entries = {name: OperatorEntry(operators[name].value, iteration, dict(its)) for name, its in elements.items()}
    store.publish(Manifest(iteration, "pec", ranks, files, entries, {}, {"ledger": {"iteration": iteration}}))


def held_of(iteration, operators):
    return AvailableCheckpoint(iteration, MEMORY, {name: detail.value for name, detail in operators.items()})


def take(
    store: Store, carrier: ExpertVersions, iteration: int, operators: dict[str, Detail], name_of=shard_file_name
) -> int:
    """What a run does for one snapshot; the bytes that it has carried."""
    carried = carrier.retain(held_of(iteration, operators))
    save(store, iteration, operators, name_of)
    carrier.retire(iteration)
    carrier.remove_outdated(iteration)
    return carried


def in_full(*experts):
    return {"output": Detail.FULL} | {f"layers.0.expert.{e}": Detail.FULL for e in experts}


def newest(store: Store) -> dict[str, tuple[int, int]]:
    """By operator, the iterations of master weights and moments that a run goes on with; all files are compared."""
    held = in_memory([list_checkpoints(store)[0]], OPERATORS)
    way = next(recovery_paths(held, OPERATORS, exact=False))
    for one in way.checkpoints():
        manifest = store.read_manifest(one.iteration)
        reader = ShardReader(
            (store.open_verified(one.iteration, name, entry) for name, entry in manifest.files.items()), verifies=True
        )
        for name, slot in (
            (n, s) for n, p in way.sources for s in ("master", "exp_avg") if (p == "master") == (s == "master")
        ):
            if way.sources[name, "master" if slot == "master" else "moments"].key == one.key:
                values = reader.read_region(PARAMETERS[name], slot, Region((0, 0), (ROWS, 2)))
                assert (values == one.iteration).all()
    return {name: tuple(way.sources[name, part].iteration for part in ("master", "moments")) for name in PARAMETERS}


def bytes_in(store: Store, iteration: int) -> int:
    return sum(
        path.stat().st_size
        for path in (store.storage.root / checkpoint_name(iteration)).iterdir()
        if path.suffix != ".json"
    )


@pytest.fixture
def store(tmp_path):
    return Store(LocalStorage(tmp_path / "memory", in_memory=True), allows_slack=True)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, EXPERTS - 1), max_size=4), min_size=1, max_size=7),
    st.sampled_from([None, Detail.MOMENTS, Detail.MASTER]),
    st.sampled_from([shard_file_name, part_of_rank]),
)
def test_every_expert_restores_newest_state_once(tmp_path_factory, chosen, rest, name_of):
    store = Store(LocalStorage(tmp_path_factory.mktemp("memory"), in_memory=True), allows_slack=True)
    carrier, wanted, saved = ExpertVersions(store, ONES), {}, {}
    for iteration, experts in enumerate([range(EXPERTS), *chosen], start=1):
        operators = dict.fromkeys(NAMES, rest) if rest else {}
        saved[iteration] = operators | in_full(*experts)
        take(store, carrier, iteration, saved[iteration], name_of)
        for name, detail in saved[iteration].items():
            before = wanted.get(name, (0, 0))
            wanted[name] = tuple(
                iteration if detail.holds(slot) else then
                for slot, then in zip(("master", "exp_avg"), before, strict=True)
            )
    assert newest(store) == wanted
    last = len(saved)
    state = 2 * ROWS * 2 * 4  # bytes of an expert
    data = {i: bytes_in(store, i) - 4096 * len(store.read_manifest(i).files) for i in store.iterations()}
    assert sum(nbytes for i, nbytes in data.items() if i != last) <= EXPERTS * state
    assert sum(data.values()) == (EXPERTS + 1) * state  # one full state, to the byte; of some only masters or moments


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([None, *Detail.__members__.values()]), min_size=EXPERTS, max_size=EXPERTS), max_size=7
    )
)
def test_number_of_files_is_predicted_exactly(tmp_path_factory, chosen):
    store = Store(LocalStorage(tmp_path_factory.mktemp("memory"), in_memory=True), allows_slack=True)
    carrier, plans, there = ExpertVersions(store, ONES), [in_full(*range(EXPERTS))], Counter()
    for details in chosen:
        its = {f"layers.0.expert.{e}": d for e, d in enumerate(details) if d not in (None, Detail.COMPUTE)}
        plans.append(in_full() | its)
    held = [held_of(iteration, operators) for iteration, operators in enumerate(plans, start=1)]
    for one, operators in zip(held, plans, strict=True):
        take(store, carrier, one.iteration, operators)
        slots = store.storage.root / SLOTS_DIRECTORY
        there |= Counter(path.name.partition(".")[0] for path in slots.glob("*"))
    most = max_retained(held, NAMES, 0)
    assert {slot_of(detail): number for detail, number in most.items()} == there


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["full", "grad", None]), min_size=EXPERTS, max_size=EXPERTS), max_size=7))
def test_memory_keeps_bases_and_their_later_gradients(tmp_path_factory, wanted):
    store = Store(LocalStorage(tmp_path_factory.mktemp("memory"), in_memory=True), allows_slack=True)
    carrier, chains = ExpertVersions(store, ONES), {}
    take(store, carrier, 1, in_full(*range(EXPERTS)))
    chains = {f"layers.0.expert.{e}": [1] for e in range(EXPERTS)}
    for iteration, details in enumerate(wanted, start=2):
        operators = in_full()
        for expert, detail in enumerate(details):
            chain = chains[name := f"layers.0.expert.{expert}"]
            if detail == "grad" and chain[-1] == iteration - 1:
                operators[name] = Detail.GRAD
                chain.append(iteration)
            elif detail is not None:
                operators[name], chains[name] = Detail.FULL, [iteration]
        take(store, carrier, iteration, operators)
    way = next(recovery_paths(in_memory([list_checkpoints(store)[0]], OPERATORS), OPERATORS, exact=False))
    folds = {name: [one.iteration for one in its] for name, its in way.gradients.items()}
    assert {name: [way.sources[name, "master"].iteration, *folds.get(name, ())] for name in NAMES} == chains
    last = len(wanted) + 1
    data = {i: bytes_in(store, i) - 4096 * len(store.read_manifest(i).files) for i in store.iterations()}
    older = [i == chain[0] or 1 / 2 for chain in chains.values() for i in chain if i != last]  # of two slots, and one
    assert sum(nbytes for i, nbytes in data.items() if i != last) == sum(older) * 2 * ROWS * 2 * 4


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_only_versions_missing_in_next_snapshot_are_retained(store, k):
    policy, carrier = policy_named("pec")(OPERATORS, Every(1), k=k), ExpertVersions(store, ONES)
    expert, moved, partial = 2 * ROWS * 2 * 4, [], False
    for iteration in range(1, 2 * EXPERTS):
        plan = policy.plan(iteration)
        policy.on_snapshot(plan)
        moved.append(take(store, carrier, iteration, dict(plan.operators)) // (expert + 4096))  # files with headers
        partial |= not plan.complete
    if k == EXPERTS:
        assert not partial and not any(moved)
        return
    assert moved[:2] == [0, EXPERTS - k]  # all that the second one lacks of the first
    assert max(moved[2:]) <= k


def test_kill_anywhere_leaves_newest_version_of_each_expert(store, monkeypatch):
    """The process ends at each system call in turn that changes a name; the next life goes on from what there is."""

    class Killed(BaseException):
        """Not to be caught."""

    def life(root, dies_after):
        store = Store(LocalStorage(root, in_memory=True), allows_slack=True)
        carrier, left = ExpertVersions(store, ONES), itertools.count()
        real = {name: getattr(os, name) for name in ("rename", "unlink")}

        def dying(name):
            def call(*args, **kwargs):
                if next(left) == dies_after:
                    raise Killed
                return real[name](*args, **kwargs)

            return call

        for iteration, experts in enumerate([range(EXPERTS), (0, 1), (2, 3), (0, 4)], start=1):
            operators = in_full(*experts)
            if iteration == 4:
                for name in real:
                    monkeypatch.setattr(os, name, dying(name))
            try:
                carrier.retain(held_of(iteration, operators))
                for name in real:
                    monkeypatch.setattr(os, name, real[name])
                save(store, iteration, operators)
                if iteration == 4:
                    for name in real:
                        monkeypatch.setattr(os, name, dying(name))
                carrier.retire(iteration)
                carrier.remove_outdated(iteration)
            except Killed:
                return newest_after(store), iteration in store.iterations()
            finally:
                for name in real:
                    monkeypatch.setattr(os, name, real[name])
        return None

    def newest_after(store):
        for name in ("replace", "unlink"):
            monkeypatch.setattr(os, name, getattr(os, name))
        monkeypatch.undo()
        ExpertVersions(store, ONES).delete()
        return {int(name.split(".")[-1]): of[0] for name, of in newest(store).items() if name in NAMES}

    before = {0: 2, 1: 2, 2: 3, 3: 3} | dict.fromkeys(range(4, 8), 1)
    after = before | {0: 4, 4: 4}
    kills = 0
    for dies_after in itertools.count():
        found = life(store.storage.root / str(dies_after), dies_after)
        if found is None:
            break
        kills += 1
        assert found == (after if found[1] else before, found[1])
    assert kills > 6


def test_newest_peer_copy_is_unchanged(store):
    """Who keeps them for another node carries when a copy is whole: nothing else is coming."""
    carrier = ExpertVersions(store, ONES)
    save(store, 1, in_full(*range(EXPERTS)))
    save(store, 2, in_full(0, 1))
    assert carrier.retain() // (2 * ROWS * 2 * 4 + 4096) == EXPERTS - 2
    assert [RETAINED_MANIFEST in store.storage.list_names(checkpoint_name(iteration)) for iteration in (1, 2)] == [
        True,
        False,
    ]


def test_snapshot_not_reduced_yet_is_unchanged(store):
    carrier = ExpertVersions(store, ONES)
    save(store, 1, in_full(*range(EXPERTS)))
    save(store, 2, in_full(0, 1))
    manifest, files = store.read_manifest(1), store.storage.list_names(checkpoint_name(1))
    carrier.remove_outdated(2)
    assert store.read_manifest(1) == manifest and store.storage.list_names(checkpoint_name(1)) == files


def test_versions_retained_for_lost_snapshot_are_dropped(store):
    carrier = ExpertVersions(store, ONES)
    take(store, carrier, 1, in_full(*range(EXPERTS)))
    carrier.retain(held_of(2, in_full(0, 1)))
    again = ExpertVersions(store, ONES)
    again.delete()
    assert RETAINED_MANIFEST not in store.storage.list_names(checkpoint_name(1))
    untouched = {path.name: path.stat().st_ino for path in (store.storage.root / checkpoint_name(1)).iterdir()}
    again.delete()
    assert {path.name: path.stat().st_ino for path in (store.storage.root / checkpoint_name(1)).iterdir()} == untouched
    take(store, again, 2, in_full(6, 7))  # other experts than before
    assert newest(store)["layers.0.expert.0"] == (1, 1)


def test_failure_to_retain_expert_is_reported(store):
    carrier = ExpertVersions(store, ONES)
    take(store, carrier, 1, in_full(*range(EXPERTS)))
    (store.storage.root / checkpoint_name(1) / shard_file_name(1)).unlink()
    with raises("checkpoint-unreadable", "rank_00001"):
        carrier.retain(held_of(2, in_full(0)))
    assert operator_file_name("layers.0.expert.1") not in store.storage.list_names(checkpoint_name(1))


def test_retained_versions_replace_reused_snapshot(store):
    """A snapshot was safe, and the process ended before it could reduce the one before."""
    carrier, before, after = ExpertVersions(store, ONES), in_full(*range(EXPERTS)), in_full(0, 1)
    save(store, 1, before)
    carrier.retain(held_of(2, after))
    save(store, 2, after)
    assert carrier.unreduced() == {1, 2}
    for rank in range(2):
        path = store.storage.root / checkpoint_name(1) / shard_file_name(rank)
        path.write_bytes(bytes(path.stat().st_size))
    ExpertVersions(store, ()).reduce(2)
    assert carrier.unreduced() == {2} and newest(store) == {name: (1, 1) for name in before} | {
        n: (2, 2) for n in after
    }


def test_snapshot_without_retained_versions_is_unchanged(store):
    save(store, 1, in_full(*range(EXPERTS)))
    save(store, 2, in_full(0, 1))
    ExpertVersions(store, ()).reduce(2)
    assert ExpertVersions(store, ONES).unreduced() == {1, 2} and newest(store)["layers.0.expert.7"] == (1, 1)


def test_memory_keeps_shared_experts_that_copies_need(store):
    """Other nodes save as much of each expert, and get copies of some of what this one saves."""
    shared = [Operator(one.name, one.kind, one.layer, one.expert, 2 * one.parameters) for one in ONES]
    for carrier, versions in (
        (ExpertVersions(store, shared), {1: {3}, 2: {0, 1}, 3: {2, 0, 1}}),
        (ExpertVersions(store, ONES), {1: {3}}),
    ):
        for iteration in store.iterations():
            store.remove(iteration)
        for iteration, experts, copied in ((1, range(4), range(4)), (2, (0, 1, 2), (0, 1)), (3, (0, 1, 2), (2,))):
            names = [f"layers.0.expert.{e}" for e in copied]
            carrier.retain(held_of(iteration, in_full(*experts)), names)
            save(store, iteration, in_full(*experts))
            manifest = store.read_manifest(iteration)
            store.publish_as_is(replace(manifest, state={**manifest.state, COPIED: ["output", *names]}))
            carrier.retire(iteration)
            carrier.remove_outdated(iteration)
        there = {
            i: {int(n.split(".")[-1]) for n in store.read_manifest(i).operators if n != "output"}
            for i in store.iterations()
        }
        assert there == versions | {3: {0, 1, 2}}


def test_snapshots_of_repeated_iterations_are_reduced(store):
    carrier = ExpertVersions(store, OPERATORS)
    for iteration in range(1, 9):
        take(store, carrier, iteration, in_full(iteration % EXPERTS))
    for later in range(4, 9):
        store.remove(later)
    save(store, 4, in_full(*range(EXPERTS)))  # what a recovery has gone back to
    for iteration in range(5, 9):
        take(store, carrier, iteration, in_full(iteration % EXPERTS))
        assert carrier.unreduced() == {iteration}
