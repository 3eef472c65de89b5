"""Host memory of snapshots: what is predicted, reserved and used, and what happens where it is short."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moc.store.host_memory import leftovers, memory_storage
from moc.store.storage import SpaceReserve
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory
from tests.shared import ALL

pytestmark = pytest.mark.timeout(300)

LONG = dict(train_iters=20, ffn_hidden_size=512, moe_ffn_hidden_size=512)
POLICIES = {
    "full": dict(ckpt_policy="full", snapshot_interval=1),
    "sparse": dict(ckpt_policy="sparse", sparse_window=3),
    "sparse, to storage": dict(ckpt_policy="sparse", sparse_window=3, persist_interval=5),
    "gradient": dict(ckpt_policy="gradient", gradient_window=3),
    "pec": dict(ckpt_policy="pec", pec_k=1, snapshot_interval=1),
    "selective": dict(ckpt_policy="selective", selective_experts=1),
    "auto": dict(ckpt_policy="auto"),
}


@contextlib.contextmanager
def memory_of_bytes(nbytes: int, directory: Path):
    """A memory file system of a size; skips the test where none can be mounted."""
    directory.mkdir()
    size = f"size={nbytes // 4096 * 4096}"
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", directory]).returncode:
        pytest.skip("mounting a memory file system needs root")
    try:
        yield str(directory)
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def job(layout: str, flags: dict, directory: Path, tier: str, memory: str, **launched) -> Launched:
    places = dict(ckpt_dir=str(directory / "snapshots"), ckpt_memory_dir=memory, ckpt_tier=tier)
    return Launched(layout, flags | places, directory / "job", **dict(nodes=1 + (tier == "peers")) | launched)


def used(memory: str) -> int:
    """Bytes of the memory of the node that has most."""
    return max((one.bytes for one in leftovers(memory)), default=0)


def total(predicted: dict) -> int:
    return sum(predicted[of] for of in ("own", "copies", "small", "logs", "experts"))


def files(memory: str) -> list[Path]:
    return [path for path in Path(memory).rglob("*") if path.is_file() and ".sockets" not in path.parts]


@pytest.mark.parametrize("tier", ["memory", "peers"])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_use_matches_prediction(policy, tier, data, tmp_path):
    with node_memory() as memory, job("DP2", data | POLICIES[policy] | LONG, tmp_path, tier, memory) as running:
        measured = []
        for iteration in range(2, 13, 2):
            running.reach(iteration)
            measured.append(used(memory))
        (predicted,) = running.events("memory")
        assert running.wait() == 0, running.console[-4000:]
        assert not running.events("abandoned") and not files(memory)
    assert max(measured) == pytest.approx(total(predicted), rel=0.05)


@pytest.mark.parametrize("tier", ["memory", "peers"])
def test_start_with_too_little_memory_leaves_nothing(tier, data, tmp_path):
    with node_memory() as memory, job("DP2", data | POLICIES["full"], tmp_path / "fits", tier, memory) as running:
        running.reach(1)
        predicted = running.events("memory")[0]
        assert running.wait() == 0
    needed = total(predicted) * (1 + (tier == "peers"))
    with memory_of_bytes(int(0.8 * needed), tmp_path / "small") as memory:
        with job("DP2", data | POLICIES["full"], tmp_path / "refused", tier, memory) as running:
            assert running.wait() not in (0, None)
            assert not running.events("iteration") and not files(memory)
        assert "--ckpt-memory-dir" in running.console and "Traceback" not in running.console


@pytest.mark.parametrize("policy", ["full", "sparse", "gradient", "pec"])
def test_memory_taken_by_others_later_does_not_end_job(policy, data, tmp_path):
    flags = data | POLICIES[policy] | dict(train_iters=14)
    with memory_of_bytes(64 << 20, tmp_path / "memory") as memory:
        with job("DP2", flags, tmp_path / "job", "peers", memory) as running:
            running.reach(4)
            with contextlib.suppress(OSError), open(Path(memory) / "another", "wb", buffering=0) as other:
                while True:
                    other.write(bytes(1 << 16))
            running.reach(12)
            (Path(memory) / "another").unlink()
            assert running.wait() == 0, running.console[-4000:]
        assert [event["iteration"] for event in running.events("iteration")] == [*range(1, 15)]
        assert not files(memory)


def fill(path: Path) -> None:
    """Writes a file until the file system is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def test_small_file_is_written_despite_competing_writers(tmp_path, monkeypatch):
    with memory_of_bytes(1 << 20, tmp_path / "memory") as memory:
        place, spend, takers = (
            memory_storage(memory, "snapshots", "run"),
            SpaceReserve.release,
            iter(["first", "second"]),
        )
        place.reserve.allocate(1 << 16)
        fill(Path(memory) / "another")

        def spend_and_lose(room: SpaceReserve, nbytes: int) -> bool:
            given, taker = spend(room, nbytes), next(takers, None)
            if taker is not None:
                fill(Path(memory) / taker)
            return given

        monkeypatch.setattr(SpaceReserve, "release", spend_and_lose)
        place.write("manifest.json", [bytes(6000)])
        assert place.read("manifest.json", 1 << 20) == bytes(6000)


SLOW_COPIES = "tests/integration/slow_copies_pretrain_gpt_moe.py"
AUTO = {
    "sparse": dict(ckpt_policy="sparse", sparse_window="auto"),
    "gradient": dict(ckpt_policy="gradient", gradient_window="auto"),
}


@pytest.mark.parametrize(
    ("policy", "tier"),
    [("sparse", "peers"), ("gradient", "memory"), *ALL * [("sparse", "memory"), ("gradient", "peers")]],
)
def test_auto_window_length_follows_available_memory(policy, tier, data, tmp_path):
    flags = data | AUTO[policy] | dict(train_iters=40)
    with node_memory() as memory, job("DP2", flags, tmp_path / "a", tier, memory, program=SLOW_COPIES) as running:
        running.reach(36)
        (at_first,), most = running.events("memory"), used(memory)
        assert running.wait() == 0
    wanted = max(event[f"{policy}_window"] for event in running.events("choice"))
    assert wanted > 2 and not running.events("window_limited")
    nodes = 1 + (tier == "peers")
    room = nodes * (total(at_first) + (most - total(at_first)) // 2) + (1 << 18)
    with memory_of_bytes(room, tmp_path / "small") as memory:
        with job("DP2", flags, tmp_path / "b", tier, memory, program=SLOW_COPIES) as running:
            assert running.wait() == 0, running.console[-4000:]
            assert not running.events("abandoned") and not running.events("copy_missing")
    limited = running.events("window_limited")
    assert limited and all(event["length"] < event["wanted"] for event in limited)
    assert max(event[f"{policy}_window"] for event in running.events("choice")) == limited[0]["length"]
    assert running.console.count("[memory-full]") == len(limited)


def test_memory_shortage_after_node_loss_does_not_end_job(data, tmp_path):
    """With one node less, each has a larger part of the state; there is room to recover, and not for all buffers."""
    flags = data | POLICIES["full"] | dict(train_iters=14, global_batch_size=6, replicas=1)
    with memory_of_bytes(64 << 20, tmp_path / "memory") as memory:
        with job("DP3", flags, tmp_path / "job", "peers", memory, nodes=3, least=2) as running:
            running.reach(4)
            (Path(memory) / "another").write_bytes(bytes(shutil.disk_usage(memory).free - (1 << 20)))
            running.lose(2)
            assert running.wait() == 0, running.console[-4000:]
        assert [event["iteration"] for event in running.events("iteration")][-1] == 14
        assert len(running.events("memory_short")) == 1 and running.console.count("[memory-full]") == 1
