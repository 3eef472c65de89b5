"""Resumes from snapshots whose newest manifest somebody has changed and signed."""

from __future__ import annotations

import json
import random
import shutil
import traceback
from collections import Counter
from pathlib import Path

import pretrain_gpt_moe as program
from megatron.pretraining import loop, setup
from megatron.pretraining.config import compose
from megatron.pretraining.process import initialize, stopping
from megatron.pretraining.process.phases import Phases
from moc.session.resume.survivors import LocalRemains
from moc.store.errors import CheckpointError
from moc.store.manifest import NAME as MANIFEST
from tests.mutations import changed, signed


def resume_each(flags: dict, kept: dict[str, str], seed: int, number: int) -> dict:
    """Trains from each of so many changes of the newest manifests; all snapshots are replaced before each.

    Args:
        flags: of the run.
        kept: by directory of snapshots, a copy of it.
        seed: of the changes.
        number: of changes.

    Returns:
        ``starts``: how often the run resumed from each iteration, or was refused since the flags have another schedule;
        ``failed``: the change and the error of each other.
    """
    config, rng, starts, failed = compose(flags), random.Random(seed), Counter(), []
    stop, phases = stopping.StopRequests(config), Phases()
    parts = setup.build(config, initialize.initialize(config), program.providers(), stop, phases)
    newest = {max(Path(one).glob(f"iter_*/{MANIFEST}")).parent: Path(directory) for directory, one in kept.items()}
    plain = [json.loads((path / MANIFEST).read_text()) for path in newest]
    for _ in range(number):
        of_state, each = rng.random() < 0.8, rng.random()
        changes = [_changed(random.Random(each), one, of_state) for one in plain]
        for path, directory in newest.items():
            for there in directory.glob("iter_*"):
                shutil.rmtree(there)
            for snapshot in path.parent.glob("iter_*"):
                shutil.copytree(snapshot, directory / snapshot.name)
        for (path, directory), one in zip(newest.items(), changes, strict=True):
            (directory / path.name / MANIFEST).write_text(signed(one))
        parts.remains, parts.config = LocalRemains(), config
        try:
            run = setup.start(parts, stop, phases)
            starts[str(run.position.iteration)] += 1
            loop.train(run, stop)
        except Exception as error:
            what, refused = _difference(plain, changes), isinstance(error, CheckpointError)
            if refused and ".state.scheduler." in what:  # as after a run with other flags: a valid schedule
                starts["refused"] += 1
            else:
                failed.append((what, str(error) if refused else traceback.format_exc()))
    initialize.shut_down()
    return {"starts": dict(starts), "failed": failed}


def _changed(rng: random.Random, plain: dict, of_state: bool) -> dict:
    return plain | changed(rng, {"state": plain["state"]}) if of_state else changed(rng, plain)


def _difference(one: object, other: object, where: str = "") -> str:
    """The first place where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((d for key in one if (d := _difference(one[key], other[key], f"{where}.{key}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((d for i in range(len(one)) if (d := _difference(one[i], other[i], f"{where}[{i}]"))), "")
    return "" if one == other else f"{where}: {one!r:.200} is {other!r:.200}"
