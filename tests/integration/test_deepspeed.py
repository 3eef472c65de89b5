"""DeepSpeed's ZeRO under this project's loop: the bits of the native engine, saved and recovered in the same way."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.live.job import Events, free_ports
from moc.fault_points import STEP
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.test_layouts import assert_alike
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS, known, train
from tests.shared import ALL
from tests.worlds import run_world

ROOT = Path(__file__).parents[2]
ZERO1 = dict(use_distributed_optimizer=False, deepspeed=True)
ZERO2 = ZERO1 | dict(zero_stage=2)
HARD = BF16 | EXPERT_BIAS | dict(global_batch_size=8, clip_grad=0.3, lr=1e-2, weight_decay=0.1, train_iters=4)
DP4_EP2 = dict(expert_model_parallel_size=2)  # of the layout EP4
SHARED = dict(moe_shared_expert_intermediate_size=64, untie_embeddings_and_output_weights=False)

SAME_BITS = {  # layout, flags of both engines, DeepSpeed's
    "ZeRO-1": ("EP4", DP4_EP2, ZERO1),
    "ZeRO-2, offloaded, small buckets, in turns": (
        "EP4",
        DP4_EP2,
        ZERO2 | dict(cpu_optimizer=True, zero_reduce_bucket_size=1000, zero_round_robin_gradients=True),
    ),
    "pipeline": ("PP2xEP2", {}, ZERO1),
}
if ALL:
    SAME_BITS["ZeRO-2"] = ("EP4", DP4_EP2, ZERO2)
    SAME_BITS["tensor parallel"] = ("TP2xEP2", {}, ZERO2)
    SAME_BITS["products in 8 bits"] = ("DP2", dict(fp8_format="hybrid"), ZERO2)
    SAME_BITS["loss per token"] = ("DP2", dict(calculate_per_token_loss=True), ZERO2)


def assert_same_bits(ours, native, start=0):
    """Up to the norm's last digits: sums over more than two workers are grouped otherwise."""
    assert ours.losses == native.losses[start:] and ours.weights == native.weights
    assert ours.norms == pytest.approx(native.norms[start:], rel=1e-9)


@pytest.mark.parametrize("name", SAME_BITS)
def test_bf16_deepspeed_is_bit_identical_to_native_engine(name, data):
    layout, flags, zero = SAME_BITS[name]
    native, ours = known(layout, data | HARD | flags), train(layout, data | HARD | flags | zero)
    assert min(native.norms) > HARD["clip_grad"]  # so that norms matter
    assert_same_bits(ours, native)


FP32 = {
    "tensor parallel": ("TP2xEP2", ZERO2 | dict(qk_layernorm=True), dict(qk_layernorm=True)),
    "shared experts, tied": ("DP2", ZERO2 | SHARED, SHARED),
}


@pytest.mark.parametrize("name", FP32 if ALL else list(FP32)[:1])
def test_fp32_deepspeed_is_as_close_as_another_layout(name, data):
    layout, zero, model = FP32[name]
    four = dict(global_batch_size=4, train_iters=3)
    assert_alike(train(layout, data | four | zero), known(layout, data | four | model))


def test_interrupted_iteration_leaves_no_trace(data):
    flags = data | HARD | DP4_EP2 | ZERO2
    size, parallel = LAYOUTS["EP4"]
    told = run_world(
        size, "tests.integration.deepspeed_bodies:step_with_cuts", flags=FLAGS | parallel | flags, cuts=[1]
    )
    native = known("EP4", data | HARD | DP4_EP2)
    assert [record[0] for record in told[0]["records"]] == native.losses
    for worker in told:
        assert worker["weights"].items() <= native.weights.items()
        assert worker["collectives"] == [] and worker["same"] and worker["devices"] == ["cpu"]


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Both engines train, and save checkpoints and snapshots after the second iteration; with each, where."""
    places = {}
    for name, engine in (("native", {}), ("deepspeed", ZERO2)):
        directory = str(tmp_path_factory.mktemp(name))
        more = dict(save=directory, save_interval=2, ckpt_policy="full", snapshot_interval=2, ckpt_keep=9)
        train("EP4", data | HARD | DP4_EP2 | engine | more)
        places[name] = directory
    return places


MOVES = {  # source, how it is loaded, layout, engine
    "snapshot to native": ("deepspeed", "ckpt_dir", "EP4", DP4_EP2),
    "native checkpoint to DeepSpeed": ("native", "load", "EP4", DP4_EP2 | ZERO2),
    "snapshot to DeepSpeed": ("deepspeed", "ckpt_dir", "EP4", DP4_EP2 | ZERO2),
    "checkpoint to native": ("deepspeed", "load", "EP4", DP4_EP2),
    "snapshot to pipeline": ("deepspeed", "ckpt_dir", "PP2xEP2", ZERO1),
    "checkpoint to replicated": ("deepspeed", "load", "TP2", dict(use_distributed_optimizer=False)),
}


@pytest.mark.parametrize("name", MOVES if ALL else list(MOVES)[:3])
def test_checkpoint_resumes_across_engines_and_layouts(name, saved, data, tmp_path):
    source, way, layout, engine = MOVES[name]
    place = saved[source] if way == "load" else f"{tmp_path}/copy"
    how = dict(load=place) | dict(ckpt_step=2)
    if way == "ckpt_dir":
        shutil.copytree(f"{saved[source]}/snapshots", place)
        how = dict(ckpt_policy="full", snapshot_interval=9, ckpt_dir=place, ckpt_step=2)
    native = known("EP4", data | HARD | DP4_EP2)
    rest = train(layout, data | HARD | engine | how)
    assert rest.start == 2 and rest.losses == pytest.approx(native.losses[2:], abs=5e-3)
    if layout == "EP4":
        assert_same_bits(rest, native, start=2)


FAULTS = [
    "kill rank=1 iteration=4 point=forward_backward",
    "kill rank=2 iteration=8 point=after_commit",
    "kill ranks=0,3 iteration=11 point=before_commit",
]
POINTS = [*STEP, "snapshot_copying", "snapshot_finalized", "snapshot_committed", "persisting"]
EACH_POINT = [f"kill rank={i % 4} iteration={4 + 3 * i} point={point}" for i, point in enumerate(POINTS)]
EACH_POINT += [f"kill rank=3 iteration={4 + 3 * len(POINTS)} point={point}" for point in ("after_reduce", "loading")]


@pytest.mark.recovery
@pytest.mark.timeout(300)
def test_killed_deepspeed_workers_are_bit_identical(data, tmp_path):
    faults, iterations = (EACH_POINT, 7 + 3 * len(POINTS)) if ALL else (FAULTS, 14)
    flags = data | HARD | DP4_EP2 | dict(train_iters=iterations)
    sparse = dict(ckpt_policy="sparse", sparse_window=3, ckpt_tier="memory", inject=faults)
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory)
        with Launched("EP4", flags | ZERO2 | sparse | places, tmp_path / "job") as job:
            assert job.wait() == 0, job.console[-4000:]
    straight = known("EP4", flags | ZERO2)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert len(job.events("generation")) == len(faults)
    assert all(event["exact"] for event in job.events("replay")) and job.events("replay")


@pytest.mark.skipif(not ALL, reason="its workers start cold: with MOC_TESTS_ALL=1")
def test_run_starts_under_deepspeed_launcher(data, tmp_path):
    flags = data | HARD | ZERO2
    (tmp_path / "flags.yaml").write_text(
        yaml.safe_dump(FLAGS | LAYOUTS["EP2"][1] | flags | dict(log_dir=str(tmp_path)))
    )
    launcher = [
        str(Path(sys.executable).with_name("deepspeed")),
        "--num_gpus",
        "2",
        "--master_port",
        f"{free_ports(1)[0]}",
    ]
    command = [*launcher, str(ROOT / "pretrain_gpt_moe.py"), "--config", str(tmp_path / "flags.yaml")]
    here = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}  # two, without a GPU
    said = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    losses = [event["loss"] for event in Events(tmp_path / "events.jsonl").of("iteration")]
    assert losses == known("EP2", flags).losses


SMALLER = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --num-experts 4
    --seq-length 16 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 3
    --lr-warmup-iters 1 --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --num-workers 0 --log-interval 1
""".split()
RECIPES = {  # workers, and what else a smaller machine asks for
    "moc_system": (2, []),
    "moetion": (4, ["--pipeline-model-parallel-size", "2", "--ckpt-tier", "memory"]),  # copies want another node
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_papers_train_at_smaller_size(recipe, corpus, tmp_path):
    size, layout = RECIPES[recipe]
    own = [*SMALLER, *layout, "--data-path", corpus, "--split", "90,5,5", "--ckpt-dir", str(tmp_path / "snapshots")]
    own += ["--log-dir", str(tmp_path / "log")]
    with node_memory() as memory:
        words = ["--config", f"{ROOT}/scripts/recipes/{recipe}.yaml", *own, "--ckpt-memory-dir", memory]
        told = run_world(size, "tests.integration.deepspeed_bodies:train_by_recipe", words=words)
    assert all(worker["code"] == 0 and len(worker["losses"]) == 3 for worker in told)
    assert all(math.isfinite(loss) for loss in told[0]["losses"])
    kinds = [json.loads(line)["type"] for line in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    assert kinds.count("iteration") == 3 and "snapshot" in kinds
