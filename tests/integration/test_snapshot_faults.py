"""Whatever kills a job, and whenever: it goes on from the newest whole snapshot, as if nothing had been."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.snapshot_files import EVERY, events, newest_whole, node_memory, start, stores, train
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import known
from tests.shared import ALL

SMALL = dict(global_batch_size=2)


@pytest.fixture
def flags(tier, data, tmp_path):
    """Of a run that takes a snapshot in each iteration, with a tier."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | SMALL | EVERY | places | dict(ckpt_tier=tier, train_iters=1000)


def straight(layout: str, data: dict, iterations: int):
    """The same run without snapshots and faults."""
    return known(layout, data | SMALL | dict(train_iters=1000, exit_interval=iterations))


def assert_goes_on(layout: str, flags: dict, iterations: int, undisturbed) -> None:
    """The next start takes the newest snapshot, and after so many iterations nobody can tell that there was a fault."""
    newest = newest_whole(flags)
    ended = train(layout, flags | dict(exit_interval=iterations))
    assert ended.start == newest
    assert ended.records == undisturbed.records[newest:]
    assert ended.weights == undisturbed.weights
    for tier, store in stores(flags).items():  # nothing is left of what was killed, and memory is given back
        held = {f"iter_{iteration:07d}" for iteration in store.iterations() if tier == "storage"}
        assert {name for name in store.storage.list_names() if not name.startswith(".")} == held


def newest_published(flags: dict) -> int:
    """Iteration of the newest snapshot in any tier; 0 if there is none."""
    return max((iteration for store in stores(flags).values() for iteration in store.iterations()), default=0)


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("tier", "layout", "times"),
    [("disk", "plain DP2", 30 if ALL else 6), ("memory", "plain DP2", 30 if ALL else 6), ("memory", "EP2", 3)],
)
def test_job_killed_at_random_times_resumes(tier, layout, times, flags, data):
    chance, reached = random.Random(tier), [0]
    for kills in range(times):
        world = start(layout, flags)
        wait_for(lambda world=world, kills=kills: len(events(flags, "start")) > kills or world.ended())
        if kills % 3 == 2:  # however slow the machine is, some come so far
            wait_for(lambda world=world: newest_published(flags) > reached[-1] or world.ended())
        time.sleep(chance.uniform(0, 0.4))
        world.kill()
        assert {result.exit for result in world.wait()} == {-9}  # and no process is left
        reached.append(newest_whole(flags))
    assert [event["iteration"] for event in events(flags, "start")] == reached[:-1]
    assert reached == sorted(reached) and reached[-1] > 0
    last = reached[-1] + 3
    assert_goes_on(layout, flags, last, straight(layout, data, last))


class Scene:
    """A job with snapshots up to that of iteration 2, which can be put back to where it was.

    Args:
        layout: of the job.
        flags: of the job.
        root: where to keep its files.
        memory: where to keep its memory.
    """

    def __init__(self, layout: str, flags: dict, root: Path, memory: str):
        self.layout = layout
        self._kept = {root / "snapshots": root / "kept", Path(memory): root / "kept memory"}
        places = dict(ckpt_dir=str(root / "snapshots"), ckpt_memory_dir=memory, log_dir=str(root / "log"))
        readers = dict(num_workers=int(layout == "EP2"))  # they end with their workers
        self.flags = flags | places | readers | dict(ckpt_blocking=True)
        calls = self.die(0, None, exit_interval=3)[0].value
        third = [number for number, call in enumerate(calls) if call.split(" < ")[0] == "copies"][2]
        shutil.rmtree(root / "snapshots")
        self.die(0, third)
        assert newest_whole(self.flags) == 2
        for place, kept in self._kept.items():
            shutil.copytree(place, kept)

    def die(self, rank: int, die_at: int | str | None, **changes) -> list:
        """Runs until a worker dies at one of its calls; how the workers ended."""
        body = "snapshot_bodies:train_dying"
        return start(self.layout, self.flags | changes, body, rank=rank, die_at=die_at, patience=1).wait()

    def put_back(self) -> None:
        """Undoes what was done to files and memory."""
        for place, kept in self._kept.items():
            shutil.rmtree(place)
            shutil.copytree(kept, place)

    def calls(self, rank: int) -> list[str]:
        """Which calls a worker makes from its start to its end after iteration 3, each once."""
        calls = self.die(rank, None, exit_interval=3)[rank].value
        assert {"copies half", "header", "write half", "rename", "fsync"} <= {c.split(" < ")[0] for c in calls}
        self.put_back()
        return list(dict.fromkeys(calls))


@pytest.mark.recovery
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tier", "layout", "rank", "every"),  # some; with MOC_TESTS_ALL, all
    [("disk", "plain", 0, 7), ("memory", "plain", 0, 6)]
    + [("disk", "plain DP2", 0, 13), ("memory", "plain DP2", 0, 17)]
    + [("disk", "plain DP2", 1, 11), ("memory", "plain DP2", 1, 10)]
    + [("disk", "EP2", 1, 25), ("memory", "EP2", 0, 35)],
)
def test_job_killed_before_each_modifying_call_resumes(tier, layout, rank, every, flags, data, tmp_path):
    undisturbed, every = straight(layout, data, 4), 1 if ALL else every

    def kill_at(scene: Scene, calls: list[str]) -> None:
        for call in calls:
            died = scene.die(rank, call, exit_interval=3)
            assert died[rank].exit == -9, (call, died[rank].output)
            assert newest_whole(scene.flags) in (2, 3), call
            assert_goes_on(scene.layout, scene.flags, 4, undisturbed)
            scene.put_back()

    with node_memory() as one, node_memory() as other, ThreadPoolExecutor(2) as two:
        scenes = [Scene(layout, flags, tmp_path / str(i), memory) for i, memory in enumerate((one, other))]
        calls = scenes[0].calls(rank)
        done = [two.submit(kill_at, scene, calls[i * every :: 2 * every]) for i, scene in enumerate(scenes)]
        for half in done:
            half.result()
