"""Resumes from snapshots whose newest manifest somebody has changed and signed."""

from __future__ import annotations

import json
import random
import shutil
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pretrain_gpt_moe as program
from megatron.pretraining import loop, setup
from megatron.pretraining.config import compose
from megatron.pretraining.process import initialize, stopping
from megatron.pretraining.process.phases import Phases
from moc.session.resume import loading, resuming
from moc.session.resume.survivors import LocalRemains, survivors
from moc.store.errors import CheckpointError
from moc.store.manifest import NAME as MANIFEST
from tests.mutations import changed, signed

_SAMPLED = 50  # of so many changes that cost the snapshot, one is followed by a whole start


class _Places:
    """The directories of snapshots, and the copies that they are restored from.

    Args:
        kept: by directory, a copy of it.
    """

    def __init__(self, kept: dict[str, str]):
        self._copies = {Path(directory): Path(copy) for directory, copy in kept.items()}
        newest = {there: max(copy.glob(f"iter_*/{MANIFEST}")).parent for there, copy in self._copies.items()}
        self.manifests = [there / one.name / MANIFEST for there, one in newest.items()]
        self.plain: list[dict[str, Any]] = [json.loads((one / MANIFEST).read_text()) for one in newest.values()]
        self.iterations = {int(one.name.removeprefix("iter_")) for one in newest.values()}

    def restore(self) -> None:
        """Replaces all snapshots by their copies."""
        for there, copy in self._copies.items():
            for snapshot in there.glob("iter_*"):
                shutil.rmtree(snapshot)
            for snapshot in copy.glob("iter_*"):
                shutil.copytree(snapshot, there / snapshot.name)

    def write(self, changes: list[Any]) -> None:
        """Writes the newest manifests, with their hashes."""
        for path, one in zip(self.manifests, changes, strict=True):
            path.write_text(signed(one))


class _Loader(loading.SnapshotLoader):
    """Remembers what the newest loader was made with."""

    made_with: tuple = ()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        _Loader.made_with = arguments


def resume_each(flags: dict, kept: dict[str, str], seed: int, number: int) -> dict:
    """Looks for the snapshots to resume from after each of so many changes of the newest manifests.

    If the changed snapshot is among them, the run starts from the snapshots, and trains an iteration.  Otherwise the
    start is that of any run without this snapshot, so that few of these starts are run.

    Args:
        flags: of the run.
        kept: by directory of snapshots, a copy of it.
        seed: of the changes.
        number: of changes.

    Returns:
        ``starts``: how often the run resumes from each iteration, or was refused since the flags have another schedule;
        ``failed``: the change and the error of each other; ``trained``: number of starts.
    """
    config, rng, starts, failed, trained = compose(flags), random.Random(seed), Counter(), [], 0
    stop, phases = stopping.StopRequests(config), Phases()
    parts = setup.build(config, initialize.initialize(config), program.providers(), stop, phases)
    resuming.SnapshotLoader = _Loader
    places = _Places(kept)

    def start() -> int:
        parts.remains, parts.config = LocalRemains(), config
        run = setup.start(parts, stop, phases)
        iteration = run.position.iteration
        loop.train(run, stop)
        places.restore()
        return iteration

    places.restore()
    assert start() in places.iterations
    for number_of in range(number):
        changes = [_changed(rng, one) for one in places.plain]
        places.write(changes)
        try:
            engine, components, *rest = _Loader.made_with
            held = loading.SnapshotLoader(engine, components, LocalRemains(), *rest[1:]).find(
                survivors(LocalRemains(), engine)
            )
            found = max(one.iteration for one in held)
            if found in places.iterations or number_of % _SAMPLED == 0:
                trained += 1
                found = start()
            starts[str(found)] += 1
        except Exception as error:
            what, refused = _difference(places.plain, changes), isinstance(error, CheckpointError)
            if refused and ".state.scheduler." in what:  # as after a run with other flags: a valid schedule
                starts["refused"] += 1
            else:
                failed.append((what, str(error) if refused else traceback.format_exc()))
            places.restore()
    initialize.shut_down()
    return {"starts": dict(starts), "failed": failed, "trained": trained}


def _changed(rng: random.Random, plain: dict) -> dict:
    return plain | changed(rng, {"state": plain["state"]}) if rng.random() < 0.8 else changed(rng, plain)


def _difference(one: object, other: object, where: str = "") -> str:
    """The first place where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((d for key in one if (d := _difference(one[key], other[key], f"{where}.{key}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((d for i in range(len(one)) if (d := _difference(one[i], other[i], f"{where}[{i}]"))), "")
    return "" if one == other else f"{where}: {one!r:.200} is {other!r:.200}"
