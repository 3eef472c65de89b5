"""Functions of workers whose nodes lose their memory: they record every state of a run, and load from many places."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron.pretraining.engine.state import MegatronState
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.model.parameters import unwrap
from megatron.pretraining.session import settings_of
from moc.policy.selective import Selective
from moc.policy.selective_choice import SelectiveTuner
from moc.runtime import environment, protocol
from moc.session.saving.committing import Committer
from moc.session.saving.pipeline import SavingPipeline
from moc.session.session import Session
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store
from tests.integration import bodies
from tests.integration.bodies import digest, with_run
from tests.integration.own_program import changed
from tests.worlds import REPOSITORY

Hashes = dict[str, dict[str, str]]
"""By operator and fragment."""


def train_recorded(
    flags: dict,
    record_dir: str,
    stop_at: int | None = None,
    hold_from: int | None = None,
    late: list[int] | None = None,
) -> None:
    """As ``bodies.train``; what each iteration leaves is recorded, apart from all that is saved.

    Args:
        flags: the flags.
        record_dir: each worker appends to a file here, after each update, the hash of each fragment of its live state
            and how many tokens it has sent to which expert.
        stop_at: after so many iterations all workers wait for ever.
        hold_from: of iterations from here on, the last worker never gets its part to storage.
        late: a rank and an iteration, from which on it publishes nothing in its node's memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _record(Path(record_dir) / f"{rank}.jsonl", stop_at)
    if hold_from is not None and rank == size - 1:
        persist = Saver._persist
        Saver._persist = lambda saver, snapshot, *told: (
            _stop() if snapshot.iteration >= hold_from else persist(saver, snapshot, *told)
        )
    if late is not None and rank == late[0]:
        commit = Committer.commit_in_memory
        Committer.commit_in_memory = lambda committer, plan, *told: (
            _stop() if plan.iteration >= late[1] else commit(committer, plan, *told)
        )
    bodies.train(flags)


def load_each(flags: dict, places: list[dict]) -> list[dict]:
    """Begins a run in several places, one after the other, as far as its first iteration.

    Args:
        flags: all but those of snapshots.
        places: those, for each.

    Returns:
        For each ``start``, the iteration; ``steps``, updates that Adam reckons with; and ``hashes`` of what this
        worker holds first.
    """
    SavingPipeline.reserve = lambda *_, **__: None  # buffers that nothing will be copied into

    def use(run) -> list[dict]:
        step, told = run.stepper, []
        state = MegatronState(step.chunks, step.optimizer.core, step.modules)
        for place in places:
            for fragment in state.fragments(state.operators(), Detail.FULL):
                fragment.view.fill_(float("nan"))
            config, engine = changed(run.config, place), copy(run.session._engine)
            engine._config = config
            session = Session(engine, settings_of(config, engine), run.log, elsewhere=run.checkpoints)
            position = session.resume()
            steps = sorted(set(state.steps().values()))
            told.append({"start": position.iteration, "steps": steps, "hashes": hashes_of(state)})
        return told

    return with_run(flags, use)


def train_with_two_budgets(flags: dict, directory: str, experts: list[int], **told) -> None:
    """As :func:`train_recorded`, with a replica server, and budgets for so many experts of each rank and each node."""
    measure = Selective.on_sizes

    def on_sizes(policy: Selective, busiest) -> None:
        measure(policy, busiest)
        (sizes,) = policy.sizes
        expert = sizes.busiest_rank[1]
        leasts = {"local_gb": sizes.least_rank_bytes, "remote_gb": sizes.least_node_bytes}
        for (name, least), number in zip(leasts.items(), experts, strict=True):
            object.__setattr__(policy, name, (least + (number - 0.5) * expert) / 1e9)

    Selective.on_sizes = on_sizes
    SelectiveTuner.is_due = lambda tuner, iteration: True  # measures nothing
    with replica_server(Path(directory)):
        train_recorded(flags, **told)


def load_each_with_copies(directory: str, **told) -> list[dict]:
    """As :func:`load_each`, with a replica server."""
    with replica_server(Path(directory)):
        return load_each(**told)


def train_and_drift_apart(directory: str, flags: dict, at: int) -> dict:
    """Trains with a replica server; before the snapshot of an iteration, a moment changes on rank 1.

    Returns:
        ``own``: of the newest snapshot in memory, the hash of each box; ``copy``: the same
        of the copy that this node keeps.
    """
    take, close, told = Session.take, SavingPipeline.flush, {}

    def drift(session: Session) -> None:
        if session.position.iteration == at and int(os.environ["RANK"]) == 1:
            state = session._engine.state
            next(state.fragments(["output"], Detail.MOMENTS)).view[-1] += 1
        take(session)

    def look(pipeline: SavingPipeline) -> None:
        pipeline.finish()
        root = pipeline._components.tiers.memory.storage.root
        for name, path in (("own", root), ("copy", *root.glob("of_*"))):
            store = Store(LocalStorage(path, in_memory=True), allows_slack=True)
            manifest = store.read_manifest(max(store.iterations()))
            files = [store.open_verified(manifest.iteration, file, entry) for file, entry in manifest.files.items()]
            sources = list(ShardReader(files).sources())
            assert not [damage for source in sources if (damage := source.find_damage())]
            told[name] = {f"{s.box.name} {s.box.slot} {s.box.region}": s.digest for s in sources}
        close(pipeline)

    Session.take, SavingPipeline.flush = drift, look
    with replica_server(Path(directory)):
        bodies.train(flags)
    return told


@contextlib.contextmanager
def replica_server(directory: Path) -> Iterator[None]:
    """Keeps copies for this worker's node."""
    os.environ[protocol.TOKEN_VARIABLE] = "ab" * 32
    os.environ[environment.REPLICA_SERVER] = orders = f"unix:{directory}/{os.environ['RANK']}"
    command = [sys.executable, "-m", "moc.runtime.replica_server", "--listen", "127.0.0.1:0", "--orders", orders]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield
        finally:
            process.kill()


def hashes_of(state: MegatronState) -> Hashes:
    """The hash of each fragment that this worker holds first."""
    found: Hashes = {}
    for f in state.fragments(state.operators(), Detail.FULL):
        if f.first_copy:
            key = f"{f.name} {f.slot} {f.region.offset} {f.region.shape}"
            found.setdefault(f.operator, {})[key] = digest(f.view)
    return found


def _record(path: Path, stop_at: int | None) -> None:
    compute, tokens, states = Stepper.step, {}, []

    def count(router: TopKRouter, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        tokens[router.layer_number - 1] += output[1].sum(dim=0)

    def recorded(stepper: Stepper, iteration: int, *args):
        if iteration == stop_at:
            _stop()
        if not states:
            states.append(MegatronState(stepper.chunks, stepper.optimizer.core, stepper.modules))
            for module in (m for chunk in stepper.chunks for m in unwrap(chunk).modules()):
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(count)
                    tokens[module.layer_number - 1] = torch.zeros(module.num_experts, dtype=torch.int64)
        record = compute(stepper, iteration, *args)
        line = {"iteration": record.iteration, "hashes": hashes_of(states[0])}
        line["tokens"] = {layer: counts.tolist() for layer, counts in tokens.items()}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for counts in tokens.values():
            counts.zero_()
        return record

    Stepper.step = recorded


def _stop() -> None:
    threading.Event().wait()
