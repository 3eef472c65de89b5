"""Localized recovery: only stages that lost something compute again, and the run is the one without faults."""

import shutil
import time
from pathlib import Path

import pytest

from moc.files.event_log import read_events
from moc.report.figures import compute_report
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS, known, train
from tests.shared import ALL

SLOW_COPIES = "tests/integration/slow_copies_pretrain_gpt_moe.py"
SPARSE = dict(ckpt_policy="sparse", sparse_window=3, upstream_logging=True)
SMALL = dict(clip_grad=0.3, lr=1e-2)
FAULTS = [
    "error rank=3 iteration=7 point=after_commit",  # as if it had missed the vote: it completes the iteration later
    "kill rank=1 iteration=7 point=after_commit",
    "kill ranks=1,2 iteration=11 point=after_commit",
    "kill rank=2 iteration=19 point=before_commit",
    "kill rank=3 iteration=19 point=loading",  # while 2 recovers
]


def until_written(job: Launched, root: str | Path, *iterations: int, of: dict[str, list[int]]) -> None:
    """Waits until ranks have written their parts of snapshots, which no vote has published yet.

    Args:
        job: the job that writes them.
        root: directory below which the snapshots are.
        iterations: of the snapshots.
        of: the ranks by a pattern of the directory in ``root`` that has their snapshots.
    """

    def has(there: Path, rank: int) -> bool:  # published, or reported by the rank under whichever term
        return (there / "manifest.json").exists() or any(there.glob(f".rank_{rank:05}.*json"))

    def written() -> bool:
        return all(
            any(has(there / checkpoint_name(iteration), rank) for there in Path(root).glob(pattern))
            for pattern, ranks in of.items()
            for rank in ranks
            for iteration in iterations
        )

    while not written():
        assert job.process.poll() is None, job.console[-4000:]
        time.sleep(0.02)


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_only_lost_stages_replay_iterations(data, tmp_path):
    hard = data | SMALL | DROPOUT | BF16 | dict(train_iters=28)
    places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=str(tmp_path))
    with Launched("PP4", hard | SPARSE | places | dict(inject=FAULTS), tmp_path / "job") as job:
        job.reach(15)
        job.kill(0, 3)
        job.reach(24)
        for path in tmp_path.rglob("logs/rank_00001/*.safetensors"):
            path.unlink(missing_ok=True)  # and so stage 1 has to compute as well
        job.kill(0)
        assert job.wait() == 0, job.console[-4000:]
    dense = dict(ckpt_policy="full", snapshot_interval=28, ckpt_dir=str(tmp_path / "straight"))
    straight = train("PP4", hard | dense)
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 28) == contents(ends[1], 28)  # weights, masters, moments
    assert ends[0].read_manifest(28).operators == ends[1].read_manifest(28).operators  # and their counts of updates
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    resumed = job.events("resume")  # one stage; two together; two apart; one more while one recovers; one without logs
    assert [event["stages"] for event in resumed] == [[1], [1, 2], [0, 3], [2, 3], [0, 1]]
    assert resumed[0]["iteration"] == 7
    assert [event["kept"] for event in resumed] == [4 - len(event["stages"]) for event in resumed]
    replays = job.events("replay")
    assert all(event["workers"] == len(event["stages"]) for event in replays)
    assert all(event["exact"] is (True if 3 in event["stages"] else None) for event in replays)
    assert {event["frozen"] > 0 for event in replays} == {True, False}
    assert not list(tmp_path.rglob("logs"))
    said = compute_report("this run", read_events(job.log))  # of every recovery and of all the time
    assert [list(one.stages) for one in said.each] == [event["stages"] for event in resumed]
    assert [one.kept for one in said.each] == [event["kept"] for event in resumed]
    assert (sum(one.replayed for one in said.each), said.recoveries.not_exact) == (len(replays), 0)
    assert said.wall_s == pytest.approx(max(event["time"] for event in job.events("exit")) - said.began)
    assert said.iterations == 28 and 0 < said.ettr < 1 and set(said.gauges) >= {"hhi", "skewness"}


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_stage_lost_during_and_after_window_measurement(data, tmp_path):
    flags = data | SMALL | BF16 | dict(train_iters=40)
    sparse = dict(ckpt_policy="sparse", sparse_window="auto", upstream_logging=True)
    places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=str(tmp_path))
    with Launched("PP2", flags | sparse | places, tmp_path / "job", program=SLOW_COPIES) as job:
        for iteration, rank in ((5, 1), (13, 0), (25, 1), (34, 0)):
            job.reach(iteration)
            job.kill(rank)
        assert job.wait() == 0, job.console[-4000:]
    dense = dict(ckpt_policy="full", snapshot_interval=40, ckpt_dir=str(tmp_path / "straight"))
    straight = train("PP2", flags | dense)
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 40) == contents(ends[1], 40)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert max(event["sparse_window"] for event in job.events("choice")) > 1
    assert [(event["stages"], event["kept"]) for event in job.events("resume")] == [([1], 1), ([0], 1)]
    assert {event["frozen"] > 0 for event in job.events("replay")} == {True, False}


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_stage_with_replicas_on_other_nodes_replays(data, tmp_path):
    flags = data | SMALL | BF16 | EXPERT_BIAS | dict(train_iters=18)
    # when 1 dies, 2 has updated its half of the weights of stage 1, and waits for that of 3, which comes too late: who
    # is cut off while weights are gathered keeps its state
    faults = dict(
        inject=["slow rank=3 iteration=9 point=after_commit seconds=3", "kill rank=1 iteration=9 point=after_commit"]
    )
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier="memory", node_of_rank="0,1,0,1")
        with Launched("PP2xDP2", flags | SPARSE | places | faults, tmp_path / "job") as job:
            job.reach(14)
            job.kill(2)
            assert job.wait() == 0, job.console[-4000:]
    straight = known("PP2xDP2", flags)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    first, second = job.events("resume")
    assert (first["iteration"], first["stages"], second["stages"]) == (9, [0], [1])
    assert (first["kept"], second["kept"]) == (2, 2)
    assert {tier for event in (first, second) for _, tier in event["sources"]} == {"memory"}
    assert {event["exact"] for event in job.events("replay")} == {None, True}


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "window"), [("interleaved", 5), *ALL * [("PP2", 1)]])
def test_localized_recovery_works_with_any_window_length(layout, window, data, tmp_path):
    flags = data | SMALL | DROPOUT | BF16 | dict(train_iters=18)
    places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=str(tmp_path))
    sparse = SPARSE | dict(sparse_window=window, ckpt_blocking=True)
    faults = dict(
        inject=["kill rank=1 iteration=10 point=forward_backward", "kill rank=0 iteration=16 point=after_commit"]
    )
    with Launched(layout, flags | sparse | places | faults, tmp_path / "job") as job:
        assert job.wait() == 0, job.console[-4000:]
    straight = train(
        layout, flags | dict(ckpt_policy="full", snapshot_interval=18, ckpt_dir=str(tmp_path / "straight"))
    )
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], 18) == contents(ends[1], 18)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    # the first snapshot has everything; windows of 5 end at 6, 11 and 16, which is not taken any more when 0 is killed
    stages, again = {1: ([[], [0]], [16]), 5: ([[1], [0]], [*range(3, 10), *range(8, 17)])}[window]
    assert [event["stages"] for event in job.events("resume")] == stages
    assert [event["iteration"] for event in job.events("resume")] == [9, 16]
    assert [event["iteration"] for event in job.events("replay")] == again


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_window_counts_despite_lost_committing_worker(data, tmp_path, monkeypatch):
    flags = data | SMALL | BF16 | dict(train_iters=14)
    # when 0 dies, all have the last snapshot of the window 5 to 7, and it was about to say so for its node
    faults = dict(inject=["kill rank=0 iteration=8 point=after_commit"])
    monkeypatch.setenv("TEST_WAITS_IN", "8")
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier="memory", node_of_rank="0,1")
        with Launched("PP2", flags | SPARSE | places | faults, tmp_path / "job") as job:
            until_written(job, memory, 5, 6, 7, of={"*/*node-0": [0], "*/*node-1": [1]})
            job.go_on(8)
            assert job.wait() == 0, job.console[-4000:]
    straight = known("PP2", flags)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert [(event["iteration"], event["stages"]) for event in job.events("resume")] == [(8, [0])]
    assert [event["iteration"] for event in job.events("replay")] == [6, 7, 8]


@pytest.mark.recovery
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tier", "victim"), [("disk", 1), *ALL * [("memory", 0)]])
def test_lost_part_of_window_is_saved_again_by_its_stage(tier, victim, data, tmp_path, monkeypatch):
    flags = data | SMALL | BF16 | dict(train_iters=14)
    # when it dies for the first time, its part of snapshot 6 is not saved; without it the window 5 to 7 would never be
    faults = dict(
        inject=[
            f"slow rank={victim} iteration=6 point=snapshot_copying seconds=600",
            f"kill rank={victim} iteration=7 point=after_commit",
            f"kill rank={victim} iteration=9 point=after_commit",
        ]
    )
    monkeypatch.setenv("TEST_WAITS_IN", "9")
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier=tier)
        with Launched("PP2", flags | SPARSE | places | faults, tmp_path / "job") as job:
            root, pattern = (tmp_path, "c") if tier == "disk" else (memory, "*/*")
            until_written(job, root, 5, 6, 7, of={pattern: [0, 1]})
            job.go_on(9)
            assert job.wait() == 0, job.console[-4000:]
    straight = known("PP2", flags)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    resumed = [(event["iteration"], event["stages"]) for event in job.events("resume")]
    assert resumed == [(7, [victim]), (9, [victim])]
    assert [event["iteration"] for event in job.events("replay")] == [*range(3, 8), *range(6, 10)]


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_lost_memory_is_saved_again_generations_later(data, tmp_path, monkeypatch):
    flags = data | SMALL | BF16 | dict(train_iters=14)
    faults = dict(
        inject=[
            "kill rank=1 iteration=7 point=after_commit",
            "slow rank=0 iteration=7 point=loaded seconds=15",  # time to lose what is lost below
            "kill rank=1 iteration=8 point=before_commit",
            "kill rank=1 iteration=10 point=after_commit",
        ]
    )
    monkeypatch.setenv("TEST_WAITS_IN", "9")
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier="memory", node_of_rank="0,1")
        with Launched("PP2", flags | SPARSE | places | faults, tmp_path / "job") as job:
            job.tells(", loaded")  # recovery is over, and 0 sleeps
            (gone,) = Path(memory).rglob("*node-1/iter_0000005")  # as if the node, and what was copied of it, were lost
            shutil.rmtree(gone)
            until_written(job, memory, 5, 6, 7, of={"*/*node-0": [0], "*/*node-1": [1]})
            job.go_on(9)
            assert job.wait() == 0, job.console[-4000:]
    straight = known("PP2", flags)
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    assert [(event["iteration"], event["stages"]) for event in job.events("resume")] == [(7, [1]), (7, [1]), (10, [1])]
    assert [event["iteration"] for event in job.events("replay")] == [*range(3, 8), *range(3, 8), *range(6, 11)]
