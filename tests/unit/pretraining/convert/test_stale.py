"""A partial checkpoint is converted with the newest experts beside it, as a run would resume, if stale ones may be."""

import re
import shutil
from dataclasses import replace

import pytest
import torch

from megatron.pretraining.convert import program
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.snapshot import SnapshotContents, write_snapshot
from moc.inspect import summary
from moc.inspect.coverage import operator_or_other
from moc.policy.token_ledger import TokenLedger
from tests.errors import only_code
from tests.unit.inspect.test_snapshots import CHAINED, LEFT_OUT, chain
from tests.unit.inspect.test_summary import inspect
from tests.unit.pretraining.convert.models import EXPERTS, LAYERS, Model

SAVED = {1: ["0.0", "0.1", "1.0", "1.1"], 2: ["0.0"], 3: ["1.1"]}
"""By iteration, layer and number of the experts in its checkpoint, beside everything dense."""
NEWEST = {"layers.0.expert.0": 2, "layers.0.expert.1": 1, "layers.1.expert.0": 1}
OLDER = (
    "3 experts are in older checkpoints: layers.0.expert.1, layers.1.expert.0 of iteration 1; layers.0.expert.0 of "
    "iteration 2"
)


class Partial(Model):
    """The model after so many iterations; each adds 1 to all values."""

    def __init__(self, iteration, ledger, policy):
        super().__init__(iteration=iteration, optimizer_step=iteration, ledger=ledger.state_dict())
        self.facts = replace(self.facts, iteration=iteration, policy=policy)
        gone = {f"layers.{layer}.expert.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)}
        gone -= {f"layers.{place.replace('.', '.expert.')}" for place in SAVED[iteration]}
        self.operators = {name: ("full", iteration) for name in self.operators if name not in gone}
        self.tensors = [tensor for tensor in self.tensors if operator_or_other(tensor.name) not in gone]

    def read(self, name, slot, region):
        """Of this iteration."""
        return super().read(name, slot, region) + self.facts.iteration


@pytest.fixture(params=["selective", "pec"])
def root(tmp_path, request):
    """Checkpoints of three iterations; in each, expert E of layer L learns 10 L + E + 1 tokens."""
    ledger = TokenLedger.empty(dict.fromkeys(range(LAYERS), EXPERTS))
    for iteration, experts in SAVED.items():
        ledger = ledger.after_iteration(
            {layer: [10 * layer + one + 1 for one in range(EXPERTS)] for layer in range(LAYERS)}
        )
        saved = {layer: [int(one[2]) for one in experts if int(one[0]) == layer] for layer in range(LAYERS)}
        write_snapshot(
            Partial(iteration, ledger.with_snapshot(saved), request.param), tmp_path / "a", 2, lambda count: None
        )
        ledger = ledger.with_snapshot(saved).with_snapshot_completed(iteration)
    return tmp_path


def convert(capsys, *argv):
    done = program.main([str(word) for word in argv])
    return done, capsys.readouterr().err


def assert_newest(contents):
    """All values are those of the newest checkpoint that has them."""
    model = Model()
    assert {(one.name, one.slot) for one in contents.tensors} == {(one.name, one.slot) for one in model.tensors}
    for one in contents.tensors:
        expected = model.read(one.name, one.slot, one.region) + NEWEST.get(operator_or_other(one.name), 3)
        assert torch.equal(contents.read(one.name, one.slot, one.region), expected), one


def test_stale_experts_are_converted_only_if_allowed(root, capsys):
    for flags in ([], ["--no-optim"]):
        done, said = convert(capsys, root / "a", root / "b", *flags)
        assert done == 1 and OLDER in said and "pass --allow-stale" in said and not (root / "b").exists()
    assert convert(capsys, root / "a", root / "b", "--allow-stale")[0] == 0
    assert_newest(DenseContents(root / "b" / "iter_0000003"))
    assert convert(capsys, root / "b", root / "c")[0] == 0  # it is whole, and all have seen as many updates
    assert_newest(SnapshotContents(root / "c" / "iter_0000003"))


def test_lost_tokens_are_recorded_in_ledger(root, capsys):
    assert convert(capsys, root / "a", root / "b", "--to", "snapshot", "--allow-stale")[0] == 0
    contents = SnapshotContents(root / "b" / "iter_0000003")
    assert_newest(contents)
    assert {step for _, step in contents.operators.values()} == {3}
    ledger = TokenLedger.from_state(contents.facts.state["ledger"])
    assert ledger.lost == {0: (1 * 1, 2 * 2), 1: (11 * 2, 0)}  # tokens of an iteration, times iterations


def test_partial_snapshot_is_resharded_without_stale_experts(root, capsys):
    assert convert(capsys, root / "a", root / "b", "--to", "snapshot", "--writers", 3)[0] == 0
    there = SnapshotContents(root / "b" / "iter_0000003").operators
    assert [name for name in there if ".expert." in name] == ["layers.1.expert.1"]


def test_older_iteration_uses_no_newer_experts(root, capsys):
    assert convert(capsys, root / "a", root / "b", "--iteration", 2, "--to", "snapshot", "--allow-stale")[0] == 0
    contents = SnapshotContents(root / "b" / "iter_0000002")
    name = "decoder.layers.1.mlp.experts.experts.1.linear_fc2.weight"
    (tensor,) = (one for one in contents.tensors if (one.name, one.slot) == (name, "master"))
    assert torch.equal(contents.read(name, "master", tensor.region), Model().read(name, "master", tensor.region) + 1)


def test_missing_operator_is_named(root, capsys):
    shutil.rmtree(root / "a" / "iter_0000001")
    done, said = convert(capsys, root / "a", root / "b", "--allow-stale")
    assert done == 1 and only_code(said) == "operator-missing" and "layers.0.expert.0" in said and " 2 " in said


def test_expert_ages_are_shown(root, capsys):
    assert inspect(capsys, root / "a")["stale"] == NEWEST and not inspect(capsys, root / "a", "--iteration", 1)["stale"]
    assert summary.main([str(root / "a")]) == 0
    assert OLDER in capsys.readouterr().out


def test_saved_gradients_are_not_applied_by_conversion(tmp_path, capsys):
    """A checkpoint with the gradients of one expert, without another: both come from the full one before."""
    chain(tmp_path / "a")
    done, said = convert(capsys, tmp_path / "a", tmp_path / "b")
    assert done == 1 and only_code(said) == "experts-stale" and f"{LEFT_OUT}, {CHAINED} of iteration 3" in said
    assert re.findall(r"\d+(?= experts| of them)", said) == ["2", "1"]  # older, and older with gradients
    assert "--allow-stale" in said and not (tmp_path / "b").exists()
    assert convert(capsys, tmp_path / "a", tmp_path / "b", "--allow-stale")[0] == 0
    contents, model = DenseContents(tmp_path / "b" / "iter_0000005"), Model()
    assert {(one.name, one.slot) for one in contents.tensors} == {(one.name, one.slot) for one in model.tensors}
    for one in contents.tensors:
        assert torch.equal(contents.read(one.name, one.slot, one.region), model.read(one.name, one.slot, one.region))
    assert convert(capsys, tmp_path / "a", tmp_path / "c", "--to", "snapshot", "--writers", 3)[0] == 0  # cut anew
    assert SnapshotContents(tmp_path / "c" / "iter_0000005").operators[CHAINED][0] == "grad"
    shutil.rmtree(tmp_path / "a" / "iter_0000003")
    done, said = convert(capsys, tmp_path / "a", tmp_path / "d", "--allow-stale")
    assert done == 1 and not (tmp_path / "d").exists(), said
