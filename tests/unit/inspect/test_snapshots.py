"""The checkpoint tools know Format v1: what it holds is told, and damage to any bit of it is found and named."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron.pretraining.convert.contents import DigestSums, cut_tensors, write_regions
from megatron.pretraining.convert.snapshot import write_snapshot
from moc.inspect import summary
from moc.inspect import verify as tool
from moc.state.operators import operator_of
from moc.store.manifest import Manifest, OperatorEntry
from tests.cases import each_row
from tests.unit.conftest import REPOSITORY
from tests.unit.inspect.checkpoints import save
from tests.unit.inspect.test_summary import inspect
from tests.unit.inspect.test_verify import flip, named, verify
from tests.unit.pretraining.convert.models import EXPERTS, LAYERS, SLOTS, Model, shapes

FIRST, SECOND = "rank_00000.safetensors", "rank_00001.safetensors"
PARAMETERS = sum(map(math.prod, shapes().values()))
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def snapshot(root, model=None):
    return write_snapshot(model or Model(), root, 2, lambda count: None)


def manifest_of(directory) -> Manifest:
    return Manifest.from_json((directory / "manifest.json").read_text(), "manifest.json")


def edit(directory, **changes):
    before = manifest_of(directory)
    if "iteration" in changes:
        changes["state"] = {**before.state, "iteration": changes["iteration"]}
    (directory / "manifest.json").write_text(replace(before, **changes).to_json())


def write_again(directory, change):
    """Writes the files anew with other boxes, and lists them as they are; what is promised stays."""
    model = Model()
    parts = change(cut_tensors(model.tensors, 2))
    paths = [directory / f"rank_{i:05d}.safetensors" for i in range(len(parts))]
    written = [write_regions(path, part, DigestSums(model), abs) for path, part in zip(paths, parts, strict=True)]
    edit(directory, files=dict(zip([FIRST, SECOND], written, strict=True)))


def test_complete_snapshot_is_verified(capsys, tmp_path):
    directory = snapshot(tmp_path)
    assert verify(capsys, tmp_path) == verify(capsys, directory) == verify(capsys, tmp_path, "--all") == (0, [])
    assert tool.main([str(tmp_path)]) == 0
    size = sum(path.stat().st_size for path in directory.glob("rank_*"))
    verdict = f"{directory}: whole, 2 files, {size / 1000:.1f} kB, state of {len(shapes()) + LAYERS} tensors"
    assert capsys.readouterr().out.splitlines()[0] == verdict


def test_every_bit_is_verified(capsys, tmp_path):
    directory = snapshot(tmp_path)
    sizes = {name: (directory / name).stat().st_size for name in (FIRST, SECOND, "manifest.json")}
    for name, size in sizes.items():
        for position in random.sample(range(8 * size), 40):
            flip(directory / name, position)
            code, problems = verify(capsys, directory)
            assert code == 1 and problems and all(problem.startswith(name) for problem in problems), (name, position)
            flip(directory / name, position)
    assert verify(capsys, tmp_path) == (0, [])


def test_damaged_tensor_is_named(capsys, tmp_path):
    directory = snapshot(tmp_path)
    flip(directory / SECOND, 8 * (directory / SECOND).stat().st_size - 1)
    last = cut_tensors(Model().tensors, 2)[1][-1]
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith(f"{SECOND}: {last.slot} of {last.name} at {list(last.region.offset)} ")


@each_row(
    "damage, problem",
    [
        (lambda path: path.unlink(), f"{SECOND}: is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), f"{SECOND}: has "),
        (lambda path: (path.parent / "stray").touch(), "stray: "),
    ],
    ids=["missing", "truncated", "not listed"],
)
def test_damaged_or_unlisted_file_is_named(capsys, tmp_path, damage, problem):
    damage(snapshot(tmp_path) / SECOND)
    code, (said,) = verify(capsys, tmp_path)
    assert code == 1 and said.startswith(problem)


def test_manifest_of_other_iteration_is_named(capsys, tmp_path):
    edit(snapshot(tmp_path), iteration=4)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith("manifest.json: ") and re.findall(r"\d", problem) == ["4", "3"]


def test_snapshot_missing_a_writer_is_incomplete(capsys, tmp_path):
    edit(snapshot(tmp_path), writers=3)
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and problem.startswith("manifest.json: ") and "2 of 3" in problem


def test_missing_or_duplicate_chunks_are_named(capsys, tmp_path):
    directory = snapshot(tmp_path)
    write_again(directory, lambda parts: [parts[0], [e for e in parts[1] if e.name != "output_layer.weight"]])
    code, problems = verify(capsys, tmp_path)
    promised = math.prod(shapes()["output_layer.weight"])
    held = [
        re.findall(r"\d+", problem) for problem in problems if problem.startswith("output: ") and "master" in problem
    ]
    assert code == 1 and held == [["4", str(4 + promised)]]
    box = next(entry for part in cut_tensors(Model().tensors, 2) for entry in part if entry.name == QKV)
    write_again(directory, lambda parts: [parts[0], [*parts[1], box]])
    code, problems = verify(capsys, tmp_path)
    assert code == 1 and any(problem.startswith(f"{QKV}: {box.slot} overlaps at ") for problem in problems)


def test_full_snapshot_requires_all_operators(capsys, tmp_path):
    parameters = {name: shape for name, shape in shapes().items() if "layers.1." not in name}
    directory = snapshot(tmp_path, Model(parameters))
    gone = ["attention", "mlp", "router", *(f"expert.{expert}" for expert in range(EXPERTS))]
    assert named(verify(capsys, tmp_path)) == (1, [f"layers.1.{name}" for name in gone])
    edit(directory, policy="sparse")  # which saves some of them at a time: what the manifest promises is there
    assert verify(capsys, tmp_path) == (0, [])


@each_row("detail, kept", [("master", {"master", "param"}), ("moments", {"exp_avg", "exp_avg_sq"})])
def test_state_subset_needs_only_its_slots(capsys, tmp_path, detail, kept):
    model = Model(biased=detail == "master")
    model.tensors = [tensor for tensor in model.tensors if tensor.slot in kept]
    directory = snapshot(tmp_path, model)
    whole = manifest_of(directory).operators
    assert verify(capsys, tmp_path)[0] == 1
    edit(directory, operators={name: replace(entry, detail=detail) for name, entry in whole.items()})
    assert verify(capsys, tmp_path) == (0, [])


def test_required_slots_follow_state_subset(capsys, tmp_path):
    directory = snapshot(tmp_path)
    operators = dict(manifest_of(directory).operators)
    edit(directory, operators=operators | {"output": replace(operators["output"], detail="compute")})
    missing = [f"{name}: has no param" for name in ("decoder.final_layernorm.weight", "output_layer.weight")]
    assert verify(capsys, tmp_path) == (1, missing)
    edit(directory, operators=operators | {"layers.7.router": OperatorEntry("full", 2, {"master": 8})})
    code, (promise,) = verify(capsys, tmp_path)
    assert code == 1 and promise.startswith("layers.7.router: ") and re.findall(r" (\d+)", promise) == ["0", "8"]
    snapshot(tmp_path / "weights", Model().weights(torch.bfloat16))
    assert verify(capsys, tmp_path / "weights") == (0, [])


def test_snapshot_without_manifest_is_no_checkpoint(capsys, tmp_path):
    (snapshot(tmp_path) / "manifest.json").unlink()
    code, (problem,) = verify(capsys, tmp_path)
    assert code == 1 and "checkpoint" in problem
    tool.main([str(tmp_path)])
    assert "note: iter_0000003: " in capsys.readouterr().out


def test_newest_checkpoint_is_selected_without_tracker(capsys, tmp_path):
    snapshot(tmp_path)
    os.rename(tmp_path / "iter_0000003", tmp_path / "iter_0000007")
    edit(tmp_path / "iter_0000007", iteration=7)
    snapshot(tmp_path)
    assert inspect(capsys, tmp_path)["iteration"] == 7
    assert inspect(capsys, tmp_path, "--iteration", "3")["iteration"] == 3
    assert verify(capsys, tmp_path, "--all") == (0, [])


@each_row("by", ["kind", "operator", "file"])
def test_rows_add_up_to_totals(capsys, tmp_path, by):
    snapshot(tmp_path)
    rows = inspect(capsys, tmp_path, "--by", by)["rows"]
    for slot in SLOTS:
        assert sum(row["slots"].get(slot, 0) for row in rows) == 4 * PARAMETERS
    assert sum(row["slots"].get("param", 0) for row in rows) == 4 * EXPERTS * LAYERS
    if by == "file":
        assert [row["name"] for row in rows] == [FIRST, SECOND]
        assert abs(rows[0]["bytes"] - rows[1]["bytes"]) <= 4
    if by == "operator":
        assert {(row["detail"], row["updates"]) for row in rows} == {("full", 2)}
        assert len(rows) == 2 + LAYERS * (3 + EXPERTS)


def test_summary_lists_snapshot_facts(capsys, tmp_path):
    directory = snapshot(tmp_path, Model(steps={"output": 5}))
    told = inspect(capsys, directory)
    assert (told["format"], told["policy"], told["layout"]) == ("snapshot", "full", {"world": 2})
    assert (told["iteration"], told["consumed_samples"]) == (3, 24)
    assert told["details"] == {"full": 2 + LAYERS * (3 + EXPERTS)} and told["updates"] == [2, 5]
    assert told["state"]["files"] == 2 and told["state"]["tensors"] == len(shapes()) + LAYERS
    assert told["complete"] and told["problems"] == []
    assert summary.main([str(directory), "--by", "operator"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"adam, .*2 to 5", text) and re.search(r"^complete +yes", text, re.MULTILINE)
    assert {"detail", "updates"} <= set(text.split())
    (directory / SECOND).unlink()
    assert inspect(capsys, directory)["problems"] == [f"{SECOND}: is missing"]


def test_both_formats_have_same_rows(capsys, tmp_path):
    snapshot(tmp_path / "snapshot")
    save(tmp_path / "dense")
    rows = [inspect(capsys, tmp_path / name, "--by", "kind")["rows"] for name in ("snapshot", "dense")]
    assert [[row["name"] for row in table] for table in rows][0] == [row["name"] for row in rows[1]]
    assert {frozenset(row) for table in rows for row in table} == {frozenset(rows[0][0])}


@pytest.mark.parametrize("tool", ["verify_checkpoint", "inspect_checkpoint"])
def test_tools_do_not_import_torch(tmp_path, tool):
    snapshot(tmp_path)
    program = f"import sys, {tool}; {tool}.main([{str(tmp_path)!r}, '--json']); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": f"{REPOSITORY / 'tools'}:{REPOSITORY}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stderr
    assert json.loads(done.stdout.removesuffix("False\n"))


CHAINED, LEFT_OUT = f"layers.{LAYERS - 1}.expert.0", "layers.0.expert.1"


def chain(root):
    """A full save and two gradients of an expert after it, each in a checkpoint that lacks another expert."""
    for iteration in (3, 4, 5):
        model = Model(iteration=iteration)
        model.facts = replace(model.facts, iteration=iteration, policy="selective")
        if iteration > 3:
            model.operators = {name: one for name, one in model.operators.items() if name != LEFT_OUT}
            model.operators[CHAINED] = "grad", 2
            of = {name: [one for one in model.tensors if operator_of(one.name) == name] for name in (CHAINED, LEFT_OUT)}
            model.tensors = [one for one in model.tensors if one not in of[CHAINED] + of[LEFT_OUT]]
            model.tensors += [replace(one, slot="grad") for one in of[CHAINED] if one.slot == "master"]
        write_snapshot(model, root, 2, lambda count: None)


def test_gradients_need_their_base_state(capsys, tmp_path):
    """Without the full save, then without the first of the gradients."""
    chain(tmp_path)
    assert verify(capsys, tmp_path, "--all") == (0, [])
    told = inspect(capsys, tmp_path, "--by", "operator")
    assert told["complete"] and [row.get("base") for row in told["rows"] if row["name"] == CHAINED] == [3]
    for missing in (3, 4):
        shutil.rmtree(tmp_path / f"iter_{missing:07d}")
        code, (problem, *others) = verify(capsys, tmp_path)
        wrong = f"{CHAINED}: its gradients follow the state of iteration {missing},"
        assert code == 1 and not others and wrong in problem


def test_expert_age_and_gradient_chain_are_shown(capsys, tmp_path):
    chain(tmp_path)
    told = inspect(capsys, tmp_path, "--by", "operator")
    saved = {name: dict(base=5, until=5, age=0) for name in ("layers.0.expert.0", f"layers.{LAYERS - 1}.expert.1")}
    old = {CHAINED: dict(base=3, until=5, age=2), LEFT_OUT: dict(base=3, until=3, age=2)}
    assert told["experts"] == saved | old and told["stale"] == {LEFT_OUT: 3}
    rows = {row["name"]: {key: row[key] for key in ("base", "until", "age") if key in row} for row in told["rows"]}
    assert {name: row for name, row in rows.items() if row} == saved | old
    assert list(rows) == [row["name"] for row in inspect(capsys, tmp_path / "iter_0000003", "--by", "operator")["rows"]]
    assert summary.main([str(tmp_path), "--by", "operator"]) == 0
    text = capsys.readouterr().out
    ages = next(line for line in text.splitlines() if "gradients of" in line)
    assert re.findall(r"\d+", ages) == ["1", "2", "1", "2"]  # mean age, largest; experts with gradients, most of them
    lines = {line.split()[0]: line.rstrip() for line in text.splitlines() if line.strip()}
    assert lines[CHAINED].split()[-5:] == ["2", "3,", "gradients", "to", "5"]
    assert lines[LEFT_OUT].split()[-2:] == ["2", "3"]
    earlier = inspect(capsys, tmp_path, "--iteration", "4")["experts"]
    assert (earlier[CHAINED], earlier[LEFT_OUT]["age"]) == (dict(base=3, until=4, age=1), 1)
    assert inspect(capsys, tmp_path, "--iteration", "3")["stale"] == {}


def test_experts_of_full_policy_have_no_age(capsys, tmp_path):
    snapshot(tmp_path)
    assert inspect(capsys, tmp_path)["experts"] == {}
    assert summary.main([str(tmp_path), "--by", "operator"]) == 0
    assert "state of" not in capsys.readouterr().out
