"""Runs of the previous release continue: ``python -m tests.integration.previous_release`` recorded their state."""

from __future__ import annotations

import pytest

from moc.errors import codes_in
from moc.store import dense_files
from tests.integration import previous_release
from tests.integration.entry_jobs import OWN_PROGRAM, run
from tests.integration.previous_release import MODEL, RUNS, STATE, STOP


def assert_continues(losses: dict[int, tuple[float, float]], name: str) -> None:
    """Asserts the recorded losses and norms: with the same bits, if this processor sums in the same order."""
    expected = {int(iteration): tuple(values) for iteration, values in previous_release.recorded()[name].items()}
    assert losses.keys() == expected.keys() and min(expected) == STOP + 1
    if losses[STOP + 1] == expected[STOP + 1]:
        assert losses == expected
    for iteration, values in expected.items():
        assert losses[iteration] == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_run_of_previous_release_continues_bit_identically(name, tmp_path):
    """With its own command line, data and tokenizer; losses and gradient norms are those of that release."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    previous_release.unpack("corpus", tmp_path)
    previous_release.unpack(name, tmp_path)
    ended = run(tmp_path, OWN_PROGRAM, 1, RUNS[name], base=MODEL)
    assert ended.code == 0, ended.output[-4000:]
    assert_continues(ended.losses, name)
    assert "--topk 2: read as --moe-router-topk 2" in ended.output and "order of samples" not in ended.output


def test_printed_configuration_continues_run(tmp_path):
    previous_release.unpack("corpus", tmp_path)
    previous_release.unpack("save", tmp_path)
    ended = run(tmp_path, OWN_PROGRAM, 1, "", base=f"--config {previous_release.PRINTED}")
    assert ended.code == 0, ended.output[-4000:]
    assert_continues(ended.losses, "save")


def test_other_model_is_refused_naming_its_flag(tmp_path):
    previous_release.unpack("corpus", tmp_path)
    for name in ("save", "full"):
        previous_release.unpack(name, tmp_path)
        ended = run(tmp_path, OWN_PROGRAM, 1, f"{RUNS[name]} --num-experts 2", base=MODEL)
        assert ended.code != 0 and codes_in(ended.output) == ["checkpoint-of-another-model"], ended.output[-3000:]
        assert "--num-experts is 4 there, 2 here" in ended.output


def test_finetune_starts_over_and_damaged_file_is_named(tmp_path):
    previous_release.unpack("corpus", tmp_path)
    previous_release.unpack("save", tmp_path)
    flags = f"--load {STATE} --exit-interval 1"
    tuned = run(tmp_path, OWN_PROGRAM, 1, f"{flags} --finetune", base=MODEL)
    assert tuned.code == 0 and [*tuned.losses] == [1], tuned.output[-3000:]
    directory = dense_files.checkpoint_path(tmp_path / STATE, STOP)
    victim = next(directory.glob("optimizer/*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    ended = run(tmp_path, OWN_PROGRAM, 1, flags, base=MODEL, log="second")
    assert codes_in(ended.output) == ["checkpoint-damaged"] and victim.name in ended.output
