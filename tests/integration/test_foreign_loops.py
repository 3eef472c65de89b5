"""Training loops of public tutorials lose workers at random moments, and end with the weights of undisturbed runs."""

import random
import time

import pytest

from tests.integration.foreign_loops import LOOPS
from tests.integration.test_pure_torch import running, starter
from tests.shared import ALL

ITERATIONS = 40
DEFAULT = ["nanogpt", "classification", "expert_parallel"]


def train(directory, kind, kills=()):
    """Trains with two workers, kills ``(rank, iteration, seconds)``, and returns the weights and the console."""
    directory.mkdir()
    program = starter(directory, "foreign_loops", kind)
    with running(directory / "run", iterations=ITERATIONS, program=program) as run:
        for generation, (rank, iteration, seconds) in enumerate(kills, 1):
            run.reach(iteration)
            time.sleep(seconds)
            run.kill(rank)
            run.generation(generation)
        run.end()
        return [(directory / "run" / f"weights{rank}").read_text() for rank in (0, 1)], run.console


@pytest.mark.recovery
@pytest.mark.parametrize("kind", LOOPS if ALL else DEFAULT)
def test_killed_tutorial_loop_ends_with_undisturbed_weights(kind, tmp_path):
    if kind == "no_trainer":
        pytest.importorskip("accelerate")
    kills = [(random.randrange(2), random.randrange(*among), random.random() / 20) for among in ((2, 15), (18, 25))]
    killed, console = train(tmp_path / "killed", kind, kills)
    undisturbed, warned = train(tmp_path / "undisturbed", kind)
    assert killed == undisturbed, (kills, console)
    assert "Warning" not in console + warned
