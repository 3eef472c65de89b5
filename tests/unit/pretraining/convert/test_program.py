"""Conversion is exact, holds a few tensors at a time, and refuses what it cannot do, in one sentence."""

import errno
import json
import math
import pickle
import re
import resource
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.convert import program
from megatron.pretraining.convert.contents import complete_bounds, cut_tensors
from megatron.pretraining.convert.dense import DenseContents, write_dense
from megatron.pretraining.convert.snapshot import SnapshotContents, write_snapshot
from moc.store.manifest import Manifest
from moc.store.shard_file import TensorBox
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.conftest import REPOSITORY
from tests.unit.inspect.checkpoints import publish_again
from tests.unit.inspect.test_verify import flip
from tests.unit.pretraining.convert.models import Model, shapes

FC1 = "decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight_w"
BF16 = torch.bfloat16


def snapshot(root, model=None, writers=2):
    """A checkpoint of Format v1."""
    return write_snapshot(model or Model(), root, writers, lambda count: None)


def dense(root, model=None, writers=2, dtype=BF16):
    """A dense checkpoint."""
    return write_dense(model or Model(), root, writers, dtype, 10**9, lambda count: None)


def convert(*argv):
    assert program.main([str(word) for word in argv]) == 0


def refused(capsys, *argv) -> str:
    """What the tool says when it refuses."""
    capsys.readouterr()
    assert program.main([str(word) for word in argv]) == 1
    out, error = capsys.readouterr()
    assert not out and error.startswith("convert_checkpoint: ") and error.count("\n") == 1
    return error


def values(contents):
    return {(t.name, t.slot): contents.read(t.name, t.slot, t.region) for t in contents.tensors}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one)


def checkpoint(root):
    return root / "iter_0000003"


@st.composite
def tensors(draw):
    some = draw(st.lists(st.tuples(st.lists(st.integers(1, 6), max_size=3), st.booleans()), min_size=1, max_size=5))
    return [
        TensorBox(f"t{i}", "param", tuple(shape), complete_bounds(tuple(shape)), BF16 if half else torch.float32)
        for i, (shape, half) in enumerate(some)
    ]


@given(tensors(), st.integers(1, 7))
def test_parts_cover_all_tensors_once_in_equal_sizes(whole, parts):
    found = cut_tensors(whole, parts)
    assert len(found) == parts
    counts = {tensor.name: torch.zeros(tensor.global_shape) for tensor in whole}
    for entry in (entry for part in found for entry in part):
        counts[entry.name][entry.region.slices()] += 1
    assert all((count == 1).all() for count in counts.values())
    sizes = [sum(entry.nbytes for entry in part) for part in found]
    assert max(sizes) - min(sizes) <= 8  # an element at either end


def test_snapshot_round_trips_through_dense_checkpoint(tmp_path):
    model = Model()
    snapshot(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", "--writers", 5)
    convert(tmp_path / "c", tmp_path / "d", "--to", "snapshot", "--writers", 1)
    same(values(SnapshotContents(checkpoint(tmp_path / "d"))), values(model))
    assert len(list(checkpoint(tmp_path / "c").glob("rank_*"))) == 5
    manifest = Manifest.from_json((checkpoint(tmp_path / "d") / "manifest.json").read_text(), "d")
    assert dict(manifest.state) == {"interval": None, **model.facts.state}
    assert {name: (entry.detail, entry.step) for name, entry in manifest.operators.items()} == model.operators


def test_facts_survive_in_format_v1(tmp_path):
    model = Model(steps={"output": 5})
    snapshot(tmp_path / "a", model)
    convert(tmp_path / "a", tmp_path / "b", "--to", "snapshot", "--writers", 3)
    found = SnapshotContents(checkpoint(tmp_path / "b"))
    assert found.operators == model.operators
    assert (found.facts.policy, found.facts.layout, found.facts.state) == ("full", {"world": 2}, model.facts.state)
    assert found.facts.writers == 3


def test_dense_checkpoint_converts_to_dense(tmp_path):
    dense(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "--to", "torch_dist", "--writers", 3, "--max-file-size", 1)
    same(values(DenseContents(checkpoint(tmp_path / "b"))), values(Model()))
    assert len(list(checkpoint(tmp_path / "b").glob("optimizer/*"))) == 3


def test_weight_files_respect_size_limit(tmp_path):
    snapshot(tmp_path / "a", Model(shapes(hidden=200, width=500), params_dtype="fp32"))
    convert(tmp_path / "a", tmp_path / "b", "--max-file-size", 1)
    sizes = [path.stat().st_size for path in checkpoint(tmp_path / "b").glob("*.distcp")]
    assert sum(sizes) > 3e6 and max(sizes) < 1.1e6  # with some for what torch writes around each tensor


def test_weights_are_rounded_masters(tmp_path):
    snapshot(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    found = DenseContents(checkpoint(tmp_path / "b"))
    for (name, slot), master in values(Model()).items():
        if slot == "master":
            assert torch.equal(found.weight(name, complete_bounds(master.shape)), master.to(BF16))
        elif slot == "param":  # biases of routers keep their dtype
            assert torch.equal(found.weight(name, complete_bounds(master.shape)), master)


def test_dtype_comes_from_flags_if_checkpoint_has_none(tmp_path, capsys):
    snapshot(tmp_path / "a", Model(params_dtype=None))
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b")) == "dtype-missing"
    assert not (tmp_path / "b").exists()
    convert(tmp_path / "a", tmp_path / "b", "--dtype", "fp16")
    assert DenseContents(checkpoint(tmp_path / "b")).compute_dtype == torch.float16
    said = refused(capsys, tmp_path / "b", tmp_path / "c", "--dtype", "bf16")
    assert only_code(said) == "dtype-conflict" and "fp16" in said and "--dtype bf16" in said


def test_weights_convert_without_optimizer_state(tmp_path):
    snapshot(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "--no-optim")
    assert not (checkpoint(tmp_path / "b") / "optimizer").exists()
    assert json.loads((checkpoint(tmp_path / "b") / "training_state.json").read_text())["optimizer"] is None
    convert(tmp_path / "b", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "d")
    found = [values(DenseContents(checkpoint(tmp_path / name))) for name in ("b", "d")]
    same(*found)
    whole = values(Model())
    kept = {(name, "param"): value.to(BF16) for (name, slot), value in whole.items() if slot == "master"}
    same(found[0], kept | {key: value for key, value in whole.items() if key[1] == "param"})


def test_foreign_checkpoint_requires_trust(tmp_path, capsys):
    """Without a manifest of ours: only if it is trusted, and weights alone."""
    directory = dense(tmp_path / "a")
    for name in ("manifest.json", "training_state.json"):
        (directory / name).unlink()
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b")) == "manifest-missing"
    convert(tmp_path / "a", tmp_path / "b", "--trust")
    state = SnapshotContents(checkpoint(tmp_path / "b")).facts.state
    assert state["shape"] == {"num_layers": 2, "num_experts": 2, "moe_layer_freq": 1}
    assert (state["iteration"], state["optimizer"], state["params_dtype"]) == (3, None, "bf16")
    convert(tmp_path / "b", tmp_path / "c")
    same(values(DenseContents(directory, trust=True)), values(DenseContents(checkpoint(tmp_path / "c"))))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_hashes_are_compared_before_unpickling(tmp_path, capsys):
    directory, trace = dense(tmp_path / "a"), tmp_path / "exploded"
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(str(trace))))
    assert ".metadata" in refused(capsys, tmp_path / "a", tmp_path / "b")
    (directory / "manifest.json").rename(tmp_path / "manifest.json")
    (directory / "training_state.json").unlink()
    refused(capsys, tmp_path / "a", tmp_path / "b")
    assert not trace.exists() and not (tmp_path / "b").exists()


@each_row("target", ["snapshot", "torch_dist"])
def test_damage_is_named_and_nothing_is_committed(tmp_path, capsys, target):
    path = snapshot(tmp_path / "a") / "rank_00001.safetensors"
    last = 8 * path.stat().st_size - 1
    flip(path, last)
    said = refused(capsys, tmp_path / "a", tmp_path / "b", "--to", target)
    assert only_code(said) == "checkpoint-damaged" and str(path) in said
    assert not (checkpoint(tmp_path / "b") / "manifest.json").exists()
    flip(path, last)
    flip(path, 800)
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b", "--to", target)) == "checkpoint-damaged"
    path.unlink()
    assert "rank_00001.safetensors" in refused(capsys, tmp_path / "a", tmp_path / "b", "--to", target)
    snapshot(tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "b", "--to", target)  # what the failed conversions have left does not matter


@each_row("name", ["optimizer/rank_00001.safetensors", "__1_0.distcp", "common.pt", ".metadata"])
def test_damage_in_dense_checkpoint_is_named(tmp_path, capsys, name):
    path = dense(tmp_path / "a") / name
    flip(path, 8 * path.stat().st_size - 1)
    said = refused(capsys, tmp_path / "a", tmp_path / "b")
    assert only_code(said) == "checkpoint-damaged" and name in said


@each_row(
    "lost, words",
    [
        ("rank_00001.*", "there is no exp_avg_sq of"),
        ("rank_*", "there is no exp_avg and no exp_avg_sq and no master of"),
    ],
)
def test_missing_optimizer_state_is_named(tmp_path, capsys, lost, words):
    directory = dense(tmp_path / "a")
    for path in directory.glob(f"optimizer/{lost}"):
        path.unlink()
    publish_again(directory)
    assert words in refused(capsys, tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "b", "--no-optim")


def without(pattern):
    return {name: shape for name, shape in shapes().items() if not re.search(pattern, name)}


@each_row(
    "model, words",
    [
        (Model(without(r"layers\.1\.")), "layers.1.attention is not there, nor are 4 other operators"),
        (Model(without(r"experts\.1\.")), "layers.0.expert.1 is not there"),
        (Model(without(r"layers\.1.*linear_proj")), "linear_proj.weight make up 16 of 32 elements"),
        (Model(without("weight_v")), "experts.linear_fc1.weight make up"),
        (Model(steps={"output": 3}), "different numbers of updates (embedding 2 and output 3)"),
        (Model(optimizer="sgd"), "there is no momentum_buffer of embedding.word_embeddings.weight"),
        (Model(shape=None), "does not describe the shape of a model"),
    ],
    ids=["layer", "expert", "weight", "half", "steps", "slot", "shape"],
)
def test_incomplete_model_is_not_written_as_dense_checkpoint(tmp_path, capsys, model, words):
    snapshot(tmp_path / "a", model)
    assert words in refused(capsys, tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    convert(tmp_path / "a", tmp_path / "b", "--to", "snapshot")


def test_weight_differing_from_master_is_refused(tmp_path, capsys):
    directory = dense(tmp_path / "a")
    fp16 = dense(tmp_path / "other", dtype=torch.float16)
    for path in [*fp16.glob("*.distcp"), fp16 / ".metadata"]:
        path.replace(directory / path.name)
    publish_again(directory)
    convert(tmp_path / "a", tmp_path / "b")  # rounded in another way, and still the masters
    other = dense(tmp_path / "nudged", Nudged(), dtype=torch.float16)
    for path in [*other.glob("*.distcp"), other / ".metadata"]:
        path.replace(directory / path.name)
    publish_again(directory)
    said = refused(capsys, tmp_path / "a", tmp_path / "c")
    assert only_code(said) == "weight-differs-from-master" and FC1 in said
    convert(tmp_path / "a", tmp_path / "c", "--no-optim")


class Nudged(Model):
    """The model, with another value in one tensor."""

    def read(self, name, slot, region):
        """See :class:`Model`."""
        return super().read(name, slot, region) + (name == FC1)


def edited(directory, **changes):
    path = directory / "manifest.json"
    manifest = Manifest.from_json(path.read_text(), "m")
    path.write_text(type(manifest)(**{**vars(manifest), **changes}).to_json())


def test_contradicting_manifest_is_refused(tmp_path, capsys):
    directory = snapshot(tmp_path / "a")
    whole = Manifest.from_json((directory / "manifest.json").read_text(), "m")
    edited(directory, writers=3)
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b")) == "snapshot-parts-missing"
    edited(directory, writers=2, operators={k: v for k, v in whole.operators.items() if k != "output"})
    said = refused(capsys, tmp_path / "a", tmp_path / "b")
    assert only_code(said) == "checkpoint-damaged" and "output" in said
    edited(directory, operators=whole.operators, iteration=4)
    assert "not of 4" in refused(capsys, tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("target, limit", [("torch_dist", 3_000), ("snapshot", 400_000)])  # in a header, or in data
def test_failed_write_is_reported_and_leaves_no_manifest(tmp_path, target, limit, run_tool):
    snapshot(tmp_path / "a", Model(shapes(hidden=128, width=300)))
    limits = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    done = run_tool("convert_checkpoint", "a", "b", "--to", target, cwd=tmp_path, **limits)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert only_code(done.stderr) == "system-call-failed" and str(errno.EFBIG) in done.stderr
    assert not list((tmp_path / "b").glob("*/manifest.json"))
    convert(tmp_path / "a", tmp_path / "b", "--to", target)


@each_row("target, write", [("snapshot", snapshot), ("torch_dist", dense)])
def test_existing_output_is_not_replaced(tmp_path, capsys, target, write):
    snapshot(tmp_path / "a")
    there = write(tmp_path / "b")
    before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b", "--to", target)) == "output-exists"
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before


@each_row("target", ["snapshot", "torch_dist"])
def test_output_of_other_program_is_not_replaced(tmp_path, capsys, target):
    snapshot(tmp_path / "a")
    other = checkpoint(tmp_path / "b") / "mp_rank_00" / "model.pt"
    other.parent.mkdir(parents=True)
    other.write_text("precious")
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b", "--to", target)) == "output-exists"
    assert other.read_text() == "precious"


def test_save_in_progress_is_not_disturbed(tmp_path, capsys):
    snapshot(tmp_path / "a")
    (tmp_path / "b" / ".iter_0000009.incomplete").mkdir(parents=True)
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b")) == "save-in-progress"
    assert (tmp_path / "b" / ".iter_0000009.incomplete").exists()


@each_row(
    "argv",
    [
        [],
        ["nowhere", "there"],
        ["a/iter_0000003", "there", "--iteration", "3"],
        ["a", "there", "--writers", "0"],
        ["a", "there", "--max-file-size", "0"],
        ["a", "there", "--to", "pickle"],
    ],
    ids=str,
)
def test_usage_error_exits_with_code_2(tmp_path, monkeypatch, argv):
    snapshot(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        program.main(argv)
    assert ended.value.code == 2


def test_newest_valid_checkpoint_is_converted(tmp_path, capsys):
    assert only_code(refused(capsys, tmp_path, tmp_path / "b")) == "checkpoint-missing"
    snapshot(tmp_path / "a")
    (tmp_path / "a" / "iter_0000007").mkdir()  # without a manifest it does not exist
    (tmp_path / "a" / "iter_0000007" / "rank_00000.safetensors").touch()
    convert(tmp_path / "a", tmp_path / "b")
    assert checkpoint(tmp_path / "b").is_dir()
    assert only_code(refused(capsys, tmp_path / "a", tmp_path / "b", "--iteration", 7)) == "checkpoint-missing"


MEASURED = """
import json, os, sys, threading, time
from megatron.pretraining.convert import dense, program
peak, done = 0, False

def private():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.002)

for arguments in json.loads(sys.argv[1]):
    if child := os.fork():  # which has none of the memory that one before it took
        assert os.waitpid(child, 0)[1] == 0
        continue
    before = private()
    thread = threading.Thread(target=watch)
    thread.start()
    code = program.main(arguments)
    done = True
    thread.join()
    print(peak - before, file=sys.stderr, flush=True)
    os._exit(code)
"""


@pytest.mark.slow
def test_conversion_holds_few_tensors_in_memory(tmp_path):
    """Of a checkpoint of 180 MB whose largest tensor has 1.6 MB; its own memory, since the kernel's cache is not it."""
    parameters = shapes(hidden=400, width=1000, layers=5)
    model = Model(parameters, biased=False, shape={"num_layers": 5, "num_experts": 2, "moe_layer_freq": 1})
    snapshot(tmp_path / "a", model)
    size = 12 * sum(map(math.prod, parameters.values()))
    assert size > 150e6 and 4 * max(map(math.prod, parameters.values())) < 2e6
    ways = [["a", "b", "--max-file-size", "4"], ["b", "c"], ["c", "d", "--to", "snapshot"]]
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, json.dumps(ways)]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    peaks = [line for line in told.stderr.splitlines() if line.lstrip("-").isdigit()]  # a CUDA build may warn, too
    for way, peak in zip(ways, peaks, strict=True):
        assert int(peak) < size / 8, way
