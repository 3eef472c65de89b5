"""Where a run goes on: the newest snapshot that is whole, in memory or in storage, whatever layout took it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training import checkpoint_contents as contents
from megatron.training.agreement import first_of_any, gather, on_first
from megatron.training.checkpoint_contents import Position
from megatron.training.config import Config
from megatron.training.initialize import World
from megatron.training.logging import Log
from megatron.training.optimizer import VotedOptimizer
from megatron.training.snapshot_tiers import Tiers
from moc.policy import Policy
from moc.state.detail import Detail
from moc.state.training_state import TrainingState
from moc.store.candidates import MEMORY, Candidate, candidates
from moc.store.errors import CheckpointError
from moc.store.fill import reading_ahead, values_for
from moc.store.manifest import Manifest
from moc.store.regions import MissingRegionError, RegionReader
from moc.store.store import Store, directory_of, file_of


class SnapshotLoader:
    """Loads into this worker's model and optimizer; all methods are collective, and fail on all workers alike.

    Args:
        config: the flags in force.
        world: this worker's place.
        state: what to fill.
        optimizer: of which loss scales are restored.
        scheduler: the schedule of learning rate and weight decay.
        tiers: where snapshots are.
        policy: whose interval goes on from what it has learned.
        log: where to report.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        tiers: Tiers,
        policy: Policy,
        log: Log,
    ):
        self._config, self._world, self._state, self._log = config, world, state, log
        self._optimizer, self._scheduler, self._policy = optimizer, scheduler, policy
        self._storage, self._memory, self._leads_node = tiers.storage, tiers.memory, tiers.leads_node

    def find(self) -> list[Candidate]:
        """The checkpoints to try, in this order; with ``--ckpt-step`` those of that iteration."""
        stored = on_first(self._storage.iterations, f"cannot look for snapshots in {self._storage.place.name}")
        return candidates(gather(self._in_memory()), stored, only=self._config.checkpoint.ckpt_step)

    def load(self, found: list[Candidate], must: bool) -> tuple[Candidate, Position] | None:
        """Fills model, optimizer and schedule from the first candidate that is whole.

        Args:
            found: what to try.
            must: there is nothing else to go on from.

        Returns:
            That candidate, and where to go on; None if there is none.

        Raises:
            CheckpointError: none of them is whole though one must be, or they are of another model.
        """
        damage = None
        for candidate in found:
            store = self._store(candidate)
            where = store.place.path(directory_of(candidate.iteration))
            begun = time.perf_counter()
            manifest, problem = self._read(store, candidate.iteration)
            if problem is None:
                self._check(manifest, where)
                self._log.message(f"loading snapshot {where}")
                problem = first_of_any(self._fill(store, manifest))
            if problem is None:
                position = self._restore(manifest, where)
                self._report(candidate, manifest, time.perf_counter() - begun)
                return candidate, position
            damage = damage or problem
            self._log.message(f"WARNING: {problem}; an older snapshot is tried")
        if damage and must:
            raise CheckpointError(
                f"no snapshot is whole ({damage}): restore one, or start anew in another directory with --ckpt-dir"
            )
        return None

    def _in_memory(self) -> dict[int, tuple[int, list[str]]]:
        if self._memory is None or not self._leads_node:
            return {}
        held = {}
        for iteration in self._memory.iterations():
            with contextlib.suppress(CheckpointError):  # a damaged one is as good as none
                manifest = self._memory.manifest(iteration)
                held[iteration] = manifest.writers, list(manifest.files)
        return held

    def _store(self, candidate: Candidate) -> Store:
        return self._memory if candidate.tier == MEMORY else self._storage

    def _read(self, store: Store, iteration: int) -> tuple[Manifest | None, str | None]:
        manifest, problem = None, None
        try:
            manifest = store.manifest(iteration)
        except CheckpointError as error:
            problem = str(error)
        return manifest, first_of_any(problem)

    def _check(self, manifest: Manifest, where: str) -> None:
        contents.check_shape(self._config, manifest.state["shape"], where)
        contents.check_optimizer(self._config, manifest.state["optimizer"], where)

    def _fill(self, store: Store, manifest: Manifest) -> str | None:
        """Fills this worker's state; what is wrong with the checkpoint, if anything is."""
        mine = file_of(self._world.rank)  # in the layout that wrote, it holds nearly all that is needed
        names = sorted(manifest.files, key=lambda name: name != mine)
        blobs = (store.blob(manifest.iteration, name, manifest.files[name]) for name in names)
        try:
            reader = RegionReader(blobs, verify=True, lazy=True)
            fragments = list(self._state.fragments(self._state.operators(), Detail.FULL))
            for fragment in reading_ahead(fragments, reader):
                self._state.load(fragment, values_for(fragment, reader))
            for name in names[self._world.rank :: self._world.size]:  # all are looked at, whoever needs them
                store.blob(manifest.iteration, name, manifest.files[name])
        except MissingRegionError as error:
            return str(error)
        except OSError as error:
            return f"{store.place.path(directory_of(manifest.iteration))} cannot be read ({error.strerror or error})"
        return None

    def _restore(self, manifest: Manifest, where: str) -> Position:
        saved = manifest.state
        self._state.gather_weights()
        self._state.set_steps(
            {name: entry.step for name, entry in manifest.operators.items() if entry.step is not None}
        )
        contents.restore_grad_scaler(self._optimizer, saved["grad_scaler"])
        contents.restore_scheduler(self._scheduler, saved["scheduler"], where)
        contents.warn_of_other_samples(self._config, self._world, saved["sample_order"], self._log.message)
        if saved["interval"]:
            self._policy.interval.load_state_dict(saved["interval"])
        return Position(**{name: saved[name] for name in asdict(Position())})

    def _report(self, candidate: Candidate, manifest: Manifest, seconds: float) -> None:
        self._log.events.write(
            "resume", iteration=candidate.iteration, tier=candidate.tier, bytes=manifest.bytes, seconds=seconds
        )
        self._log.message(f"loaded {manifest.bytes / 1e9:.3g} GB from {candidate.tier} in {seconds:.2f} s")
