"""Flags of elastic training: what they do not go together with is refused in one sentence."""

import pytest

from megatron.pretraining.config import (
    ConfigError,
    check_domains,
    check_fewest,
    check_world,
    num_microbatches,
    plan_settings,
    why_anew,
)
from moc.elastic.plan import plan
from tests.unit.pretraining.flags import DENSE, PP2, parse, refusal, without

ELASTIC = "--elastic --elastic-slots 4 --calculate-per-token-loss --global-batch-size 12"
SAVED = "--ckpt-policy full --ckpt-dir snapshots"
SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear --moe-token-dispatcher-type alltoall"
NOT_WHOLE = "with a model that does not take whole nodes"
REFUSED = [
    ("--elastic-slots 4", "--elastic-slots has no effect without --elastic: add it"),
    ("--elastic", "--elastic needs --elastic-slots: add it"),
    ("--elastic-domain 8", "--elastic-domain has no effect without --elastic: add it"),
    (ELASTIC.replace("--global-batch-size 12", ""), "--elastic needs --global-batch-size"),
    (ELASTIC.replace("--calculate-per-token-loss", ""), "--elastic needs --calculate-per-token-loss"),
    (f"{ELASTIC} --elastic-everywhere 5", "--elastic-everywhere 5 is more than --elastic-slots 4"),
    (f"{ELASTIC} --elastic-everywhere some", "a number of slots or the word auto"),
    (f"{ELASTIC} --expert-model-parallel-size 2", "drop --expert-model-parallel-size 2"),
    (f"{ELASTIC} --expert-tensor-parallel-size 2", "drop --expert-tensor-parallel-size 2"),
    (f"{ELASTIC} --moe-grouped-gemm", "drop --moe-grouped-gemm"),
    (f"{ELASTIC} --moe-token-dispatcher-type flex", "drop --moe-token-dispatcher-type flex"),
    (f"{ELASTIC} --moe-permute-fusion", "drop --moe-permute-fusion"),
    (
        f"{ELASTIC} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        "drop --moe-pad-expert-input-to-capacity",
    ),
    (f"{ELASTIC} --moe-router-load-balancing-type global_aux_loss", "choose aux_loss or seq_aux_loss"),
    (f"{ELASTIC} {SHARED} --moe-shared-expert-overlap", "drop --moe-shared-expert-overlap"),
    (f"{ELASTIC} --overlap-grad-reduce", "drop --overlap-grad-reduce"),
    (
        f"{ELASTIC} {PP2} --num-virtual-stages-per-pipeline-rank 2",
        "--elastic works with plain pipeline schedules: drop --num-layers-per-virtual-pipeline-stage",
    ),
    (f"{ELASTIC} --ckpt-policy full --ckpt-dir there --ckpt-tier memory", "choose --ckpt-tier disk, not memory"),
    (f"{ELASTIC} --ckpt-policy full --ckpt-dir there --ckpt-tier peers", "choose --ckpt-tier disk, not peers"),
    (
        f"{ELASTIC} {PP2} --ckpt-policy sparse --ckpt-dir there --upstream-logging "
        "--untie-embeddings-and-output-weights",
        "drop --upstream-logging",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_flags_that_do_not_go_together(flags, sentence, capsys):
    assert sentence in refusal(capsys, flags)


def test_a_model_without_experts(capsys):
    assert "the model has none: add --num-experts" in refusal(capsys, ELASTIC, DENSE)


def test_torchrun(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert "start the job with python -m moc.launch" in refusal(capsys, ELASTIC)


@pytest.mark.parametrize(
    ("flags", "world", "sentence"),
    [
        (f"{ELASTIC} --elastic-slots 1", 4, "--elastic-slots 1 of 4 workers .* make it at least 2"),
        (f"{ELASTIC} {PP2} --elastic-slots 3", 4, "--elastic-slots 3 of 2 workers leave no room for some of 8 experts"),
        (f"{ELASTIC} --elastic-min-replicas 5", 4, "--elastic-min-replicas 5 is more than the 4 workers"),
        (ELASTIC, 8, "--global-batch-size 12 has no micro batch for some of 8 .* make it at least 16"),
    ],
)
def test_worlds_that_do_not_fit(flags, world, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_world(parse(flags), world)


@pytest.mark.parametrize(
    ("flags", "nodes", "sentence"),
    [
        (
            ELASTIC,
            1,
            "--elastic-min-replicas 2 is more than the 1 nodes .*--nnodes 1:... continues with 1 node: lower it to 1",
        ),
        (f"{ELASTIC} --elastic-min-replicas 1 --elastic-slots 3", 1, "no room for some of 8 experts on 2 workers"),
    ],
)
def test_fewest_nodes_that_do_not_suffice(flags, nodes, sentence):
    config = parse(f"{flags} {SAVED}")
    check_fewest(config, 2, 2)
    with pytest.raises(ConfigError, match=sentence):
        check_fewest(config, nodes, 2)


@pytest.mark.parametrize("slots", range(2, 9))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_largest_everywhere_that_is_accepted_keeps_all_replicas(slots, replicas):
    flags = f"{ELASTIC} {SAVED} --elastic-slots {slots} --elastic-min-replicas {replicas}"
    for nodes in (nodes for nodes in (3, 4, 5) if nodes * slots >= 8):
        settings, plans = plan_settings(parse(flags), 1), []
        most = settings.most_everywhere(nodes, 8)
        for hot in range(min(slots, 8) + 1):
            config = parse(f"{flags} --elastic-everywhere {hot}")
            if hot > most:
                with pytest.raises(ConfigError, match=f"lower it to {most}, "):
                    check_fewest(config, nodes, 1)
                continue
            check_fewest(config, nodes, 1)
            plans.append(plan(range(nodes), {0: [9, 3, 5, 1, 1, 1, 1, 1]}, plan_settings(config, 1)))
        least = [min(len(one.holders(0, expert)) for expert in range(8)) for one in plans]
        assert min(least) >= min(replicas, nodes * slots // 8)


@pytest.mark.parametrize(
    ("flags", "nodes", "per_node", "sentence"),
    [
        ("--expert-model-parallel-size 2", 1, 1, "--nnodes 1:... .* multiple of 2.* raise MIN"),
        ("--global-batch-size 12", 5, 1, "--nnodes 5:... .*--global-batch-size 12 is not a multiple of 10"),
        (PP2, 3, 1, "--nnodes 3:... .* multiple of 2"),
        (f"{ELASTIC} --elastic-slots 3", 2, 1, "--elastic-slots 3 .* make it at least 4"),
    ],
)
def test_fewest_nodes_on_which_workers_cannot_start_anew(flags, nodes, per_node, sentence):
    check_fewest(parse(flags), 6, per_node)
    with pytest.raises(ConfigError, match=sentence):
        check_fewest(parse(flags), nodes, per_node)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--ckpt-policy full", ""),
        ("", "without --ckpt-policy"),
        (f"--ckpt-policy full {PP2}", ""),
        (f"--ckpt-policy full {PP2.replace('2', '4')}", ""),
        ("--ckpt-policy full --use-distributed-optimizer", ""),
        ("--ckpt-policy full --tensor-model-parallel-size 4 --sequence-parallel", NOT_WHOLE),
        ("--ckpt-policy full --tensor-model-parallel-size 2 --sequence-parallel", ""),
        ("--ckpt-policy auto", ""),
    ],
)
def test_when_workers_are_started_anew(flags, why):
    saved = "--ckpt-dir snapshots" if "--ckpt-policy" in flags else ""
    assert why_anew(parse(f"{ELASTIC} {flags} {saved}"), 2) == why


def test_a_copy_of_the_model_needs_its_nodes():
    config = parse(f"{ELASTIC} {PP2} --ckpt-policy full --ckpt-dir snapshots --elastic-min-replicas 1")
    with pytest.raises(
        ConfigError, match="takes 2 nodes, and --nnodes 1:... continues with 1 node: make MIN at least 2"
    ):
        check_fewest(config, 1, 1)
    with pytest.raises(ConfigError, match="--elastic-slots 4 leave no room .* make it at least 8"):
        check_fewest(config, 3, 1)  # one worker of each stage
    check_fewest(config, 4, 1)


@pytest.mark.parametrize(
    ("flags", "ranks", "sentence"),
    [
        (
            "--elastic-domain 3",
            4,
            "--elastic-domain 3 is less than the 4 workers that each node has of a pipeline stage",
        ),
        ("--elastic-domain 1", 1, "--elastic-domain 1 leaves no room for some of 8 experts in a domain of 1 workers"),
        ("--elastic-domain 5 --elastic-slots 1", 2, "in a domain of 4 workers with --elastic-slots 1: raise one"),
        ("--elastic-domain 2 --elastic-everywhere 2", 1, "leaves no room for some of 8 experts"),
    ],
)
def test_domains_that_do_not_fit(flags, ranks, sentence):
    check_domains(parse(f"{ELASTIC} --elastic-domain 4"), ranks)
    with pytest.raises(ConfigError, match=sentence):
        check_domains(parse(f"{ELASTIC} {flags}"), ranks)


def test_batches_need_not_divide():
    config = parse(ELASTIC)
    check_world(config, 4)
    assert num_microbatches(config, 4) == 2  # six of them, in two rounds
    with pytest.raises(ConfigError, match="--global-batch-size 12 is not a multiple of 8"):
        check_world(parse("--global-batch-size 12"), 4)


def test_experts_are_whole():
    split = parse(f"{ELASTIC} --tensor-model-parallel-size 2 --sequence-parallel")
    assert split.parallel.expert_tensor_parallel_size == 1
    assert parse("", without("--num-experts")).parallel.expert_tensor_parallel_size == 1
