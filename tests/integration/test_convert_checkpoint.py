"""Conversion loses nothing: there and back it is the same checkpoint, and the run goes on as it would have."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from megatron.pretraining.convert import program
from megatron.pretraining.convert.dense import DenseContents
from megatron.pretraining.convert.snapshot import SnapshotContents
from megatron.pretraining.convert.torch_dist import WeightsReader
from moc.errors import codes_in
from moc.inspect import verify
from moc.state.operators import MODULE_STATE, Region
from tests.integration.entry_jobs import BASE, EP2, MOE, OWN_PROGRAM, USER_SCRIPT, ZERO1, Ended, run
from tests.integration.snapshot_files import node_memory
from tests.integration.tiny import train as trained
from tests.shared import ALL

ELASTIC = "--elastic --elastic-slots 4 --elastic-min-replicas 1 --calculate-per-token-loss --micro-batch-size 1"
BIASES = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
RUNS = {  # program and flags of two workers
    "a script": (USER_SCRIPT, EP2),
    "a script, bf16, ZeRO": (USER_SCRIPT, f"{EP2} {ZERO1} --dist-ckpt-optim-fully-reshardable --bf16"),
    "bf16, ZeRO": (OWN_PROGRAM, f"{EP2} {ZERO1} --bf16"),
    "fp16, stages, some layers dense, router biases": (
        OWN_PROGRAM,
        f"""{MOE} {ZERO1} {BIASES} --fp16 --initial-loss-scale 1024 --pipeline-model-parallel-size 2
            --moe-layer-freq [0,1]""",
    ),
    "shared experts, tied embeddings, sequence parallel": (
        OWN_PROGRAM,
        f"""{EP2} --moe-shared-expert-intermediate-size 32 --tensor-model-parallel-size 2 --sequence-parallel
            --expert-tensor-parallel-size 1""",
    ),
    "elastic": (OWN_PROGRAM, f"{MOE} {ELASTIC}"),
    "deepspeed": (OWN_PROGRAM, f"{EP2} --deepspeed --zero-stage 1"),
}


def convert(*argv: object) -> None:
    assert program.main([str(word) for word in argv]) == 0


def train(directory: Path, run_of: tuple[Path, str], flags: str, log: str) -> Ended:
    script, own = run_of
    base = BASE.replace("--untie-embeddings-and-output-weights", "") if "sequence-parallel" in own else BASE
    ended = run(directory, script, 2, f"--train-iters 4 {own} {flags}", log=log, base=base)
    assert ended.code == 0, ended.output[-4000:]
    return ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains four iterations, with a checkpoint and a snapshot after two; once each."""
    done: dict[str, tuple[Path, Ended]] = {}

    def once(name: str) -> tuple[Path, Ended]:
        if name not in done:
            root = tmp_path_factory.mktemp("converted")
            saves = "--save saved --save-interval 2 --ckpt-policy full --ckpt-dir taken --snapshot-interval 2"
            done[name] = root, train(root, RUNS[name], f"{saves} --ckpt-keep 4", "whole")
        return done[name]

    return once


def directory(root: Path, name: str) -> Path:
    return root / name / "iter_0000002"


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of Megatron-LM's weights, by key."""
    reader = WeightsReader(path)
    shapes = {key: shape for key, (shape, _) in reader.tensors().items() if not key.startswith(("optim", "chained"))}
    return {key: reader.read(key, Region((0,) * len(shape), shape)) for key, shape in shapes.items()}


def regions(contents) -> dict[tuple[str, str], torch.Tensor]:
    """Every slot of every tensor of the unpartitioned model; values of user modules are not converted."""
    kept = (tensor for tensor in contents.tensors if not tensor.name.startswith(MODULE_STATE))
    return {(tensor.name, tensor.slot): contents.read(tensor.name, tensor.slot, tensor.region) for tensor in kept}


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


def goes_on(whole: Ended, rest: Ended) -> None:
    assert rest.losses == {iteration: one for iteration, one in whole.losses.items() if iteration > 2}


@pytest.mark.parametrize("name", RUNS)
def test_snapshot_converts_to_checkpoint_that_resumes(name, runs):
    root, whole = runs(name)
    convert(root / "taken", root / "dense", "--iteration", 2, "--max-file-size", 1)
    same(weights(directory(root, "saved")), weights(directory(root, "dense")))
    convert(root / "dense", root / "back", "--writers", 3)
    same(*(regions(SnapshotContents(directory(root, one))) for one in ("taken", "back")))
    goes_on(whole, train(root, RUNS[name], "--load dense", "by_dense"))


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_converts_to_snapshot_that_resumes(name, runs, capsys):
    root, whole = runs(name)
    convert(root / "saved", root / "snapshots", "--iteration", 2)
    same(*(regions(SnapshotContents(directory(root, one))) for one in ("taken", "snapshots")))
    convert(root / "snapshots", root / "recut", "--to", "snapshot", "--writers", 1)
    same(*(regions(SnapshotContents(directory(root, one))) for one in ("recut", "snapshots")))
    steps = [dict(SnapshotContents(directory(root, one)).operators) for one in ("taken", "recut")]
    assert steps[0] == steps[1]
    assert verify.main([str(root / one) for one in ("saved", "snapshots", "recut")]) == 0, capsys.readouterr().out
    goes_on(whole, train(root, RUNS[name], "--ckpt-policy full --ckpt-dir recut", "by_snapshot"))


def test_weights_only_if_optimizer_state_needs_layout(tmp_path, capfd):
    script = USER_SCRIPT, f"{EP2} {ZERO1}"
    train(tmp_path, script, "--train-iters 2 --save saved --save-interval 2", "whole")
    command = [str(tmp_path / "saved"), str(tmp_path / "snapshots")]
    assert program.main(command) == 1
    assert codes_in(capfd.readouterr().err)[-1] == "optimizer-state-missing"
    convert(*command, "--no-optim")
    convert(tmp_path / "snapshots", tmp_path / "dense")
    same(weights(directory(tmp_path, "saved")), weights(directory(tmp_path, "dense")))
    assert {slot for _, slot in regions(DenseContents(directory(tmp_path, "dense")))} == {"param"}
    rest = train(tmp_path, script, "--load dense --no-load-optim --train-iters 3", "rest")
    assert [*rest.losses] == [3]


def test_checkpoint_of_earlier_entry_point_converts(data, tmp_path):
    trained("EP2", data | dict(save=str(tmp_path / "saved"), train_iters=2))
    convert(tmp_path / "saved", tmp_path / "snapshots")
    convert(tmp_path / "snapshots", tmp_path / "back")
    same(weights(directory(tmp_path, "saved")), weights(directory(tmp_path, "back")))
    same(*(regions(DenseContents(directory(tmp_path, one))) for one in ("saved", "back")))


WRONG = {  # flags of a converter, and the code of its refusal
    "--seed 7 --adam-eps 1e-6 --moe-router-topk 1": "replay-not-identical",
    **(ALL and {"--num-layers 4": "checkpoint-of-another-model", "--optimizer sgd": "optimizer-excludes-flag"} or {}),
}
WINDOWS = {
    "sparse": "--ckpt-policy sparse --sparse-window 3",
    "gradient": "--ckpt-policy gradient --gradient-window 3 --persist-interval 3 --ckpt-tier memory",
}


@pytest.mark.parametrize("policy", WINDOWS)
def test_window_converts_to_state_of_its_iteration(policy, tmp_path, monkeypatch, capfd):
    """What is planted in the working directory is not imported."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("glob", "json", "secrets", "runpy", "signal", "moc"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = f"""{EP2} {ZERO1} {BIASES} --bf16 --hidden-dropout 0.1 --attention-dropout 0.1
        --clip-grad 0.3 --train-iters 12 --lr-decay-iters 12"""
    taken = f"{flags} --ckpt-blocking --ckpt-keep 12"
    kill = "--inject", "kill ranks=0,1 iteration=9 point=before_commit"
    with node_memory() as memory:
        window = f"{taken} {WINDOWS[policy]} --ckpt-memory-dir {memory} --ckpt-dir window"
        assert run(tmp_path, OWN_PROGRAM, 2, window, *kill, launcher="--max-restarts 0").code != 0
    full = f"{taken} --ckpt-policy full --snapshot-interval 1 --ckpt-dir full --exit-interval 8"
    assert run(tmp_path, OWN_PROGRAM, 2, full, log="full_log").code == 0

    words = shlex.split(f"{BASE} {flags}")
    its_rules = ["--lr", "7e-2", "--weight-decay", "0.3"]  # the schedule that the window stores continues
    convert(tmp_path / "window", tmp_path / "again", "--", *words, *its_rules)
    (again,) = (tmp_path / "again").glob("iter_*")
    convert(tmp_path / "full", tmp_path / "dense", "--iteration", int(again.name[5:]))
    was = tmp_path / "dense" / again.name
    same(weights(was), weights(again))
    same(regions(DenseContents(was)), regions(DenseContents(again)))
    assert {path.name for path in again.parent.iterdir()} == {again.name, "latest_checkpointed_iteration.txt"}

    assert not (tmp_path / "ran").exists()
    for wrong, code in WRONG.items():
        command = [tmp_path / "window", tmp_path / "other", "--", *words, *wrong.split()]
        assert program.main([str(word) for word in command]) == 1
        errors = capfd.readouterr().err
        assert codes_in(errors)[-1] == code, errors
        assert code != "replay-not-identical" or all(f"{name} is" in errors for name in wrong.split()[::2])
    assert list((tmp_path / "other").iterdir()) == []
