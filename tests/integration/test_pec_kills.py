"""A job with partial snapshots is killed, early and again: what it loses is what was said before training."""

from collections.abc import Iterator

import pytest

from tests.integration.snapshot_files import events, node_memory, start, stores, train
from tests.integration.test_pec import EXPERTS, LAYERS, PEC, SMALL

SLOW = "slow rank=0 iteration=0 point=persisting seconds=600"

pytestmark = pytest.mark.recovery


@pytest.fixture
def flags(data, tmp_path) -> Iterator[dict]:
    """Of a run that saves one expert of each layer in each iteration."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "c"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | PEC | SMALL | places | dict(pec_k=1)


def killed(flags: dict, *faults: str) -> None:
    """Trains until a fault kills the only worker."""
    (result,) = start("1", flags | dict(inject=list(faults))).wait()
    assert result.exit == -9, result.output[-2000:]


def test_memory_tier_loses_at_most_twice_predicted_tokens(flags):
    """Nothing but the first snapshot goes to storage; experts come back from memory in their newest versions."""
    flags |= dict(ckpt_tier="memory", train_iters=100)
    killed(flags, f"kill rank=0 iteration={4 * EXPERTS} point=start")
    assert len(stores(flags)["storage"].iterations()) == 1
    again = train("1", flags | dict(exit_interval=4 * EXPERTS + 2))
    assert set(again.codes) == {0}
    (expected, *_), (resumed,), (lost,) = (events(flags, kind) for kind in ("expected", "resume", "lost"))
    sources = {tuple(source) for source in resumed["sources"]}
    assert {tier for _, tier in sources} == {"memory"}
    assert min(iteration for iteration, _ in sources) == resumed["iteration"] - expected["oldest"]
    assert resumed["iteration"] >= 4 * EXPERTS - 3  # of the last ones one may not be published yet
    # experts are not equally busy, and some tokens are those of an iteration that is trained anew
    assert 0 < lost["of_training"] < 2 * expected["plt"]


def test_kill_during_first_snapshot_write_restarts_from_zero(flags):
    """Nothing was safe, and what was written of it is in nobody's way."""
    killed(flags | dict(train_iters=12), SLOW, "kill rank=0 iteration=3 point=start")
    assert stores(flags)["storage"].iterations() == []
    last = train("1", flags | dict(train_iters=12))
    assert set(last.codes) == {0} and last.start == 0 and len(last.records) == 12
    assert stores(flags)["storage"].iterations()[-1] == 12


def test_killed_again_before_next_stored_snapshot(flags):
    """Storage has nothing yet that partial snapshots could be added to, until it is given everything once more."""
    flags |= dict(ckpt_tier="memory", persist_interval=10, train_iters=20)
    killed(flags, SLOW, "kill rank=0 iteration=4 point=start")
    assert stores(flags)["storage"].iterations() == []
    killed(flags, "kill rank=0 iteration=7 point=start")
    killed(flags, "kill rank=0 iteration=16 point=start")
    resumed = [event["iteration"] for event in events(flags, "resume")]
    assert len(resumed) == 2 and 1 <= resumed[0] < 4 and resumed[0] <= resumed[1] < 7
    stores(flags)["memory"].remove_all()
    last = train("1", flags)  # from storage alone
    assert set(last.codes) == {0} and 1 <= last.start <= 15 and last.start + len(last.records) == 20
    names = [operator for operator in stores(flags)["storage"].read_manifest(20).operators if ".expert." in operator]
    assert len(names) == EXPERTS * LAYERS


def test_early_fault_of_long_run_does_not_change_k(flags):
    """MoC-System, section 5.3: what counts is the proportion of the whole training's tokens, by ``--train-iters``."""
    trained, fault = 100_000, 20
    flags |= dict(pec_dynamic_k=True, ckpt_blocking=True, train_iters=trained)
    killed(flags, f"kill rank=0 iteration={fault + 1} point=start")
    assert set(train("1", flags | dict(exit_interval=fault + 2)).codes) == {0}
    (lost,) = events(flags, "lost")
    assert lost["iteration"] == fault and lost["raised_by"] > 0.0375 / 4  # of the tokens so far far too many
    assert 0 < lost["of_training"] == pytest.approx(lost["raised_by"] * fault / trained)
    assert {(event["k_snapshot"], event["k_persist"]) for event in events(flags, "iteration")} == {(1, 1)}
