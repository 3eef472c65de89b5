"""When chains are folded beside training: after a comparison, and until one differs."""

from concurrent.futures import wait
from dataclasses import replace

import pytest

from moc.recovery import gradient_folding as folding
from moc.recovery.gradient_folding import execute_order
from moc.session import helpers as module
from moc.session.helpers import BackgroundOptimizer
from moc.store.errors import CheckpointError
from tests.errors import only_code
from tests.unit.recovery.test_folds import ALL_GRAD, FULL, GRAD, NAMES, Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "memory")
    run.train(e0=FULL, e1=FULL, e2=FULL)
    return run


@pytest.fixture
def folds(run, monkeypatch):
    """The folder's work, without its process."""
    monkeypatch.setattr(
        BackgroundOptimizer, "_order", lambda self, memory, compare, fold: execute_order(run.store, compare, fold)
    )
    folds = BackgroundOptimizer()
    yield folds
    folds.close()


def go_on(folds: BackgroundOptimizer, run: Run, iterations: int, **details) -> list[dict]:
    """What a run does with them; what is reported of it."""
    told = []
    for _ in range(iterations):
        wait(folds._pending.values())
        folds.install_results(run.carrier)
        run.train(**(details or ALL_GRAD))
        folds.submit_next(run.carrier)
        told.append(folds.on_totals(folds.contribution()))
    return list(filter(None, told))


def renew(folds: BackgroundOptimizer, run: Run) -> list[dict]:
    wait(folds._pending.values())
    folds.install_results(run.carrier)
    run.train(e0=FULL, e1=GRAD, e2=GRAD, compared=(0,))
    return go_on(folds, run, 4)


def test_folding_starts_after_comparison_in_parts(folds, run):
    assert go_on(folds, run, 5) == [] and run.comes_back() == dict.fromkeys(NAMES, 1)
    told, *reports = renew(folds, run) + go_on(folds, run, 6)
    assert told["equal"] == 1 and not told["differing"] and not told["folded"]
    assert {report["folded"] for report in reports} == {1} and sum(report["gradients"] for report in reports) > 20
    assert min(run.comes_back().values()) > 10


def test_digest_difference_stops_apply_on_all_nodes(folds, run, monkeypatch):
    update = folding.update
    monkeypatch.setattr(folding, "update", lambda s, g, step, rule, f: update(s, g, step, replace(rule, lr=0.1), f))
    go_on(folds, run, 3)
    (told,) = renew(folds, run)
    assert told["differing"] == 1
    assert go_on(folds, run, 5) == [] and run.comes_back() == {NAMES[0]: 5, NAMES[1]: 1, NAMES[2]: 1}
    assert NAMES[0] not in run.store.read_manifest(1).operators  # the chain before is not kept any longer
    other = BackgroundOptimizer()
    nothing = dict.fromkeys(other.contribution(), 0.0)
    other.on_totals(nothing | {"fold_equal": 1.0})
    assert other._is_verified and not other._is_disabled
    other.on_totals(nothing | {"fold_differing": 1.0})
    assert other._is_disabled


def test_unsupported_optimizer_is_reported_once(folds, run, monkeypatch, capsys):
    monkeypatch.setattr(folding, "update", lambda *_: (_ for _ in ()).throw(ValueError("its state is not Adam's")))
    go_on(folds, run, 3)
    assert renew(folds, run) == [] and go_on(folds, run, 6) == []
    assert only_code(capsys.readouterr().err) == "folding-unsupported"
    assert run.comes_back() == {NAMES[0]: 5, NAMES[1]: 1, NAMES[2]: 1}


def test_repeatedly_dying_applier_is_disabled(folds, run, monkeypatch, capsys):
    def die(*_):
        raise CheckpointError("the folder has died", code="helper-lost")

    monkeypatch.setattr(BackgroundOptimizer, "_order", die)
    go_on(folds, run, 3)
    renew(folds, run)
    go_on(folds, run, module._MAX_FAILURES)
    assert only_code(capsys.readouterr().err) == "helper-lost"
    assert run.comes_back() == {NAMES[0]: 5, NAMES[1]: 1, NAMES[2]: 1}
    assert NAMES[0] not in run.store.read_manifest(1).operators
