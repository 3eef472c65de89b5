"""A user's loop of any kind ends with the weights of its undisturbed run, whoever is killed (moc.torch)."""

import itertools
import json

import pytest

from benchmarks.live.job import Events
from moc.errors import codes_in
from moc.files.event_log import read_events
from moc.inspect import verify
from moc.policy.token_ledger import TokenLedger
from moc.report.run_state import fold_events
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration.test_pure_torch import running, starter
from tests.shared import ALL
from tests.worlds import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "integration" / "own_loop.py"
ITERATIONS = 40


def weights(directory):
    """What each worker has written at the end."""
    return [(directory / "run" / f"weights{rank}").read_text() for rank in (0, 1)]


def train(directory, kind, kills=()):
    """Trains with two to four workers, kills ``(ranks, iteration)``, and returns weights and console."""
    directory.mkdir(exist_ok=True)
    program = starter(directory, "own_loop", kind)
    flags = ("--nproc-per-node", {"ddp": "3", "hsdp": "4"}[kind]) if kind in ("ddp", "hsdp") else ()
    with running(directory / "run", iterations=ITERATIONS, program=program, flags=flags) as run:
        for generation, (ranks, iteration) in enumerate(kills, 1):
            run.reach(iteration)
            for rank in ranks:
                run.kill(rank)
            run.generation(generation)
        run.end()
        return weights(directory), run.console


KINDS = ["plain", "ddp", "gan", "fsdp", "hsdp", "tp", "sparse-list-plain", *ALL * ["stateful"]]


@pytest.mark.recovery
@pytest.mark.parametrize("kind", KINDS)
def test_killed_loop_ends_with_undisturbed_weights(kind, tmp_path):
    """Rank 0 is killed: the initial weights of its replacement must not reach the survivor."""
    if kind == "stateful":
        pytest.importorskip("torchdata")
    killed, console = train(tmp_path / "killed", kind, [([1], 5), ([0], 15)] if kind == "plain" else [([0], 8)])
    if kind in ("plain", "ddp"):  # with partitioned state, all may load the last snapshot
        assert f"{'2 workers keep' if kind == 'ddp' else '1 worker keeps'}" in console, console
    if kind == "plain":
        log = tmp_path / "killed" / "run" / "log"
        losses = Events(log / "events.jsonl").of("generation")
        assert [(loss["rank"], loss["signal"]) for loss in losses] == [(1, 9), (0, 9)], console
        state = fold_events(read_events(log))
        assert (len(state.recoveries), state.is_recovering, state.ended) == (2, False, "done")
        assert sorted(state.iterations) == list(range(1, ITERATIONS + 1))
        assert verify.main([str(tmp_path / "killed" / "run" / "snapshots")]) == 0
    assert killed == train(tmp_path / "undisturbed", kind)[0], console


LOST_IN_FIRST_ITERATION = """
import os, sys, torch
import moc.torch as ft
torch.set_num_threads(1)
directory = sys.argv[sys.argv.index("--ckpt-dir") + 1]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
run = ft.protect(model, optimizer, data=[torch.ones(2, 4)], iterations=5, directory=directory)
for batch in run:
    if run.rank == 1 and run.iteration == 0 and not os.path.exists(directory + ".lost"):
        open(directory + ".lost", "w").close()
        os.kill(os.getpid(), 9)
    run.model(batch).sum().backward()
    run.step()
"""


@pytest.mark.recovery
def test_worker_lost_in_first_iteration_is_replaced_alone(tmp_path):
    program = tmp_path / "first.py"
    program.write_text(LOST_IN_FIRST_ITERATION)
    with running(tmp_path / "run", iterations=5, program=program) as run:
        run.end()
        assert "1 worker keeps its state of iteration 0" in run.console, run.console
        assert run.console.count("worker 0 is process") == 1 and not codes_in(run.console), run.console


def tokens_by_iteration(path):
    """Tokens of each layer's experts by iteration, as the loop has counted them."""
    return {iteration: counts for iteration, counts in map(json.loads, path.read_text().splitlines())}


EVERY = map("-".join, itertools.product(("pec", "selective"), ("list", "stacked", "bank"), ("plain", "ddp", "fsdp")))


@pytest.mark.recovery
@pytest.mark.parametrize("kind", list(EVERY) if ALL else ["pec-stacked-fsdp", "pec-bank-ddp", "selective-list-plain"])
def test_expert_age_matches_token_ledger(kind, tmp_path):
    """All workers are killed; each expert has lost the tokens of the last iterations before the recovery."""
    ended, console = train(tmp_path, kind, [([0, 1], 12)])
    assert len(set(ended)) == 1 or kind.endswith("fsdp"), console  # replicas are alike
    counted = tokens_by_iteration(tmp_path / "run" / "tokens0")
    resumed = [event["iteration"] for event in Events(tmp_path / "run" / "log" / "events.jsonl").of("resume")]
    ledger = TokenLedger.from_state(
        Store(LocalStorage(tmp_path / "run" / "snapshots")).read_manifest(ITERATIONS).state["ledger"]
    )
    assert any(map(sum, ledger.lost.values())) or kind.startswith("selective"), console  # which may save all in time
    for layer, of_layer in ledger.lost.items():
        for expert, lost in enumerate(of_layer):
            last = [counted[iteration][int(layer)][expert] for iteration in range(resumed[-1], 0, -1)]
            assert lost in [0, *itertools.accumulate(last)], (layer, expert, lost, last)
