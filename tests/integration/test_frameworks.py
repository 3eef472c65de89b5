"""Loops of other frameworks survive the loss of a worker (moc.transformers, moc.accelerate, moc.lightning)."""

import pytest

from tests.integration.test_pure_torch import running
from tests.worlds import REPOSITORY

EXAMPLES = {
    "transformers": "hugging_face_trainer.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_trainer.py",
}


@pytest.mark.recovery
@pytest.mark.parametrize("framework", EXAMPLES)
def test_a_killed_trainer_ends_with_the_undisturbed_weights(framework, tmp_path):
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
