"""A window is found as a run finds it, and what was computed again is refused where it is not what it was."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.pretraining.convert import program
from megatron.pretraining.convert.window import _check_loss, _run, window_in
from moc.inspect.coverage import operator_or_other
from tests.cases import each_row
from tests.errors import only_code, raises
from tests.unit.pretraining.convert.models import Model
from tests.unit.pretraining.convert.test_program import refused, snapshot

OPERATORS = list(Model().operators)
WINDOW = [OPERATORS[:5], OPERATORS[5:9], OPERATORS[9:]]


class Sparse(Model):
    """A snapshot of some operators, with the weights that others compute with."""

    def __init__(self, iteration, full, compute):
        super().__init__(biased=False, iteration=iteration)
        parts = {"master": full, "exp_avg": full, "exp_avg_sq": full, "param": compute}
        weights = [replace(entry, slot="param") for entry in self.tensors if entry.slot == "master"]
        self.tensors = [e for e in (*self.tensors, *weights) if operator_or_other(e.name) in parts[e.slot]]
        self.facts = replace(self.facts, iteration=iteration, policy="sparse")
        self.operators = dict.fromkeys(full, ("full", 2)) | dict.fromkeys(compute, ("compute", None))


@pytest.fixture
def windows(tmp_path):
    """Snapshots 4 to 6, which are a window, and 7, the begin of the next one."""
    for place, iteration in enumerate((4, 5, 6, 7)):
        later = [name for turn in WINDOW[place % 3 + 1 :] for name in turn]
        snapshot(tmp_path, Sparse(iteration, WINDOW[place % 3], later))
    return tmp_path


def test_newest_complete_window_is_selected(windows):
    for iteration in (None, 6):
        window = window_in(windows, iteration)
        assert list(window.manifests) == [4, 5, 6] and window.end.iteration == 6


def test_full_snapshot_is_a_window(windows):
    snapshot(windows)
    assert list(window_in(windows, 3).manifests) == [3]


@pytest.mark.parametrize(
    ("iteration", "code"),
    [
        (5, "window-incomplete"),
        (7, "window-incomplete"),
        (8, "checkpoint-missing"),
    ],
)
def test_iteration_ending_no_window_is_named(windows, iteration, code):
    with raises(code, str(iteration)):
        window_in(windows, iteration)


def test_window_with_missing_snapshot_is_incomplete(windows):
    (windows / "iter_0000005" / "manifest.json").unlink()
    with raises("window-incomplete", str(windows)):
        window_in(windows, None)
    with raises("checkpoint-missing", str(windows / "iter_0000005")):
        window_in(windows / "iter_0000005", None)


@pytest.mark.parametrize(("iteration", "code"), [(4, "optimizer-state-missing"), (6, "operator-missing")])
def test_missing_state_is_named_without_flags(windows, iteration, code, capsys):
    told = refused(capsys, windows, windows / "dense", "--iteration", iteration)
    assert only_code(told) == code and not (windows / "dense").exists()


def test_existing_output_is_refused_before_computation(windows, capsys):
    (windows / "dense" / "iter_0000006").mkdir(parents=True)
    (windows / "dense" / "iter_0000006" / "manifest.json").touch()
    assert only_code(refused(capsys, windows, windows / "dense", "--", "--no-flag-at-all")) == "output-exists"


def test_process_count_requires_flags(windows, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main([str(windows), str(windows / "dense"), "--nproc-per-node", "2"])
    assert only_code(capsys.readouterr().err) == "flag-needs-another"


SAYS = """
print(" loading")
print("pretrain_gpt_moe.py: error (worker 1): it differs: --num-layers is 2 [checkpoint-of-another-model]")
print("Traceback of a launcher")
"""


def test_program_failure_reason_is_reported(capfd):
    places = Path("copies"), Path("snapshots")
    with raises("checkpoint-of-another-model", "--num-layers"):
        _run([sys.executable, "-c", f"{SAYS}exit(1)"], *places)
    assert capfd.readouterr() == ("", " loading\n")
    with raises("replay-failed", "exit code 3"):
        _run([sys.executable, "-c", "exit(3)"], *places)
    _run([sys.executable, "-c", ""], *places)


@each_row(
    ("loss", "elsewhere", "taken"),
    [(5.0001, True, True), (4.9999, True, True), (5.0001, False, False), (5.1, True, False), (None, True, False)],
)
def test_changed_replay_loss_is_refused(loss, elsewhere, taken):
    manifest = SimpleNamespace(iteration=6, state={"record": {"loss": 5.0}})
    if taken:
        return _check_loss(loss, manifest, elsewhere)
    with raises("replay-differs", "iteration 6", str(loss), "5.0"):
        _check_loss(loss, manifest, elsewhere)
