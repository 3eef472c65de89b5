"""A user's loop of any kind ends with the weights of its undisturbed run, whoever is killed (moc.torch)."""

import pytest

from tests.integration.test_pure_torch import running
from tests.worlds import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "integration" / "own_loop.py"
ITERATIONS = 40


def weights(directory):
    """What each worker has written at the end."""
    return [(directory / "run" / f"weights{rank}").read_text() for rank in (0, 1)]


def train(directory, kind, kills=()):
    """Trains with two workers (DDP: three), kills ``(rank, iteration)``, and returns weights and console."""
    program = directory / f"{kind}.py"
    directory.mkdir(exist_ok=True)
    program.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.argv.insert(1, {kind!r})\n"
        "from tests.integration.own_loop import main\nmain()\n"
    )
    flags = ("--nproc-per-node", "3") if kind == "ddp" else ()
    with running(directory / "run", iterations=ITERATIONS, program=program, flags=flags) as run:
        for generation, (rank, iteration) in enumerate(kills, 1):
            run.reach(iteration)
            run.kill(rank)
            run.generation(generation)
        run.end()
        return weights(directory), run.console


@pytest.mark.recovery
@pytest.mark.parametrize("kind", ["plain", "ddp", "gan", "fsdp", "tp", "sparse", "pec", "selective"])
def test_a_killed_loop_ends_with_the_undisturbed_weights(kind, tmp_path):
    """Rank 0 is killed: the initial weights of its replacement must not reach the survivor."""
    killed, console = train(tmp_path / "killed", kind, [(1, 5), (0, 15)] if kind == "plain" else [(0, 8)])
    if kind in ("plain", "ddp"):  # with partitioned state, all may load the last snapshot
        assert f"{'2 workers keep' if kind == 'ddp' else '1 worker keeps'}" in console, console
    if kind not in ("pec", "selective"):  # experts of a lost worker may be older
        assert killed == train(tmp_path / "undisturbed", kind)[0], console
