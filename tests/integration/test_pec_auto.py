"""K and interval that a run finds by itself, and what can be seen of it."""

import json
from collections import Counter
from pathlib import Path

from moc.store.object_storage import storage_at
from moc.store.store import Store
from tests.integration.snapshot_files import node_memory, train
from tests.integration.tiny import FLAGS

SMALL = dict(global_batch_size=2, train_iters=60)
EXPERTS = FLAGS["num_experts"]


def test_as_many_experts_as_hide(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with node_memory() as memory:
        flags = (
            data
            | SMALL
            | dict(ckpt_policy="pec", pec_k="auto", snapshot_interval=5, ckpt_tier="memory", ckpt_memory_dir=memory)
        )
        flags |= dict(ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"), tensorboard_dir=str(tmp_path / "t"))
        # all experts take 2 s, far longer than forward and backward
        slow = dict(body="pec_bodies:train_with_slow_copies", bytes_per_s=12 * EXPERTS * 3 * 32 * 48 / 2)
        run = train("EP2", flags | dict(ckpt_keep=99), **slow, waits_from=30)
    events = [json.loads(line) for line in Path(tmp_path, "log", "events.jsonl").read_text().splitlines()]
    choice = next(event for event in events if event["type"] == "choice")
    k = choice["k_snapshot"]
    assert 1 <= choice["k_persist"] <= k < EXPERTS and f"A snapshot of {k} expert" in choice["reason"]
    store = Store(storage_at(str(tmp_path / "c")))
    saved = [Counter(name.rsplit(".", 1)[0] for name in store.read_manifest(i).operators) for i in store.iterations()]
    first, *others, last = (counts["layers.0.expert"] for counts in saved)
    assert first == last == EXPERTS
    assert others and set(others) <= {event["k_persist"] for event in events if event["type"] == "choice"}
    seen = {e["iteration"]: e for e in events if e["type"] == "iteration"}
    assert len(seen) == 60 == len(run.records) and seen[60].items() >= {"plt": 0.0, "k_snapshot": k}.items()
    board = EventAccumulator(str(tmp_path / "t")).Reload()
    assert board.Scalars("moc/k_snapshot")[-1].value == seen[60]["k_snapshot"] and board.Scalars("moc/plt")
