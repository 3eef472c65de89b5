"""A stage that computes again goes on with it when another one is lost, and computes no iteration twice."""

import os
import signal
from collections import Counter

import pytest

from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.launched import Launched
from tests.integration.snapshot_files import contents, node_memory
from tests.integration.test_determinism import DROPOUT
from tests.integration.test_localized import SMALL, SPARSE
from tests.integration.test_precision import BF16
from tests.integration.tiny import EXPERT_BIAS, FLAGS, train
from tests.worlds import run_world

LAST = 30
LOSSES = [  # a worker, the last iteration before it is lost, the one at which its replay is held, and who is lost then
    (1, 9, 7, 3),  # some operators are still to be loaded
    (2, 15, 15, 0),  # none are
    (1, 21, 20, 2),  # beside it
    (3, 27, 27, 3),  # itself
]
AGAIN = {(1, 3): range(6, 10), (0, 2): range(12, 16), (1, 2): range(18, 22), (3,): range(24, 28)}
"""By stages, the iterations after the first snapshot of the window that they load; windows begin at 2, 5, 8, ..."""
FAULTS = [
    fault
    for rank, iteration, held, _ in LOSSES
    for fault in (
        # not right after the vote: a survivor that has not begun its snapshot by then would let the window begin anew
        f"kill rank={rank} iteration={iteration + 1} point=before_commit",
        f"stop rank={rank} iteration={held} point=replaying",
    )
]


@pytest.mark.recovery
@pytest.mark.timeout(600)
def test_stage_loss_repeats_no_iteration_of_other_stages(data, tmp_path):
    flags = data | SMALL | DROPOUT | BF16 | dict(train_iters=LAST, global_batch_size=2)
    sparse = SPARSE | dict(ckpt_blocking=True, inject=FAULTS)
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, ckpt_tier="memory")
        with Launched("PP4", flags | sparse | places, tmp_path / "job") as job:
            for rank, _, held, other in LOSSES:
                job.tells(f"injected: stop of worker {rank} in iteration {held}, replaying")
                lose_while_held(job, rank, other)
            assert job.wait() == 0, job.console[-4000:]
    dense = dict(ckpt_policy="full", snapshot_interval=LAST, ckpt_dir=str(tmp_path / "straight"))
    straight = train("PP4", flags | dense)
    ends = [Store(LocalStorage(tmp_path / name)) for name in ("c", "straight")]
    assert contents(ends[0], LAST) == contents(ends[1], LAST)  # weights, masters, moments
    assert ends[0].read_manifest(LAST).operators == ends[1].read_manifest(LAST).operators  # and their counts of updates
    assert job.records() == [(r["iteration"], r["loss"], r["grad_norm"]) for r in straight.records]
    computed = Counter((stage, event["iteration"]) for event in job.events("replay") for stage in event["stages"])
    assert computed == Counter((stage, i) for stages, again in AGAIN.items() for stage in stages for i in again)
    resumed = job.events("resume")
    assert [tuple(event["stages"]) for event in resumed] == list(AGAIN)
    assert [list(event["went_on"]) for event in resumed] == [["1"], ["2"], ["1"], []]
    assert {event["exact"] for event in job.events("replay") if 3 in event["stages"]} == {True}
    # what the stage had computed before the other was lost, too
    assert {event["iteration"] for event in job.events("replay") if event["cut_off"]} >= {6, 12, 13, 14, 18, 19}


def lose_while_held(job: Launched, held: int, lost: int) -> None:
    """Kills a worker while another one, which computes again, is stopped; that one goes on when it is noticed."""
    before = job.pids
    job.kill(lost)
    job.replaces(before, lost)
    if held != lost:
        os.kill(before[held], signal.SIGCONT)


def test_interrupted_update_completes_with_same_frozen_operators(data):
    flags = FLAGS | data | SMALL | BF16 | EXPERT_BIAS | dict(num_layers=2, train_iters=4)
    body, pattern = "tests.integration.replay_bodies:complete_late", r"layers.0.expert.[0-3]|layers.1.*"
    for worker in run_world(2, body, flags=flags, pattern=pattern):
        assert worker["frozen"] and worker["called away"] == [1, [], True]
        assert worker["at once"]["told"] == worker["late"]["told"] == [2, sorted(worker["frozen"]), False]
        assert worker["late"] == worker["at once"]
        assert (
            {worker["late"]["steps"].get(name, 1) for name in worker["frozen"]}
            == {1}
            < {*worker["late"]["steps"].values()}
        )
