"""Chains are folded in memory: real files of real snapshots, of experts that torch's own optimizer updates."""

import dataclasses
from dataclasses import asdict, replace

import pytest
import torch

from moc.recovery import gradient_folding
from moc.recovery.expert_versions import ExpertVersions
from moc.recovery.gradient_chains import Chain, applicable_chains, updated_file_name, updated_store
from moc.recovery.gradient_folding import RULES, execute_order
from moc.recovery.inventory import in_memory, list_checkpoints
from moc.recovery.sources import MEMORY, AvailableCheckpoint, recovery_paths
from moc.state.adam import Rule, Rules, kind_of
from moc.state.operators import Detail, Operator, Region
from moc.state.record import StepRecord
from moc.store.manifest import Manifest, OperatorEntry
from moc.store.shard_file import BoxTensor, ShardReader, write_shard_file
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name

EXPERTS, SHAPE, SKIPPED = 3, (8, 3), 4
NAMES = [f"layers.0.expert.{e}" for e in range(EXPERTS)]
TENSORS = {name: f"decoder.layers.0.mlp.experts.experts.{e}.linear_fc1.weight" for e, name in enumerate(NAMES)}
ONES = [Operator(name, "expert", 0, e, SHAPE[0] * SHAPE[1]) for e, name in enumerate(NAMES)]
FULL, GRAD = Detail.FULL, Detail.GRAD


class Run:
    """Experts in training, with a snapshot in memory after each iteration, and what they were at each."""

    def __init__(self, path):
        torch.manual_seed(3)
        self.store = Store(LocalStorage(path, in_memory=True), allows_slack=True)
        self.carrier = ExpertVersions(self.store, ONES)
        self.experts = {name: torch.nn.Parameter(torch.randn(SHAPE)) for name in NAMES}
        self.optimizer = torch.optim.AdamW(self.experts.values(), weight_decay=0.1)
        self.iteration, self.was, self.rules = 0, {}, Rules(0.5, {})

    def train(self, *, compared=(), **details: Detail) -> None:
        """An iteration, and its snapshot of experts by their numbers: ``e0=FULL``."""
        self.iteration += 1
        norm = float("inf") if self.iteration == SKIPPED else 2.0
        record = StepRecord(self.iteration, 1.0, norm, 8.0, self.iteration == SKIPPED, 9, 0.1, 2)
        gradients = {name: torch.randn(SHAPE) for name in NAMES}
        for name, parameter in self.experts.items():
            parameter.grad = gradients[name] * (min(1.0, 0.5 / (2.0 + 1e-6)) / 8.0)
        if not record.skipped:
            self.optimizer.step()
        group = self.optimizer.param_groups[0]
        group["lr"] = 1e-2 / (1 + self.iteration)
        rule = Rule(group["lr"], 0.1, 0.9, 0.999, 1e-8, True)
        self.rules = Rules.of(0.5, [(kind_of(name), rule) for name in TENSORS.values()])
        self.was[self.iteration] = {name: self.state(name) for name in NAMES}
        planned = {NAMES[int(key[1:])]: detail for key, detail in details.items()}
        both = frozenset(NAMES[e] for e in compared)
        coming = AvailableCheckpoint(self.iteration, MEMORY, {n: d.value for n, d in planned.items()})
        self.carrier.retain(coming, compared=both)
        self._save(planned, both, gradients, record)
        self.carrier.retire(self.iteration)
        self.carrier.remove_outdated(self.iteration)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        parameter = self.experts[name]
        moments = self.optimizer.state.get(parameter) or dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(SHAPE))
        slots = {"master": parameter.detach(), **{slot: moments[slot] for slot in ("exp_avg", "exp_avg_sq")}}
        return {slot: values.clone() for slot, values in slots.items()}

    def _save(self, planned, both, gradients, record) -> None:
        """Each of two ranks has some rows of everything."""
        directory = self.store.storage.root / checkpoint_name(self.iteration)
        directory.mkdir(parents=True)
        files, updates = {}, self.iteration - (self.iteration >= SKIPPED)
        for rank, rows in enumerate((slice(0, 5), slice(5, 8))):
            region = Region((rows.start, 0), (rows.stop - rows.start, SHAPE[1]))
            tensors = [
                BoxTensor(TENSORS[name], slot, SHAPE, region, values[rows].contiguous())
                for name, detail in planned.items()
                for slot, values in {**self.was[self.iteration][name], "grad": gradients[name]}.items()
                if detail.holds(slot) or name in both
            ]
            files[shard_file_name(rank)] = write_shard_file(directory / shard_file_name(rank), tensors)
        elements = {
            name: {s: 24 for s in ("master", "exp_avg", "exp_avg_sq", "grad") if d.holds(s) or name in both}
            for name, d in planned.items()
        }
        operators = {name: OperatorEntry(d.value, updates, elements[name]) for name, d in planned.items()}
        state = {"record": asdict(record), RULES: self.rules.to_plain()}
        self.store.publish(Manifest(self.iteration, "selective", 2, files, operators, {}, state))

    def comes_back(self) -> dict[str, int]:
        """By expert, the iteration of its newest base, which must have the bits that the expert had then."""
        held = in_memory([list_checkpoints(self.store)[0]], ONES)
        way = next(recovery_paths(held, ONES, exact=False))
        found = {name: way.sources[name, "master"].iteration for name in NAMES}
        assert way.iteration == self.iteration and not way.stale
        for name, iteration in found.items():
            files = self.store.read_manifest(iteration).files.items()
            reader = ShardReader((self.store.open_verified(iteration, f, entry) for f, entry in files), verifies=True)
            for slot, values in self.was[iteration][name].items():
                assert torch.equal(reader.read_region(TENSORS[name], slot, Region((0, 0), SHAPE)), values), (name, slot)
        return found


ALL_GRAD = dict(e0=GRAD, e1=GRAD, e2=GRAD)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "memory")
    run.train(e0=FULL, e1=FULL, e2=FULL)
    return run


def test_folded_chain_equals_trained_state(run):
    for _ in range(8):
        run.train(**ALL_GRAD)
    assert run.comes_back() == dict.fromkeys(NAMES, 1)
    first, *others = run.carrier.chains_to_apply(least=4)
    assert {first, *others} == {Chain(name, 1, 8) for name in NAMES}  # the newest snapshot is not reduced yet
    outcome = execute_order(run.store, [], [first])
    assert outcome == ([first.operator], 7, [], [], [], "")
    assert run.carrier.install_bases() == [first.operator] and not updated_store(run.store).storage.list_names()
    assert run.comes_back() == {name: 8 if name == first.operator else 1 for name in NAMES}
    run.carrier.remove_outdated(run.iteration)
    assert run.comes_back()[first.operator] == 8
    assert (
        first.operator not in run.store.read_manifest(1).operators
    )  # the base before, and the gradients between, are gone
    assert first.operator not in run.store.read_manifest(5).operators
    run.train(**ALL_GRAD)
    run.train(e0=GRAD, e1=GRAD)
    assert execute_order(run.store, [], run.carrier.chains_to_apply(least=1)).gradients == 2 + 9 + 9
    run.carrier.install_bases()
    run.carrier.remove_outdated(run.iteration)
    held = {one.iteration: one.operators for one in in_memory([list_checkpoints(run.store)[0]], ONES)}
    assert {n: max(i for i in held if held[i].get(n) == "full") for n in NAMES} == dict.fromkeys(NAMES, 10)


def test_killed_applier_leaves_state_unchanged(run):
    for _ in range(6):
        run.train(**ALL_GRAD)
    chains = run.carrier.chains_to_apply(least=1)
    into, steps = updated_store(run.store), gradient_folding._Steps(run.store)
    steps.apply(chains[0], into)  # killed before it is published
    assert run.carrier.install_bases() == [] and run.comes_back() == dict.fromkeys(NAMES, 1)
    steps.apply(chains[0], into)
    execute_order(run.store, [], chains[1:])
    new = run.carrier._new_path(6, updated_file_name(chains[1].operator))  # a worker killed while it adopts it
    torch.save({}, new)
    assert run.comes_back() == dict.fromkeys(NAMES, 1)
    assert run.carrier.install_bases() == [chain.operator for chain in chains[1:]]
    assert run.comes_back() == {name: 1 if name == chains[0].operator else 6 for name in NAMES}


def test_chain_is_kept_until_compared_with_its_final_state(run):
    run.carrier.is_comparing = True
    for _ in range(5):
        run.train(**ALL_GRAD)
    run.train(e0=FULL, e1=FULL, e2=GRAD, compared=(0,))  # the first with its gradients
    run.train(**ALL_GRAD)
    run.train(**ALL_GRAD)
    assert run.comes_back() == {NAMES[0]: 7, NAMES[1]: 7, NAMES[2]: 1}
    (chain,) = run.carrier.chains_to_compare()
    assert chain == Chain(NAMES[0], 1, 7) and run.store.read_manifest(1).operators.keys() == {NAMES[0], NAMES[2]}
    assert execute_order(run.store, [chain], []) == ([], 0, [NAMES[0]], [], [], "")
    run.carrier.on_compared([NAMES[0]])
    run.train(**ALL_GRAD)
    assert not run.carrier.chains_to_compare() and run.store.read_manifest(1).operators.keys() == {NAMES[2]}
    assert run.comes_back() == {NAMES[0]: 7, NAMES[1]: 7, NAMES[2]: 1}


def test_differing_bits_are_detected(run, monkeypatch):
    run.carrier.is_comparing = True
    run.train(**ALL_GRAD)
    run.train(e0=FULL, e1=GRAD, e2=GRAD, compared=(0,))
    run.train(**ALL_GRAD)
    run.train(**ALL_GRAD)
    update = gradient_folding.update
    monkeypatch.setattr(
        gradient_folding, "update", lambda s, g, step, rule, f: update(s, g, step, replace(rule, eps=1e-7), f)
    )
    assert execute_order(run.store, run.carrier.chains_to_compare(), []).differing == [NAMES[0]]


def test_newer_state_ends_wait_for_comparison(run):
    run.carrier.is_comparing = True
    run.train(**ALL_GRAD)
    run.train(e0=FULL, e1=GRAD, e2=GRAD, compared=(0,))
    run.train(e0=FULL, e1=GRAD, e2=GRAD)
    run.train(**ALL_GRAD)
    assert not run.carrier.chains_to_compare() and run.comes_back()[NAMES[0]] == 4
    assert NAMES[0] in {chain.operator for chain in run.carrier.chains_to_apply(least=0)}


def test_damaged_gradients_or_missing_rules_fold_nothing(run):
    for _ in range(5):
        run.train(**ALL_GRAD)
    path = run.store.storage.root / checkpoint_name(3) / f"{NAMES[0]}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (run.store.storage.root / checkpoint_name(5) / f"{NAMES[1]}.safetensors").unlink()
    outcome = execute_order(run.store, [], run.carrier.chains_to_apply(least=1))
    assert outcome.folded == [NAMES[2]] and set(outcome.superseded) == {NAMES[0], NAMES[1]}
    manifest = run.store.read_manifest(2)
    told = {**manifest.state, RULES: Rules(0.5, {}).to_plain()}
    run.store.publish_as_is(dataclasses.replace(manifest, state=told))
    outcome = execute_order(run.store, [], [Chain(NAMES[2], 1, 5)])
    assert not outcome.folded and outcome.why.startswith(f"{NAMES[2]}: ")


def test_chains_have_no_gap_and_start_at_newest_base():
    def held(iteration, **details):
        return AvailableCheckpoint(iteration, MEMORY, {name: detail.value for name, detail in details.items()})

    there = [held(1, a=FULL, b=FULL, c=GRAD), held(2, a=GRAD, b=GRAD, c=GRAD), held(3, a=FULL), held(4, a=GRAD, b=GRAD)]
    assert applicable_chains(there, {"a", "b", "c", "d"}, 1) == [Chain("a", 3, 4), Chain("b", 1, 2)]
    assert applicable_chains(there, {"a", "b"}, 2) == []
