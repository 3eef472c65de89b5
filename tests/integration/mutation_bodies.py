"""Resumes from snapshots whose newest manifest somebody has changed and signed."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from examples.pure_torch import Engine, Log
from megatron.pretraining import loop, setup
from megatron.pretraining.process import initialize, stopping
from megatron.pretraining.process.phases import Phases
from moc import Session, Settings, join_job
from moc.runtime.job import Job
from moc.session.resume import loading, resuming
from moc.session.resume.survivors import LocalRemains, survivors
from moc.store.errors import CheckpointError
from moc.store.manifest import MANIFEST_FILE as MANIFEST
from tests.integration.own_program import program_of
from tests.mutated_snapshots import mutate
from tests.mutations import changed, encoded, signed

_SAMPLED = 500  # of so many changes that cost the snapshot, one is followed by a whole start


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
        self.iterations = [int(one.name.removeprefix("iter_")) for one in newest.values()]

    def remove_newest(self) -> None:
        """Removes the newest snapshot of each directory."""
        for manifest in self.manifests:
            shutil.rmtree(manifest.parent)

    def restore(self) -> None:
        """Replaces all snapshots by their copies."""
        for there, copy in self._copies.items():
            for snapshot in there.glob("iter_*"):
                shutil.rmtree(snapshot)
            for snapshot in copy.glob("iter_*"):
                shutil.copytree(snapshot, there / snapshot.name)

    def write(self, changes: list[Any]) -> dict[int, frozenset[str]]:
        """Writes the newest manifests, with their hashes; returns their differences by iteration."""
        differences = dict.fromkeys(self.iterations, frozenset())
        for iteration, path, plain, one in zip(self.iterations, self.manifests, self.plain, changes, strict=True):
            text = signed(one) if isinstance(one, dict) else encoded(one)
            path.write_text(text)
            differences[iteration] |= frozenset(_differences(plain, _parsed(text)))
        return differences


class _Loader(loading.SnapshotLoader):
    """Remembers what the newest loader was made with."""

    made_with: tuple = ()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        _Loader.made_with = arguments


OF_FLAGS = (".state.scheduler", ".state.repeated", ".state.optimizer_package", ".state.params_dtype")
"""Parts of a state that are compared with the flags of a run, or with its packages."""


def resume_each(flags: dict, kept: dict[str, str], seed: int, number: int) -> dict:
    """Looks for the snapshots to resume from after each of so many changes of the newest manifests.

    If the changed snapshot is among them, the run starts from the snapshots, and trains an iteration; of changes that
    give the same fields values of the same kind, one is followed by a start.  Otherwise the start is that of any run
    without this snapshot, so that few of these starts are run.

    Args:
        flags: of the run.
        kept: by directory of snapshots, a copy of it.
        seed: of the changes.
        number: of changes.

    Returns:
        ``starts``: how often the run resumes from each iteration, or was refused since its flags are others;
        ``failed``: the change and the error of each other; ``trained``: number of starts; ``older``: the iteration that
        the run resumes from without the newest snapshots.
    """
    rng, starts, failed, trained = random.Random(seed), Counter(), [], set()
    config, program = program_of(flags)
    stop, phases = stopping.StopRequests(config), Phases()
    parts = program.build(config, program.connect(config, Job()), stop, phases)
    resuming.SnapshotLoader = _Loader
    places = _Places(kept)

    def start() -> int:
        parts.remains, parts.config = LocalRemains(), config
        run = setup.start(parts, stop, phases)
        iteration = run.position.iteration
        loop.train(run, stop)
        places.restore()
        return iteration

    def found_iteration() -> int:
        engine, components, _, *rest = _Loader.made_with
        remains = LocalRemains()
        held = loading.SnapshotLoader(engine, components, remains, *rest).find(survivors(remains, engine))
        return max(one.iteration for one in held)

    places.restore()
    assert start() in places.iterations
    places.remove_newest()
    older = found_iteration()
    places.restore()
    for number_of in range(number):
        differences = places.write([_changed(rng, one) for one in places.plain])
        try:
            found = found_iteration()
            kind = (found, differences[found]) if found in differences else number_of // _SAMPLED
            if kind not in trained:
                trained.add(kind)
                found = start()
            assert found in {*places.iterations, older}, found
            starts[str(found)] += 1
        except Exception as error:
            refused = isinstance(error, CheckpointError)
            every = sorted(frozenset().union(*differences.values()))
            if refused and any(part in one for one in every for part in OF_FLAGS):  # as with other flags: it is valid
                starts["refused"] += 1
            else:
                failed.append((every, str(error) if refused else traceback.format_exc()))
            places.restore()
    initialize.shut_down()
    return {"starts": dict(starts), "failed": failed, "trained": len(trained), "older": older}


def resume_plain(flags: dict, kept: str, what: str, seed: int, number: int) -> dict:
    """As :func:`resume_each`, for plain PyTorch, with a start after each change (:mod:`tests.mutated_snapshots`).

    Args:
        flags: of the run.
        kept: a copy of the directory of snapshots.
        what: which file is changed.
        seed: of the changes.
        number: of changes.
    """
    job = join_job()
    job.connect("gloo", timedelta(minutes=5), torch.device("cpu"))
    rng, starts, failed = random.Random(seed), Counter(), []
    settings = Settings(flags["ckpt_dir"], 1000, policy=flags["ckpt_policy"], keep=flags["ckpt_keep"])
    for _ in range(number):
        shutil.rmtree(flags["ckpt_dir"])
        shutil.copytree(kept, flags["ckpt_dir"])
        content = mutate(rng, Path(flags["ckpt_dir"]), what)
        session = Session(Engine(job), settings, Log(job.rank, None))
        try:
            starts[str(session.resume().iteration)] += 1
        except Exception:
            failed.append((content[:2000], traceback.format_exc()))
        session.close()
    job.leave()
    return {"starts": dict(starts), "failed": failed}


def _changed(rng: random.Random, plain: dict) -> Any:
    return plain | changed(rng, {"state": plain["state"]}) if rng.random() < 0.8 else changed(rng, plain)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _differences(one: object, other: object, where: str = "") -> Iterator[str]:
    """The places where two JSON values differ, and the kind of value that the second has there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            if key != "xxh3_128":
                yield from _differences(one.get(key), other.get(key), f"{where}.{_general(key)}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for inner, changed_one in zip(one, other, strict=True):
            yield from _differences(inner, changed_one, f"{where}[]")
    elif one != other or type(one) is not type(other):
        yield f"{where} {_kind(other)}"


def _general(key: str) -> str:
    return re.sub(r"\d+", "N", key)[:80]


def _kind(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = "not finite" if isinstance(value, float) and not math.isfinite(value) else f"{_digits(value)} digits"
        return f"{type(value).__name__} {'-' * (value < 0)}{size}"
    return f"{type(value).__name__} {value!r:.20}" if isinstance(value, (str, bool)) else type(value).__name__


def _digits(value: float) -> int:
    """The order of a number, in steps of six digits."""
    return math.frexp(value)[1] // 20 if isinstance(value, float) else value.bit_length() // 20
