"""What is due after an iteration happens, also if a worker is lost before it has."""

import json

import pytest

from moc.store.dense_files import list_iterations
from tests.integration.launched import Launched
from tests.integration.snapshot_files import node_memory, train
from tests.integration.tiny import SHALLOW
from tests.shared import ALL

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(300)]
DUE = dict(train_iters=20, eval_interval=3, eval_iters=2, save_interval=3, exit_interval=12, snapshot_interval=3)
FAULTS = {
    "before anything": [f"kill rank={rank} iteration={3 + 3 * rank} point=completed" for rank in (0, 1)],
    "in evaluations": [f"kill rank={rank} iteration={3 + 3 * rank} point=evaluating" for rank in (0, 1)],
    "in saves": [f"kill rank={rank} iteration={3 + 3 * rank} point=saving" for rank in (0, 1)],
    "before the end": ["kill rank=1 iteration=12 point=completed"],
    "twice": ["kill rank=1 iteration=6 point=completed", "kill rank=1 iteration=6 point=evaluating"],
    "all at once": ["kill ranks=0,1 iteration=12 point=evaluating"],
}


@pytest.fixture(scope="module")
def flags(data):
    return data | SHALLOW | dict(ckpt_policy="full") | DUE


def evaluations(events: list[dict]) -> list[tuple]:
    return [(event["split"], event["iteration"], event["loss"]) for event in events]


LAYOUTS = {"EP2": {}, "DP2": dict(use_distributed_optimizer=False)}
"""All go back to the newest snapshot where both are needed for the state, and else to the last iteration."""


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param, LAYOUTS[request.param]


@pytest.fixture(scope="module")
def straight(layout, flags, tmp_path_factory):
    """The evaluations of a run that loses nobody."""
    place = tmp_path_factory.mktemp("straight")
    places = dict(ckpt_dir=str(place / "c"), save=str(place / "s"), log_dir=str(place / "log"))
    trained = train(layout[0], flags | layout[1] | places)
    assert list_iterations(place / "s") == [3, 6, 9, 12] and len(trained.records) == 12
    told = map(json.loads, (place / "log/events.jsonl").read_text().splitlines())
    return evaluations([event for event in told if event["type"] == "evaluation"])


@pytest.mark.parametrize("when", FAULTS)
def test_due_actions_happen_despite_lost_worker(when, layout, flags, straight, tmp_path):
    name, own = layout
    if not ALL and ([*FAULTS].index(when) + [*LAYOUTS].index(name)) % 2:
        pytest.skip("MOC_TESTS_ALL=1 brings about every fault in every layout")
    with node_memory() as memory:
        places = dict(ckpt_tier="memory", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
        places |= dict(save=str(tmp_path / "s"), inject=FAULTS[when])
        with Launched(name, flags | own | places, tmp_path) as job:
            assert job.wait() == 0, job.console[-4000:]
    assert len(job.events("inject")) == sum(1 + fault.count(",") for fault in FAULTS[when])
    assert evaluations(job.events("evaluation")) == straight
    assert list_iterations(tmp_path / "s") == [3, 6, 9, 12]
    taken = {event["iteration"] for event in job.events("snapshot")}
    assert taken >= {3, 6, 9, 12} or when != "before anything"  # one that survivors complete has no event
    assert [event["iteration"] for event in job.events("exit")] == [12]


def test_job_that_ended_at_limit_resumes(flags, tmp_path):
    """What ended the first job does not end the second, also if that loses a worker before its first iteration."""
    with node_memory() as memory:
        places = dict(ckpt_tier="memory", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
        places |= dict(save=str(tmp_path / "s"))
        for inject in (["kill rank=1 iteration=5 point=start"], ["kill rank=1 iteration=13 point=forward_backward"]):
            with Launched("EP2", flags | places | dict(inject=inject), tmp_path / "job") as job:
                assert job.wait() == 0, job.console[-4000:]
    assert [event["iteration"] for event in job.events("exit")] == [12, 20]
    assert [event["iteration"] for event in job.events("evaluation")] == [3, 6, 9, 12, 15, 18, 20, 20]


def test_abandoned_save_is_repeated(flags, tmp_path):
    with node_memory() as memory:
        places = dict(ckpt_tier="memory", ckpt_memory_dir=memory, ckpt_dir=str(tmp_path / "c"))
        places |= dict(save=str(tmp_path / "s"), async_save=True, save_interval=6, save_retain_interval=6)
        with Launched("EP2", flags | places | dict(inject="kill rank=1 iteration=7 point=start"), tmp_path) as job:
            assert job.wait() == 0, job.console[-4000:]
    assert {6, 7, 8} & {event["iteration"] for event in job.events("save")}
    assert list_iterations(tmp_path / "s")[-1] == 12
