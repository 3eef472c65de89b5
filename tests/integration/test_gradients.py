"""Experts that memory has as gradients come back to the bit, through the optimizer that had updated them."""

from __future__ import annotations

import pytest

from benchmarks.live.job import Events
from moc.recovery.expert_versions import operator_file_name
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.host_memory import find_memory_storage
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory, start, train
from tests.integration.test_pec import loaded, saved
from tests.integration.test_peers import lose, memory_of
from tests.integration.test_precision import BF16
from tests.shared import ALL
from tests.unit.inspect.test_verify import flip

CLIPPED = dict(clip_grad=0.1, start_weight_decay=0.1, end_weight_decay=0.2, weight_decay_incr_style="linear")
REPLICATED = dict(use_distributed_optimizer=False)
SKIPPING = dict(fp16=True, initial_loss_scale=2.0**14, loss_scale_window=3, hysteresis=1)
GRADIENTS = dict(ckpt_policy="selective", selective_experts=4, snapshot_interval=1, ckpt_tier="memory")
WAYS = {
    "fp16 EP2": ("EP2", SKIPPING),
    "fp32 replicated": ("EP2", REPLICATED),
}
if ALL:
    WAYS |= {"bf16 DP2": ("DP2", BF16), "fp32 EP2": ("EP2", {}), "bf16 replicated": ("EP2", BF16 | REPLICATED)}


@pytest.mark.recovery
@pytest.mark.parametrize("way", WAYS if ALL else ["fp16 EP2"])
def test_complete_gradient_chains_make_recovery_exact(way, data, tmp_path):
    layout, precision = WAYS[way]
    flags = data | CLIPPED | precision | dict(train_iters=18)
    with node_memory() as memory:
        snapshots = GRADIENTS | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), selective_max_age=99)
        snapshots |= dict(log_dir=str(tmp_path / "log"))
        slow = dict(body="pec_bodies:die_after_slow_copies", bytes_per_s=1e7)  # gradients would be cleared meanwhile
        killed = start(layout, flags | snapshots, iteration=16, **slow)
        assert {result.exit for result in killed.wait()} == {-9}
        resumed = train(layout, flags | snapshots)
    told = Events(tmp_path / "log" / "events.jsonl")
    (resume,), (lost,) = told.of("resume"), told.of("lost")
    whole = train(layout, flags)
    assert resume["iteration"] == resumed.start >= 15 and lost["plt"] == 0
    assert len(resume["sources"]) >= 14 and resume["folded"] == 8
    if "fp16" in way:
        assert sum(record["skipped"] for record in whole.records[1:15]) >= 1
    assert min(norm for norm in whole.norms[1:] if norm < 1e9) > flags["clip_grad"]
    assert resumed.weights == whole.weights and resumed.losses == whole.losses[resumed.start :]


@pytest.mark.recovery
def test_gradient_chain_ends_at_first_damaged_gradient(data, tmp_path):
    """Each state is that of a run with full snapshots; one expert's is older, and its tokens are booked as lost."""
    flags, last, damaged = data | CLIPPED | dict(train_iters=20), 12, "layers.1.expert.2"
    everything = dict(ckpt_policy="full", snapshot_interval=1, ckpt_keep=99, ckpt_dir=str(tmp_path / "full"))
    assert set(train("EP2", flags | everything | dict(exit_interval=last)).codes) == {0}
    states = saved(Store(LocalStorage(tmp_path / "full")))
    with node_memory() as memory:
        flags |= GRADIENTS | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
        flags |= dict(selective_max_age=99)
        killed = start("EP2", flags, body="pec_bodies:die_after", iteration=last)
        assert {result.exit for result in killed.wait()} == {-9}
        place = find_memory_storage(memory, flags["ckpt_dir"])
        store = Store(place, allows_slack=True)
        assert last - 2 in store.iterations()
        whole, gradients = (
            sum(entry.bytes - entry.header_bytes for entry in store.read_manifest(iteration).files.values())
            for iteration in (1, last - 4)  # carried out of both, the experts alone
        )
        assert gradients == pytest.approx(whole / 3, rel=0.02)
        flip(place.root / checkpoint_name(last - 4) / operator_file_name(damaged), position=-8 * 16)
        begun, hashes = loaded("EP2", flags)
    assert begun in (last - 1, last)
    for fragment, digest in hashes.items():
        is_damaged = fragment.startswith("decoder.layers.1.mlp.experts.experts.2.")
        assert digest == states[fragment][last - 5 if is_damaged else begun], fragment
    (lost,) = Events(tmp_path / "log" / "events.jsonl").of("lost")
    assert 0 < lost["by_layer"]["1"] < 1 and not lost["by_layer"]["0"]


@pytest.mark.recovery
def test_gradient_chains_of_lost_node_are_restored_from_peers(data, tmp_path):
    """Bit by bit: the last snapshots are those of a run without a fault."""
    flags = data | CLIPPED | dict(train_iters=24)
    plain = flags | dict(ckpt_policy="full", snapshot_interval=99, ckpt_dir=str(tmp_path / "plain"))
    assert set(train("PP2xEP2", plain).codes) == {0}
    with node_memory() as memory:
        flags |= GRADIENTS | dict(ckpt_tier="peers", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
        flags |= dict(selective_max_age=99, max_snapshot_lag=1)
        with Launched("PP2xEP2", flags, tmp_path / "job", nodes=2, spares=1) as job:
            job.reach(14)
            lose(job, 1, memory_of(flags, "1"))
            assert job.wait() == 0, job.console[-4000:]
        resumed, lost = job.events("resume")[-1], job.events("lost")[-1]
    assert lost["plt"] == 0 and len(resumed["sources"]) >= 12 and {tier for _, tier in resumed["sources"]} == {"memory"}
    ends = (contents(Store(LocalStorage(tmp_path / name)), 24) for name in ("plain", "c"))
    assert next(ends) == next(ends)


@pytest.mark.recovery
def test_worker_losses_at_any_time_are_bit_identical(data, tmp_path):
    """Among them the one that leads the node, after the vote by which others reuse buffers that it has not given up."""
    flags = data | CLIPPED | dict(train_iters=32)
    plain = flags | dict(ckpt_policy="full", snapshot_interval=99, ckpt_dir=str(tmp_path / "plain"))
    assert set(train("PP2xEP2", plain).codes) == {0}
    kills = [f"kill rank=0 iteration={iteration} point=after_commit" for iteration in (8, 14, 20)]
    kills += ["kill rank=3 iteration=25 point=snapshot_copying", "kill rank=2 iteration=0 point=loading"]
    with node_memory() as memory:
        flags |= GRADIENTS | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), persist_interval=7)
        with Launched("PP2xEP2", flags | dict(selective_max_age=5, inject=kills), tmp_path / "job") as job:
            assert job.wait() == 0, job.console[-4000:]
        assert {event["plt"] for event in job.events("lost")} == {0} and len(job.events("resume")) > 3
    ends = (contents(Store(LocalStorage(tmp_path / name)), 32) for name in ("plain", "c"))
    assert next(ends) == next(ends)
