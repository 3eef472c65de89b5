"""Commands that save and load are killed at random moments, and started again until they end."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.live.job import Events
from moc.errors import codes_in
from tests.integration.snapshot_files import node_memory, start, train
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import Trained
from tests.reports.test_runs_on_disk import manifests
from tests.shared import ALL

COMMANDS, LAST = 40 if ALL else 2, 10
LAYOUTS = ("1", "DP2", "EP2", "PP2")
PLACES = (  # A has the checkpoints 2 and 4
    dict(save="B"),
    dict(save="B", load="B"),
    dict(save="B", load="A"),
    dict(save="B", load="A", finetune=True),
    dict(save="B", load="A", ckpt_step=2),
    dict(save="B", load="B", pretrained_checkpoint="A"),
    dict(save="A", load="A"),
)
EACH = dict(snapshot_interval=1, ckpt_dir="C")
SNAPSHOTS = (
    {},
    EACH | dict(ckpt_policy="full", ckpt_tier="disk"),
    EACH | dict(ckpt_policy="full", ckpt_tier="memory", persist_interval=3),
    EACH | dict(ckpt_policy="sparse", sparse_window=2),
    EACH | dict(ckpt_policy="gradient", gradient_window=3, ckpt_tier="memory", persist_interval=3),
)
PATHS = ("save", "load", "pretrained_checkpoint", "ckpt_dir", "log_dir")


def in_directory(root: Path, flags: dict) -> dict:
    """The flags with all paths below ``root``."""
    return {name: str(root / value) if name in PATHS else value for name, value in flags.items()}


@pytest.mark.recovery
@pytest.mark.parametrize("seed", range(COMMANDS))
def test_killed_command_ends_with_undisturbed_weights(seed, data, tmp_path):
    chance = random.Random(seed)
    layout, places, snapshots = (chance.choice(options) for options in (LAYOUTS, PLACES, SNAPSHOTS))
    saves = dict(save_interval=2, async_save=chance.random() < 0.5, train_iters=LAST, log_dir="log")
    if "A" in places.values():
        train(layout, data | dict(save=str(tmp_path / "A"), save_interval=2, exit_interval=4, train_iters=LAST))
        shutil.copytree(tmp_path / "A", tmp_path / "straight" / "A")
    events, kept = Events(tmp_path / "log" / "events.jsonl"), {"A": manifests(tmp_path / "A")}
    others = kept["A"].items()  # of another launch; a run may save an iteration of its own again
    with node_memory() as memory, node_memory() as other_memory:
        killed, straight = (
            data
            | in_directory(root, places | saves | snapshots)
            | (dict(ckpt_memory_dir=directory) if snapshots.get("ckpt_tier") == "memory" else {})
            for root, directory in ((tmp_path, memory), (tmp_path / "straight", other_memory))
        )
        reference = train(layout, straight)
        for _ in range(chance.randint(2, 4)):
            kill_after(layout, killed, events, iterations=chance.randrange(5), seconds=chance.uniform(0, 0.5))
            now = {name: manifests(tmp_path / name) for name in ("A", "B")}
            assert all(kept[name].keys() <= now[name].keys() for name in kept) and others <= now["A"].items()
            kept = now
        results = start(layout, killed).wait()
    if results[0].exit:  # without --load or snapshots, the command cannot continue
        assert codes_in(results[0].output) == ["save-of-another-run"], results[0].output[-3000:]
        assert "load" not in places and not snapshots and kept["B"]
    else:
        ended = Trained([result.value for result in results])
        assert ended.weights == reference.weights, (layout, places, saves, snapshots)
    assert all(kept[name].keys() <= manifests(tmp_path / name).keys() for name in kept)
    assert others <= manifests(tmp_path / "A").items()


def kill_after(layout: str, flags: dict, events: Events, iterations: int, seconds: float) -> None:
    """Starts a run, and kills all workers some time after some of its iterations."""
    before, world = len(events.of("iteration")), start(layout, flags)
    wait_for(lambda: world.ended() or len(events.of("iteration")) >= before + iterations)
    time.sleep(seconds)
    with contextlib.suppress(BrokenPipeError):  # it has ended
        world.kill()
    world.wait()
