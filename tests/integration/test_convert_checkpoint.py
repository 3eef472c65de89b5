"""Conversion loses nothing: there and back it is the same checkpoint, and the run goes on as it would have."""

import json
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron.pretraining.config import compose
from megatron.pretraining.convert import program
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.snapshot import SnapshotContents
from megatron.pretraining.convert.torch_dist import WeightsReader
from moc.errors import codes_in
from moc.inspect import verify
from moc.state.region import Region
from moc.store.regions import RegionReader
from tests import warm
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_layouts import CLOSE
from tests.integration.test_precision import BF16, FP16
from tests.integration.test_stock_reader import READER
from tests.integration.tiny import DEEP, EXPERT_BIAS, FLAGS, LAYOUTS, train
from tests.worlds import REPOSITORY

DENSE = dict(num_experts=None, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="allgather")
GELU = dict(swiglu=False, add_bias_linear=True, qk_layernorm=True, untie_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute", max_position_embeddings=16)  # fmt: skip
SHARED = dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True)
SGD = dict(use_distributed_optimizer=False, optimizer="sgd")
RUNS = {  # layout and flags
    "experts": ("PP2xEP2", {}),
    "bf16, router biases, shared experts": ("TP2xEP2", BF16 | EXPERT_BIAS | SHARED),
    "fp16, interleaved": ("interleaved", FP16),
    "sgd, some layers dense": ("EP2", SGD | DEEP | dict(moe_layer_freq=[0, 1, 1, 0])),
    "biases, tied, some layers dense": ("1", GELU | dict(moe_layer_freq=2, qk_layernorm_full_width=True)),
    "dense": ("DP2", DENSE | GELU | BF16),
}


def convert(*argv):
    assert program.main([str(word) for word in argv]) == 0


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Trains four iterations and saves after two; converts that to Format v1, into other files, and back; once each."""
    done = {}

    def run(name):
        if name not in done:
            layout, flags = RUNS[name]
            root = tmp_path_factory.mktemp("converted")
            whole = train(layout, data | flags | dict(save=str(root / "saved"), save_interval=2, train_iters=4))
            convert(root / "saved", root / "snapshots", "--iteration", 2, "--writers", 3)
            convert(root / "snapshots", root / "recut", "--to", "snapshot", "--writers", 2)
            convert(root / "recut", root / "back", "--max-file-size", 1)
            done[name] = root, whole
        return done[name]

    return run


def directory(root, name):
    return root / name / "iter_0000002"


def weights(path):
    """Every stock tensor, by key."""
    reader = WeightsReader(path)
    return {key: reader.read(key, Region((0,) * len(s), s)) for key, (s, _) in reader.tensors().items()}


def regions(contents):
    """Every slot of every tensor of the unpartitioned model."""
    return {(t.name, t.slot): contents.read(t.name, t.slot, t.region) for t in contents.tensors}


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("name", RUNS)
def test_there_and_back(name, runs):
    root, _ = runs(name)
    saved, back = directory(root, "saved"), directory(root, "back")
    same(weights(saved), weights(back))
    same(regions(DenseContents(saved)), regions(DenseContents(back)))
    before, after = (json.loads((path / "training_state.json").read_text()) for path in (saved, back))
    assert {key: after[key] for key in before} == before
    snapshot, recut = (regions(SnapshotContents(directory(root, name))) for name in ("snapshots", "recut"))
    same(snapshot, recut)
    same(snapshot, regions(DenseContents(saved)))
    steps = {step for _, step in SnapshotContents(directory(root, "recut")).operators.values()}
    assert steps == {None if "sgd" in name else 2}  # SGD does not count


@pytest.mark.parametrize("name", RUNS)
def test_all_of_it_is_whole(name, runs, capsys):
    root, _ = runs(name)
    paths = [str(root / name) for name in ("saved", "snapshots", "recut", "back")]
    assert verify.main(paths) == 0, capsys.readouterr().out
    assert [len(list(directory(root, name).glob("rank_*"))) for name in ("snapshots", "recut")] == [3, 2]


@pytest.mark.parametrize("name", RUNS)
def test_the_run_goes_on_as_it_would_have(name, runs, data):
    root, whole = runs(name)
    layout, flags = RUNS[name]
    rest = train(layout, data | flags | dict(load=str(root / "back"), train_iters=4))
    assert rest.start == 2
    assert rest.losses == whole.losses[2:] and rest.norms == whole.norms[2:]
    assert rest.weights == whole.weights


def test_a_policy_takes_over_from_save(runs, data, tmp_path):
    root, whole = runs("experts")
    convert(directory(root, "saved"), tmp_path)
    rest = train("PP2xEP2", data | dict(ckpt_policy="full", ckpt_dir=str(tmp_path), train_iters=4))
    assert rest.start == 2 and rest.weights == whole.weights


def test_another_layout_goes_on_too(runs, data):
    root, whole = runs("experts")
    rest = train("TP2xEP2", data | dict(load=str(root / "back"), train_iters=4))
    assert rest.losses == pytest.approx(whole.losses[2:], abs=CLOSE)


def test_weights_are_cut_as_one_worker_cuts_them(data, tmp_path):
    train("1", data | dict(save=str(tmp_path / "saved"), train_iters=2))
    convert(tmp_path / "saved", tmp_path / "snapshots")
    convert(tmp_path / "snapshots", tmp_path / "back")
    saved, back = (described(directory(tmp_path, name)) for name in ("saved", "back"))
    saved.pop("common_state/shard_0_1", None)  # megatron-core 0.19 has it in place of common.pt, which it reads, too
    assert {key: known for key, known in back.items() if key in saved} == saved
    assert all(key.partition("/")[0].endswith("layernorm._extra_state") or "core_attention" in key
               for key in back.keys() - saved.keys())  # fmt: skip


def described(path):
    """What torch's metadata says of every tensor and object."""
    return {
        key: (known.size, known.properties.dtype, sorted(map(repr, known.chunks))) if hasattr(known, "chunks") else None
        for key, known in FileSystemReader(path).read_metadata().state_dict_metadata.items()
    }


def test_a_stock_reader_loads_converted_weights(runs, data):
    root, _ = runs("experts")
    at_two = dict(load=str(root / "saved"), ckpt_step=2, train_iters=2, override_opt_param_scheduler=True)
    ours = train("1", data | at_two)
    command = [sys.executable, "-c", READER, str(directory(root, "back"))]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    read = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout.splitlines()[-1]) == ours.workers[0]["parameters"]


def test_weights_alone(runs, data, tmp_path):
    root, _ = runs("experts")
    convert(directory(root, "saved"), tmp_path / "weights", "--no-optim")
    reader = RegionReader(directory(tmp_path, "weights").glob("rank_*"))
    assert {source.entry.slot for source in reader.sources()} == {"param"}
    convert(tmp_path / "weights", tmp_path / "back")
    same(weights(directory(root, "saved")), weights(directory(tmp_path, "back")))
    rest = train("PP2xEP2", data | dict(load=str(tmp_path / "back"), load_optim=False, train_iters=3))
    assert rest.start == 2 and len(rest.losses) == 1


SNAPSHOTS = {  # layout and flags
    "fp32": ("PP2xEP2", {}),
    "bf16, router biases": ("TP2xEP2", BF16 | EXPERT_BIAS),
    "fp16, replicated": ("EP2", FP16 | dict(use_distributed_optimizer=False)),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_run_goes_on_from_its_snapshot_by_load_and_back(name, data, tmp_path):
    layout, flags = SNAPSHOTS[name]
    flags = data | flags | dict(train_iters=4)
    taken = dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "taken"), snapshot_interval="2", ckpt_keep=4)
    whole = train(layout, flags | taken)
    convert(tmp_path / "taken", tmp_path / "dense", "--iteration", 2)
    by_load = train(layout, flags | dict(load=str(tmp_path / "dense")))
    assert by_load.start == 2 and by_load.weights == whole.weights
    convert(tmp_path / "dense", tmp_path / "back", "--writers", 5)
    same(*(regions(SnapshotContents(directory(tmp_path, name))) for name in ("taken", "back")))
    by_snapshot = train(layout, flags | dict(ckpt_policy="full", ckpt_dir=str(tmp_path / "back")))
    assert by_snapshot.start == 2 and by_snapshot.weights == whole.weights


def test_a_window_becomes_the_state_that_was_there(data, tmp_path, monkeypatch, capfd):
    """What is planted in the working directory is not imported."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("glob", "json", "secrets", "runpy", "signal", "moc"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = dict(train_iters=8, lr=1e-2, clip_grad=0.3)
    flags = data | DROPOUT | BF16 | EXPERT_BIAS | small | dict(ckpt_blocking=True, ckpt_keep=8)
    sparse = flags | dict(ckpt_policy="sparse", sparse_window=3, ckpt_dir=str(tmp_path / "sparse"))
    train("EP2", sparse)
    train("EP2", flags | dict(ckpt_policy="full", snapshot_interval=1, ckpt_dir=str(tmp_path / "full")))
    convert(tmp_path / "full", tmp_path / "dense", "--iteration", 7)

    given = tmp_path / "flags.yaml"
    given.write_text(compose(FLAGS | LAYOUTS["EP2"][1] | sparse).to_yaml())
    window = [tmp_path / "sparse" / "iter_0000007", tmp_path / "window", "--", "--config", given]
    with warm.starts(any_session=True):
        convert(*window)
    was, again = (tmp_path / name / "iter_0000007" for name in ("dense", "window"))
    same(weights(was), weights(again))
    same(regions(DenseContents(was)), regions(DenseContents(again)))
    before, after = (json.loads((path / "training_state.json").read_text()) for path in (was, again))
    assert {key: after[key] for key in after.keys() - {"interval"}}.items() <= before.items()
    assert after["iteration"] == after["optimizer_step"] == 7
    assert {path.name for path in again.parent.iterdir()} == {"iter_0000007", "latest_checkpointed_iteration.txt"}

    given.write_text(compose(FLAGS | LAYOUTS["EP2"][1] | sparse | dict(split="50,45,5")).to_yaml())
    window[1] = tmp_path / "other"
    assert program.main([str(word) for word in window]) == 1  # cold: a fork of the warm process imports nothing
    assert codes_in(capfd.readouterr().err)[-1] == "replay-differs"
    assert list((tmp_path / "other").iterdir()) == [] and not (tmp_path / "ran").exists()
