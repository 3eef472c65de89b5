"""Chains of gradients that are folded beside training: what a run resumes from has the bits that it had."""

from __future__ import annotations

import contextlib
import time

import psutil
import pytest

from moc.session.folds import Folds
from moc.state.detail import Detail
from moc.store.storage import LocalPlace
from moc.store.store import Store
from moc.store.tiers import memory_found
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, events, node_memory, start, train
from tests.integration.test_gradients import CLIPPED, GRADIENTS, WAYS
from tests.integration.test_peers import lose, memory_of
from tests.shared import ALL
from tests.unit.recovery.test_folds import Run
from tests.unit.session.test_folds import go_on, renew

FOLDED = GRADIENTS | dict(selective_fold="peers")
FOLDER, PROGRAM = "moc.session.folder", "tests/integration/folding_pretrain_gpt_moe.py"


def folders(job: Launched) -> list[psutil.Process]:
    """The processes of a job that fold."""
    found = []
    for launcher in job.launchers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [p for p in psutil.Process(launcher.pid).children(recursive=True) if FOLDER in p.cmdline()]
    return found


def folded_until(job: Launched, iteration: int, seconds: float = 120) -> None:
    """Waits until experts were folded after an iteration."""
    deadline = time.monotonic() + seconds
    while not any(event["folded"] and event["iteration"] > iteration for event in job.events("fold")):
        assert job.process.poll() is None and time.monotonic() < deadline, job.console[-4000:]
        time.sleep(0.02)


@pytest.mark.recovery
@pytest.mark.parametrize("way", WAYS if ALL else ["fp16 EP2"])
def test_a_run_that_resumes_from_folded_experts_ends_as_without_a_fault(way, data, tmp_path):
    layout, precision = WAYS[way]
    flags = data | CLIPPED | precision | dict(train_iters=30)
    with node_memory() as memory:
        snapshots = FOLDED | dict(ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"), log_dir=str(tmp_path / "log"))
        snapshots |= dict(selective_max_age=8)
        killed = start(layout, flags | snapshots, body="pec_bodies:die_after_folding", iteration=28)
        assert {result.exit for result in killed.wait()} == {-9}
        store = Store(memory_found(memory, snapshots["ckpt_dir"]), slack=True)
        there = {file for iteration in store.iterations() for file in store.manifest(iteration).files}
        assert any(file.endswith(".folded.safetensors") for file in there)
        resumed = train(layout, flags | snapshots)
    told = events(flags | snapshots, "fold")
    assert sum(event["equal"] for event in told) >= 4 and not any(event["differing"] for event in told)
    (resume,), (lost,) = events(flags | snapshots, "resume"), events(flags | snapshots, "lost")
    whole = train(layout, flags)
    assert resume["iteration"] == resumed.start >= 27 and lost["plt"] == 0
    if "fp16" in way:
        assert sum(record["skipped"] for record in whole.records[1:27]) >= 1
    assert resumed.weights == whole.weights and resumed.losses == whole.losses[resumed.start :]


def test_a_killed_folder_is_started_again_and_ends_with_its_worker(tmp_path):
    run, folds = Run(tmp_path / "memory"), Folds()
    run.train(e0=Detail.FULL, e1=Detail.FULL, e2=Detail.FULL)
    go_on(folds, run, 2)
    assert renew(folds, run)[0]["equal"] == 1 and (killed := folds._process) is not None
    killed.kill()
    go_on(folds, run, 1)
    before = run.comes_back()  # whatever it was doing: bit by bit
    assert go_on(folds, run, 6) and min(run.comes_back().values()) > max(4, min(before.values()))
    assert (last := folds._process) is not None and last is not killed
    folds.close()
    assert last.poll() is not None


@pytest.mark.recovery
def test_folders_a_node_and_a_worker_are_lost_and_nobody_can_tell(data, tmp_path):
    """Folders are killed, then a node is lost for good, and a worker dies while it repeats what was not folded yet."""
    flags = data | CLIPPED | dict(train_iters=60)
    plain = flags | dict(ckpt_policy="full", snapshot_interval=99, ckpt_dir=str(tmp_path / "plain"))
    assert set(train("EP2", plain).codes) == {0}
    with node_memory() as memory:
        flags |= FOLDED | dict(ckpt_tier="peers", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
        flags |= dict(selective_max_age=8, max_snapshot_lag=1, inject=["kill rank=1 iteration=0 point=folding"])
        with Launched("EP2", flags, tmp_path / "job", nodes=2, spares=1, program=PROGRAM) as job:
            folded_until(job, 0)
            killed = folders(job)
            for process in killed:
                process.kill()
            folded_until(job, job.iteration)
            lose(job, 1, memory_of(flags, "1"))
            assert job.wait() == 0, job.console[-4000:]
        assert killed and {event["plt"] for event in job.events("lost")} == {0} and job.events("resume")
        assert not any(event["differing"] for event in job.events("fold"))
    ends = (contents(Store(LocalPlace(tmp_path / name)), 60) for name in ("plain", "c"))
    assert next(ends) == next(ends)
