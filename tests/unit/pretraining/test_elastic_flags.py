"""Flags of elastic training: what they do not go together with is refused in one sentence."""

from megatron.pretraining.config import (
    check_domains,
    check_fewest,
    check_world,
    num_microbatches,
    plan_settings,
    restart_reason,
)
from moc.elastic.plan import make_plan
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import DENSE, PP2, assert_refused, parse, refusal, without

ELASTIC = "--elastic --elastic-slots 4 --calculate-per-token-loss --global-batch-size 12"
SAVED = "--ckpt-policy full --ckpt-dir snapshots"
SHARED = "--moe-shared-expert-intermediate-size 64 --disable-bias-linear --moe-token-dispatcher-type alltoall"
NOT_WHOLE = "with a model that does not fill complete nodes"
REFUSED = [
    ("--elastic-slots 4", "flag-has-no-effect --elastic-slots --elastic"),
    ("--elastic", "flag-needs-another elastic-needs-flag elastic-needs-flag --elastic --elastic-slots"),
    ("--elastic-domain 8", "flag-has-no-effect --elastic-domain --elastic"),
    (ELASTIC.replace("--calculate-per-token-loss", ""), "elastic-needs-flag --elastic --calculate-per-token-loss"),
    (f"{ELASTIC} --elastic-everywhere 5", "flag-exceeds-another --elastic-everywhere --elastic-slots"),
    (f"{ELASTIC} --elastic-everywhere some", "value-unreadable"),
    (f"{ELASTIC} --rampup-batch-size 2 2 2", "elastic-excludes-flag --step-batch-size-schedule"),
    (f"{ELASTIC} --eval-micro-batch-size 4", "elastic-excludes-flag --eval-micro-batch-size"),
    (f"{ELASTIC} --expert-model-parallel-size 2", "elastic-excludes-flag --expert-model-parallel-size"),
    (
        f"{ELASTIC} --expert-tensor-parallel-size 2",
        "elastic-excludes-flag --expert-tensor-parallel-size",
    ),
    (
        f"{ELASTIC} --moe-grouped-gemm",
        "elastic-excludes-flag --moe-grouped-gemm",
    ),
    (
        f"{ELASTIC} --moe-token-dispatcher-type flex",
        "elastic-excludes-flag --moe-token-dispatcher-type",
    ),
    (f"{ELASTIC} --dataloader-type cyclic", "elastic-excludes-flag --dataloader-type"),
    (f"{ELASTIC} --moe-permute-fusion", "elastic-excludes-flag --moe-permute-fusion"),
    (
        f"{ELASTIC} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        "elastic-excludes-flag --moe-pad-expert-input-to-capacity",
    ),
    (f"{ELASTIC} --moe-router-load-balancing-type global_aux_loss", "elastic-excludes-flag"),
    (f"{ELASTIC} {SHARED} --moe-shared-expert-overlap", "elastic-excludes-flag --moe-shared-expert-overlap"),
    (f"{ELASTIC} --overlap-grad-reduce", "elastic-excludes-flag --overlap-grad-reduce"),
    (
        f"{ELASTIC} {PP2} --num-virtual-stages-per-pipeline-rank 2",
        "elastic-excludes-flag --elastic --num-layers-per-virtual-pipeline-stage",
    ),
    (f"{ELASTIC} --ckpt-policy full --ckpt-dir there --ckpt-tier memory", "elastic-excludes-flag --ckpt-tier"),
    (f"{ELASTIC} --ckpt-policy full --ckpt-dir there --ckpt-tier peers", "elastic-excludes-flag --ckpt-tier"),
    (
        f"{ELASTIC} {PP2} --ckpt-policy sparse --ckpt-dir there --upstream-logging "
        "--untie-embeddings-and-output-weights",
        "elastic-excludes-flag --upstream-logging",
    ),
]


@each_row(("flags", "expected"), REFUSED)
def test_incompatible_flags_are_refused(flags, expected, capsys):
    assert_refused(refusal(flags), expected)


def test_model_without_experts_is_refused(capsys):
    assert_refused(refusal(ELASTIC, DENSE), "elastic-needs-flag --elastic --num-experts")


def test_elastic_is_refused_under_torchrun(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert_refused(refusal(ELASTIC), "elastic-under-torchrun --elastic")


@each_row(
    ("flags", "world", "expected"),
    [
        (f"{ELASTIC} --elastic-slots 1", 4, "slots-too-few --elastic-slots"),
        (f"{ELASTIC} {PP2} --elastic-slots 3", 4, "slots-too-few --elastic-slots"),
        (f"{ELASTIC} --elastic-min-replicas 5", 4, "nodes-too-few --elastic-min-replicas"),
        (ELASTIC, 8, "batch-not-divisible --global-batch-size"),
    ],
)
def test_unsuitable_world_size_is_refused(flags, world, expected):
    with raises(*expected.split()):
        check_world(parse(flags), world)


@each_row(
    ("flags", "nodes", "expected"),
    [
        (
            ELASTIC,
            1,
            "nodes-too-few --elastic-min-replicas --nnodes",
        ),
        (f"{ELASTIC} --elastic-min-replicas 1 --elastic-slots 3", 1, "slots-too-few"),
    ],
)
def test_insufficient_minimum_nodes_are_refused(flags, nodes, expected):
    config = parse(f"{flags} {SAVED}")
    check_fewest(config, 2, 2)
    with raises(*expected.split()):
        check_fewest(config, nodes, 2)


@each_row("slots", range(2, 9))
@each_row("replicas", [1, 2, 3])
def test_largest_accepted_everywhere_keeps_replicas(slots, replicas):
    flags = f"{ELASTIC} {SAVED} --elastic-slots {slots} --elastic-min-replicas {replicas}"
    for nodes in (nodes for nodes in (3, 4, 5) if nodes * slots >= 8):
        settings, plans = plan_settings(parse(flags), 1), []
        most = settings.max_everywhere(nodes, 8)
        for hot in range(min(slots, 8) + 1):
            config = parse(f"{flags} --elastic-everywhere {hot}")
            if hot > most:
                with raises("slots-too-few", "--elastic-everywhere", f" {most},"):
                    check_fewest(config, nodes, 1)
                continue
            check_fewest(config, nodes, 1)
            plans.append(make_plan(range(nodes), {0: [9, 3, 5, 1, 1, 1, 1, 1]}, plan_settings(config, 1)))
        least = [min(len(one.holders(0, expert)) for expert in range(8)) for one in plans]
        assert min(least) >= min(replicas, nodes * slots // 8)


@each_row(
    ("flags", "nodes", "per_node", "expected"),
    [
        ("--expert-model-parallel-size 2 --global-batch-size 12", 1, 1, "workers-not-divisible --nnodes"),
        ("--global-batch-size 12", 5, 1, "batch-not-divisible --nnodes --global-batch-size"),
        (f"{PP2} --global-batch-size 12", 3, 1, "workers-not-divisible --nnodes"),
        (f"{ELASTIC} --elastic-slots 3", 2, 1, "slots-too-few --elastic-slots"),
    ],
)
def test_minimum_nodes_that_prevent_restart_are_refused(flags, nodes, per_node, expected):
    check_fewest(parse(flags), 6, per_node)
    with raises(*expected.split()):
        check_fewest(parse(flags), nodes, per_node)


@each_row(
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
def test_reason_for_worker_restart_follows_from_flags(flags, why):
    saved = "--ckpt-dir snapshots" if "--ckpt-policy" in flags else ""
    assert restart_reason(parse(f"{ELASTIC} {flags} {saved}"), 2) == why


def test_model_copy_requires_enough_nodes_and_slots():
    config = parse(f"{ELASTIC} {PP2} --ckpt-policy full --ckpt-dir snapshots --elastic-min-replicas 1")
    with raises("nodes-too-few", "--nnodes 1:"):
        check_fewest(config, 1, 1)
    with raises("slots-too-few", "--elastic-slots 4", " 8,"):
        check_fewest(config, 3, 1)  # one worker of each stage
    check_fewest(config, 4, 1)


@each_row(
    ("flags", "ranks", "expected"),
    [
        (
            "--elastic-domain 3",
            4,
            "elastic-domain-too-small --elastic-domain",
        ),
        ("--elastic-domain 1", 1, "elastic-domain-too-small --elastic-domain"),
        ("--elastic-domain 5 --elastic-slots 1", 2, "elastic-domain-too-small --elastic-slots"),
        ("--elastic-domain 2 --elastic-everywhere 2", 1, "elastic-domain-too-small"),
    ],
)
def test_unsuitable_elastic_domain_is_refused(flags, ranks, expected):
    check_domains(parse(f"{ELASTIC} --elastic-domain 4"), ranks)
    with raises(*expected.split()):
        check_domains(parse(f"{ELASTIC} {flags}"), ranks)


def test_elastic_batch_need_not_divide_evenly():
    config = parse(ELASTIC)
    check_world(config, 4)
    assert num_microbatches(config, 4) == 2  # six of them, in two rounds
    with raises("batch-not-divisible", "--global-batch-size 12"):
        check_world(parse("--global-batch-size 12"), 4)


def test_experts_are_not_tensor_parallel():
    split = parse(f"{ELASTIC} --tensor-model-parallel-size 2 --sequence-parallel")
    assert split.parallel.expert_tensor_parallel_size == 1
    assert parse("", without("--num-experts")).parallel.expert_tensor_parallel_size == 1


def test_placement_uses_mtbf_flag():
    assert plan_settings(parse(f"{ELASTIC} {SAVED} --mtbf-hours 0.5"), 1).mtbf_s == 1800.0
    assert plan_settings(parse(f"{ELASTIC} {SAVED}"), 1).mtbf_s == 3600.0
