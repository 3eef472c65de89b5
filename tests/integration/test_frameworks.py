"""Loops of other frameworks survive the loss of a worker (moc.transformers, moc.accelerate, moc.lightning)."""

import pytest

from benchmarks.live.job import Events
from tests.integration.test_pure_torch import running, starter
from tests.shared import ALL
from tests.worlds import REPOSITORY

EXAMPLES = {
    "transformers": "hugging_face_trainer.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_trainer.py",
}


@pytest.mark.recovery
@pytest.mark.parametrize("framework", EXAMPLES)
def test_killed_trainer_ends_with_undisturbed_weights(framework, tmp_path):
    """Two workers are killed, in the first and in the second epoch; the survivor keeps its state."""
    pytest.importorskip(framework)
    program = REPOSITORY / "examples" / EXAMPLES[framework]
    with running(tmp_path / "undisturbed", iterations=40, program=program) as run:
        undisturbed = run.end()
    with running(tmp_path / "killed", iterations=40, program=program) as run:
        for generation, (rank, iteration) in enumerate([(1, 8), (0, 20)], 1):
            run.reach(iteration)
            run.kill(rank)
            run.generation(generation)
        assert run.end() == undisturbed, run.console
        assert "iteration 40: weights" in undisturbed and "keeps its state" in run.console, run.console


KINDS = [f"{framework}-{policy}" for framework in EXAMPLES for policy in ("pec", "selective")]


@pytest.mark.recovery
@pytest.mark.parametrize("kind", KINDS if ALL else ["accelerate-pec"])
def test_framework_experts_are_saved_in_turn(kind, tmp_path):
    """Both workers are killed: experts come from older snapshots, and all replicas are alike."""
    pytest.importorskip(kind.split("-")[0])
    program = starter(tmp_path, "framework_loops", kind)
    with running(tmp_path / "run", iterations=40, program=program) as run:
        run.reach(12)
        run.kill(0)
        run.kill(1)
        run.generation(1)
        run.end()
        (weights,) = (tmp_path / "run").glob("weights of *")
        assert weights.read_text() == "11", run.console
        *_, lost = Events(tmp_path / "run" / "log" / "events.jsonl").of("lost")
        assert lost["iteration"] >= 10 and lost["plt"] > 0, run.console
