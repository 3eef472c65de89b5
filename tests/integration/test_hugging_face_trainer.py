"""The Trainer of Hugging Face transformers survives the loss of a worker (moc.transformers)."""

import pytest

from tests.integration.test_pure_torch import running
from tests.worlds import REPOSITORY

PROGRAM = REPOSITORY / "examples" / "hugging_face_trainer.py"


@pytest.mark.recovery
def test_a_killed_trainer_ends_with_the_undisturbed_weights(tmp_path):
    with running(tmp_path / "undisturbed", iterations=40, program=PROGRAM) as run:
        undisturbed = run.end()
    with running(tmp_path / "killed", iterations=40, program=PROGRAM) as run:
        for generation, (rank, iteration) in enumerate([(1, 8), (0, 20)], 1):
            run.reach(iteration)
            run.kill(rank)
            run.generation(generation)
        assert run.end() == undisturbed
        assert "weights" in undisturbed and "keeps its state" in run.console, run.console
