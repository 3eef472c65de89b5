"""Flags and the number of workers, and the machine."""

from megatron.pretraining.config import (
    check_backend,
    check_fewest,
    check_world,
    data_parallel_size,
    global_batch_size,
    num_microbatches,
    train_iterations,
    train_samples,
)
from megatron.pretraining.entry.offline import config_of_words
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import BASE, PP2, TP2, parse, without


def test_batch_counts_follow_worker_count():
    config = parse(f"{PP2} --global-batch-size 32")
    assert data_parallel_size(config, 8) == 4
    assert (global_batch_size(config, 8), num_microbatches(config, 8)) == (32, 4)
    assert train_iterations(config, 8) == 10
    samples = parse("--train-samples 70 --global-batch-size 32", without("--train-iters"))
    assert train_iterations(samples, 4) == 2


@each_row(
    "flags, world, expected",
    [
        (PP2, 3, "workers-not-divisible"),
        (
            "--expert-model-parallel-size 4",
            2,
            "workers-not-divisible --expert-model-parallel-size",
        ),
        (f"{PP2} --expert-model-parallel-size 4", 4, "workers-not-divisible"),
        ("--global-batch-size 10", 4, "batch-not-divisible --global-batch-size"),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", 2, "batch-not-divisible"),
    ],
)
def test_unsuitable_world_size_is_refused(flags, world, expected):
    with raises(*expected.split()):
        check_world(parse(flags), world)


def test_too_few_samples_for_one_batch_are_refused():
    config = parse("--train-samples 3 --global-batch-size 4", without("--train-iters"))
    with raises("samples-too-few", "--train-samples 3"):
        check_world(config, 1)


@each_row(
    "flags, world",
    [
        ("", 1),
        (f"{PP2} --expert-model-parallel-size 2", 4),
        (f"{TP2} --expert-model-parallel-size 2", 2),
        (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8", 2),
    ],
)
def test_suitable_world_size_is_accepted(flags, world):
    check_world(parse(flags), world)


@each_row(
    ("schedule", "nodes", "fits"),
    [
        ("0:12,1K:24", 2, True),
        ("0:12,1K:24", 4, False),
        ("0:12,1K:20", 3, False),
        ("0:2,1K:12", 3, True),  # a run that has started with more workers has passed the first step
        ("0:2,1K:3", 4, False),
    ],
)
def test_each_scheduled_batch_must_fit_minimum_nodes(schedule, nodes, fits):
    words = f"--micro-batch-size 1 --step-batch-size-schedule {schedule}"
    config = parse(words, workers=6)
    if fits:
        check_fewest(config, nodes, 2)
        return
    with raises("batch-not-divisible", "--nnodes", "--step-batch-size-schedule"):
        check_fewest(config, nodes, 2)


def test_each_scheduled_batch_is_checked_at_start():
    words = f"{BASE} --micro-batch-size 1 --step-batch-size-schedule".split()
    assert config_of_words([*words, "0:6,1K:12"], 6).scheduled_batch_sizes == (6, 12)
    with raises("batch-not-divisible", "--step-batch-size-schedule"):
        config_of_words([*words, "0:6,1K:8"], 6)


def test_samples_of_schedule_do_not_depend_on_workers():
    base = BASE.replace("--train-iters", "--train-samples")
    words = f"{base} --micro-batch-size 1 --step-batch-size-schedule 0:6,1K:12".split()
    config = config_of_words(words, 6)
    assert train_samples(config, 6) == train_samples(config, 3) == config.training.train_samples


@each_row("schedule", ["6", "0:x", "0:inf", "640:6", "0:6,0:12", "0:0"])
def test_invalid_batch_schedule_is_refused(schedule):
    with raises("value-unreadable", "--step-batch-size-schedule"):
        config_of_words([*BASE.split(), "--step-batch-size-schedule", schedule], 1)


def test_gloo_refuses_unsupported_dispatcher():
    split = "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear "
    split += "--expert-model-parallel-size 2"
    check_backend(parse(split), "gloo")
    alltoall = parse(f"{split} --moe-token-dispatcher-type alltoall")
    check_backend(alltoall, "nccl")
    with raises("gloo-unsupported", "--moe-token-dispatcher-type"):
        check_backend(alltoall, "gloo")
    check_backend(alltoall.replace("parallel", expert_tensor_parallel_size=1), "gloo")


def test_gloo_refuses_unequal_token_counts():
    """Ranks of expert tensor parallelism have unequally many once tokens are dropped."""
    split = "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --moe-expert-capacity-factor 0.5"
    dropped = parse(f"{split} --moe-token-dispatcher-type alltoall")
    with raises("gloo-unsupported", "--moe-expert-capacity-factor"):
        check_backend(dropped, "gloo")
    check_backend(dropped.replace("moe", moe_token_dispatcher_type="allgather"), "gloo")
    check_backend(dropped.replace("moe", moe_pad_expert_input_to_capacity=True), "gloo")
    check_backend(dropped.replace("moe", moe_expert_capacity_factor=None), "gloo")
    check_backend(dropped.replace("parallel", expert_tensor_parallel_size=1), "gloo")
    check_backend(dropped, "nccl")


def test_gloo_with_gpus_is_refused():
    with raises("gloo-with-gpus", "CUDA_VISIBLE_DEVICES="):
        check_backend(parse("--transformer-impl local"), "gloo", cuda=True)
