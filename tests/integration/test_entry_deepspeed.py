"""DeepSpeed's optimizer for models of Megatron-LM's scripts, and command lines of Megatron-DeepSpeed."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.integration.entry_jobs import BASE, EP2, FULL, MOE, OWN_PROGRAM, USER_SCRIPT, run
from tests.integration.test_entry import KILL_ALL, KILL_ONE, PP2, differing

pytestmark = pytest.mark.recovery

SAVE = "--save saved --save-interval 4"
OF_MEGATRON_DEEPSPEED = """
    --deepspeed --deepspeed_config {} --no-pipeline-parallel --num-experts 4 --topk 2
    --moe-expert-parallel-size 2 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.5 --create-moe-param-group
    --moe-min-capacity 4 --deepspeed-activation-checkpointing --checkpoint-activations --log-batch-size-to-tensorboard
"""
DS_CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
    "wall_clock_breakdown": True,
}


def optimizer_state(checkpoint):
    """The optimizer state of a checkpoint in DeepSpeed's partitions, by file."""
    return {file.name: load_file(file) for file in sorted((checkpoint / "optimizer").glob("*.safetensors"))}


def recovers(directory, script, flags, base=BASE):
    """Compares a job that loses a worker and later all of them with one without a fault; returns the latter."""
    plain = run(directory / "plain", script, 2, f"{flags} {SAVE}", base=base)
    assert plain.code == 0, plain.output[-4000:]
    snapshots = f"{FULL} --ckpt-tier memory --ckpt-dir snapshots --async-save"
    faults = "--inject", KILL_ONE, KILL_ALL
    ours = run(directory / "ours", script, 2, f"{flags} {SAVE} {snapshots}", *faults, base=base)
    assert ours.code == 0, ours.output[-4000:]
    assert len(ours.resumed_at()) == 2 and not ours.lost_snapshots() and ours.losses == plain.losses
    for name in ("iter_0000004", "iter_0000008"):
        one, other = (directory / job / "saved" / name for job in ("plain", "ours"))
        assert not differing(one, other)
        mine, theirs = optimizer_state(one), optimizer_state(other)
        assert len(mine) == 2 and mine.keys() == theirs.keys()
        for file, tensors in mine.items():
            assert tensors.keys() == theirs[file].keys()
            assert all(tensors[key].equal(theirs[file][key]) for key in tensors)
    return plain


def test_user_script_recovers_and_reshards(tmp_path):
    plain = recovers(tmp_path, USER_SCRIPT, f"{EP2} --user-gate --deepspeed")
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "plain/saved/iter_0000004", saved / "iter_0000004")
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    same = run(tmp_path / "same", USER_SCRIPT, 2, f"{EP2} --user-gate --deepspeed --load {saved}")
    assert same.losses == {i: plain.losses[i] for i in range(5, 9)}, same.output[-4000:]
    other = run(tmp_path / "other", USER_SCRIPT, 1, f"{MOE} --user-gate --deepspeed --zero-stage 2 --load {saved}")
    assert other.code == 0 and sorted(other.losses) == [5, 6, 7, 8], other.output[-4000:]
    for iteration, values in other.losses.items():
        assert values == pytest.approx(plain.losses[iteration], rel=1e-4)
    (file,) = (saved / "iter_0000004/optimizer").glob("rank_00001.*")
    file.write_bytes(file.read_bytes()[:-1])
    damaged = run(tmp_path / "damaged", USER_SCRIPT, 2, f"{EP2} --user-gate --deepspeed --load {saved}")
    assert damaged.code != 0 and file.name in damaged.output and "Traceback" not in damaged.output


def test_megatron_deepspeed_command_line_recovers(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    base = BASE.replace("--global-batch-size 8", "").replace("--micro-batch-size 4", "")
    base = base.replace("--transformer-impl local", "--transformer-impl local --bf16")
    plain = recovers(tmp_path, OWN_PROGRAM, OF_MEGATRON_DEEPSPEED.format(tmp_path / "ds.json"), base)
    for word in (
        "--moe-layer-freq [0,1]",
        "--moe-loss-coeff 0.01",
        "wall_clock_breakdown",
        "--deepspeed-activation",
    ):
        assert word in plain.output  # each change is printed


def test_tied_embeddings_equal_megatron_core(tmp_path):
    base = BASE.replace("--untie-embeddings-and-output-weights", "")
    theirs = run(tmp_path / "core", USER_SCRIPT, 2, f"{MOE} {PP2} --grad-norm exact", base=base)
    ours = run(tmp_path / "deepspeed", USER_SCRIPT, 2, f"{MOE} {PP2} --deepspeed", base=base)
    assert theirs.code == ours.code == 0, ours.output[-4000:]
    assert len(ours.losses) == 8
    (losses, norms), (expected, other_norms) = (zip(*job.losses.values(), strict=True) for job in (ours, theirs))
    assert losses == expected and norms == pytest.approx(other_norms, rel=1e-14)  # squares are summed by partition


def test_stock_norm_run_continues_without_optimizer_norm(tmp_path):
    """The snapshot tells the norm of its run, which neither DeepSpeed's optimizer nor elastic training computes."""
    base = f"{BASE} {MOE} --micro-batch-size 1 --calculate-per-token-loss"
    snapshots = "--ckpt-policy full --snapshot-interval 4 --ckpt-dir snapshots"
    stock = f"{snapshots} --grad-norm stock --exit-interval 4"
    first = run(tmp_path / "first", OWN_PROGRAM, 2, stock, base=base)
    assert first.code == 0, first.output[-4000:]
    found = {}
    for name, flags in {
        "exact": "--grad-norm exact",
        "deepspeed": "--deepspeed",
        "elastic": "--elastic --elastic-slots 4 --elastic-min-replicas 1",
    }.items():
        shutil.copytree(tmp_path / "first/snapshots", tmp_path / name / "snapshots")
        again = run(tmp_path / name, OWN_PROGRAM, 2, f"{snapshots} {flags}", base=base)
        assert again.code == 0 and again.resumed_at() == [4], again.output[-4000:]
        found[name] = [value for iteration in range(5, 9) for value in again.losses[iteration]]
    assert found["deepspeed"] == pytest.approx(found["exact"], rel=1e-5)
    assert found["elastic"] == pytest.approx(found["exact"], rel=1e-5)


def test_zero_stage_0_matches_megatron_core(tmp_path):
    theirs = run(tmp_path / "core", USER_SCRIPT, 2, EP2)
    ours = run(tmp_path / "deepspeed", USER_SCRIPT, 2, f"{EP2} --deepspeed --zero-stage 0")
    assert theirs.code == ours.code == 0 and "--zero-stage 0" in ours.output, ours.output[-4000:]
    assert ours.losses == theirs.losses and len(ours.losses) == 8
