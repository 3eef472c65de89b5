"""The cost of an iteration against formulas."""

import dataclasses

import pytest

from moc.sharding import ParallelLayout
from moc.simulate.cost import (
    CLUSTERS,
    EXPLAINED,
    FITTED,
    Work,
    cluster_named,
    estimate,
    measured_timing,
    message_s,
    split_stages,
)
from tests.errors import raises
from tests.unit.simulate.setups import OPERATORS, small_cluster

WORK = Work(global_batch=64, micro_batch=4, seq_length=512, hidden_size=256, topk=2, pipelines=1)


def test_pipeline_takes_m_plus_s_minus_1_slowest_stages():
    timing = estimate(OPERATORS, ParallelLayout(world=16, pp=4, ep=4), small_cluster(), WORK)
    assert (timing.micro_batches, timing.stages) == (16, 4)
    assert timing.pipeline_s == pytest.approx((16 + 4 - 1) * timing.slowest_s)
    assert timing.iteration_s == pytest.approx(timing.pipeline_s + timing.sync_s + timing.update_s)
    assert timing.without_bubbles == 16 / 19


def test_virtual_stages_shorten_warm_up():
    plain, interleaved = (
        estimate(OPERATORS, ParallelLayout(16, pp=4, ep=4, vpp=v), small_cluster(), WORK) for v in (1, 3)
    )
    assert interleaved.pipeline_s == pytest.approx((16 + 3 / 3) * plain.slowest_s)


def test_flops_are_six_per_active_parameter_and_token():
    cluster = small_cluster(gpus=1, utilisation=0.5)
    work = dataclasses.replace(WORK, topk=2)
    timing = estimate(OPERATORS, ParallelLayout(world=1), cluster, work)
    dense = sum(o.parameters for o in OPERATORS if o.kind not in ("expert", "embedding"))
    expert = next(o.parameters for o in OPERATORS if o.kind == "expert")
    active = dense + 5 * 2 * expert
    assert timing.pipeline_s == pytest.approx(6 * 64 * 512 * active / (0.5 * 312e12))


def test_message_costs_latency_and_bandwidth():
    cluster = small_cluster(latency_s=1e-3)
    assert message_s(cluster, 1e9, 1, False) == 0
    near, far = (message_s(cluster, 1e9, 8, across) for across in (False, True))
    assert near == pytest.approx(3e-3 + 7 / 8 * 1e9 / cluster.intra_bandwidth)
    assert far == pytest.approx(3e-3 + 7 / 8 * 1e9 / (cluster.inter_bandwidth / 4))


def test_estimated_time_changes_monotonically_with_inputs():
    layout, cluster = ParallelLayout(world=16, pp=4, ep=4), small_cluster()
    base = estimate(OPERATORS, layout, cluster, WORK).iteration_s
    assert estimate(OPERATORS, layout, cluster, dataclasses.replace(WORK, global_batch=128)).iteration_s > base
    assert estimate(OPERATORS, layout, cluster, dataclasses.replace(WORK, seq_length=1024)).iteration_s > base
    assert estimate(OPERATORS, layout, dataclasses.replace(cluster, flops=1e15), WORK).iteration_s < base
    hidden = estimate(OPERATORS, layout, cluster, dataclasses.replace(WORK, overlap=1.0))
    assert hidden.sync_s == 0 < estimate(OPERATORS, layout, cluster, dataclasses.replace(WORK, overlap=0.0)).sync_s


def test_stages_contain_contiguous_balanced_layers():
    stages = split_stages(OPERATORS, 4)
    assert [o.name for stage in stages for o in stage] == [o.name for o in OPERATORS]
    layers = [{o.layer for o in stage} - {None} for stage in stages]
    assert [len(some) for some in layers] == [1, 2, 2, 1]
    with raises("stages-exceed-layers", "6", "7"):
        split_stages(OPERATORS, 7)


def test_unsupported_work_is_refused():
    with raises("batch-not-divisible", "64", "5"):
        estimate(
            OPERATORS, ParallelLayout(world=16, pp=4, ep=4), small_cluster(), dataclasses.replace(WORK, micro_batch=5)
        )
    with raises("value-out-of-range", "iteration", "0"):
        measured_timing(0)
    with raises("value-out-of-range", "overlap", "2"):
        Work(overlap=2)


def test_only_fitted_presets_have_fitted_bandwidths():
    """A GPU reaches no less than tens of GB/s over PCIe, whatever makes a paper's figures come out."""
    for name in ("a100-80gb", "h100-80gb"):
        assert 20e9 <= CLUSTERS[name].host_bandwidth <= 64e9 and CLUSTERS[name].replay_slowdown == 1
    assert all(name.endswith("-fitted") for name in FITTED) and set(FITTED) < set(CLUSTERS)
    slow = {name for name, cluster in CLUSTERS.items() if cluster.host_bandwidth < 1e9}
    assert slow == set(FITTED) and all(name in EXPLAINED for name in CLUSTERS)


def test_cluster_is_found_by_name():
    assert cluster_named("h100-80gb") == CLUSTERS["h100-80gb"]
    assert cluster_named("a100-80gb:16384").nodes == 2048
    with raises("cluster-unknown", "b200"):
        cluster_named("b200")
    for wrong in ("", "0", "many"):
        with raises("value-out-of-range", repr(wrong)):
            cluster_named(f"a100-80gb:{wrong}")
    with raises("value-out-of-range", "gpus", "0"):
        dataclasses.replace(CLUSTERS["h100-80gb"], gpus=0)
