"""Saves ``--save`` in the background: one forked process per worker writes, and all commit together or retry."""

from __future__ import annotations

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pretraining.checkpoint import writer
from megatron.pretraining.config import Config
from megatron.pretraining.logging.records import EventRecorder
from moc.background import Trouble, within
from moc.errors import cause_of, code_of, warning, with_code
from moc.runtime.collectives import first_line, first_reported, run_on_rank0
from moc.runtime.groups import Aborted, PeerFailure
from moc.runtime.job import World
from moc.state.record import Position
from moc.store import dense_files
from moc.store.errors import CheckpointError, TakenError
from moc.store.ownership import Claim, Fence


class Attempts:
    """Attempts that fail on all workers together.

    Attributes:
        problem: the error of the last failed attempt; empty after a success.
    """

    def __init__(self, config: Config, log: EventRecorder):
        self._save, self._log = config.checkpoint.save, log
        self._stop_on_failure = config.checkpoint.save_failure == "stop"
        self._trouble, self.problem = Trouble(), ""

    def due(self) -> bool:
        """Returns whether to repeat a failed attempt now; collective only after a failure."""
        return bool(self._trouble) and not run_on_rank0(lambda: self._trouble.rests, "cannot read the clock")

    @contextlib.contextmanager
    def attempt(self, iteration: int | None, give_up: Callable[[], int | None]) -> Iterator[None]:
        """Runs an attempt, as a context manager.

        Args:
            iteration: iteration of the checkpoint.
            give_up: undoes a failed attempt; returns the iteration of the newest checkpoint of this run.

        Raises:
            CheckpointError: on all workers: the attempt failed, and is not repeated.
        """
        start = time.monotonic()
        try:
            yield
        except CheckpointError as error:
            is_final = isinstance(error, TakenError) or isinstance(error.__cause__, (Aborted, PeerFailure))
            if self._stop_on_failure or is_final:
                raise
            newest, self.problem = give_up(), with_code(error)
            warns = self._trouble.failed(time.monotonic() - start)
            facts = dict(reason=cause_of(error), failures=self._trouble.count, newest=newest)
            lasted_s = round(self._trouble.seconds, 3)
            self._log.events.write("save_failed", what="checkpoint", iteration=iteration, lasted_s=lasted_s, **facts)
            if warns:
                saved = "none was saved since this start" if newest is None else f"the newest is of iteration {newest}"
                sentence = (
                    f"the checkpoint of iteration {iteration} is not saved: {cause_of(error)}. Training continues, and "
                    f"tries again; in {self._save}, {saved}. Fix: make room or repair the disk"
                )
                self._log.message(warning(sentence, code=code_of(error)))

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports megatron-core's and torch's errors in writing files as one sentence."""
        try:
            yield
        except CheckpointError:
            raise
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            raise self.not_written(error) from error

    def not_written(self, error: BaseException) -> CheckpointError:
        """Returns the error of a checkpoint that cannot be written."""
        failures = getattr(error, "failures", None)  # of all workers; only rank 0 has them
        reason = next(iter(failures.values()))[0] if failures else error
        return CheckpointError(
            f"the checkpoint in {self._save} could not be written ({first_line(reason)}); earlier ones are untouched. "
            "Fix: make room or repair the disk, and start again",
            code="storage-unwritable",
        )

    def succeeded(self, iteration: int) -> None:
        """Reports a saved checkpoint."""
        self.problem = ""
        self._log.message(f"saved checkpoint at iteration {iteration} to {self._save}")
        if self._trouble:
            count, lasted = self._trouble.count, self._trouble.over()
            self._log.message(f"checkpoints can be saved again, after {lasted:.0f} s; {count} could not be")


class Saves(ABC):
    """The saves of a worker; all methods are collective.

    With ``--save-failure continue``, a failed save (which fails on all workers together) is reported and retried.

    Attributes:
        format: format of the checkpoints.
        last_saved: the iteration of the newest checkpoint in ``--save``, if this run has saved or loaded it.
        last_committed: the iteration of the newest committed save of this generation; 0 without one.
        run: name of the run; empty until it is known.
    """

    format = dense_files.FORMAT

    def __init__(self, config: Config, world: World, log: EventRecorder):
        self._config, self._world, self._log = config, world, log
        self._queue, self._attempts = AsyncCallsQueue(), Attempts(config, log)
        self._fence = _fence(config, world)
        self.last_saved: int | None = None
        self.last_committed = 0
        self.run = ""
        self._previous_saved: int | None = None  # value of last_saved before the save in progress

    @property
    def problem(self) -> str:
        """The error of the last failed save; empty after a success."""
        return self._attempts.problem

    def newest_saved(self, seconds: float) -> int | None:
        """Returns the iteration of the newest checkpoint in ``--save``, or 0; None without an answer in ``seconds``."""
        save = self._config.checkpoint.save
        with contextlib.suppress(CheckpointError):  # a save is due then, and reports the error
            return self.look(seconds, lambda: dense_files.latest_iteration(save) or 0) if save else 0
        return 0

    def look(self, seconds: float | None, find: Callable[[], int | None]) -> int | None:
        """Returns what ``find`` finds in a directory of checkpoints; None if it has not answered in ``seconds``.

        With such a limit the run can continue from elsewhere, so an error is reported, and counts as no answer.
        """
        try:
            return within(seconds, find)
        except OSError as error:
            if seconds is None:
                raise
            self._log.message(
                warning(
                    f"checkpoints cannot be looked for ({cause_of(error)}), and the run continues without them. Fix: "
                    "repair the directories of --save and --load",
                    code="storage-silent",
                )
            )
            return None

    def save(self, position: Position) -> None:
        """Saves a checkpoint, or with ``--async-save`` starts a save; waits for an earlier save first.

        Raises:
            CheckpointError: on all workers, with ``--save-failure stop``, if any worker cannot write; earlier
                checkpoints are untouched.
        """
        self.finish()
        with self._attempts.attempt(position.iteration, self._give_up(position.iteration)):
            save, fence, iteration = self._config.checkpoint.save, self._fence, position.iteration
            assert save is not None and fence is not None  # required for saving
            run_on_rank0(
                lambda: dense_files.begin_save(Path(save), iteration, fence), f"cannot start a checkpoint in {save}"
            )
            staging = dense_files.staging_path(save, iteration, fence.claim.tag)
            with self._attempts.reporting():
                request = self.request(position, staging)
            commit = functools.partial(self.commit, Path(save), iteration)
            finalize = [*request.finalize_fns, commit]
            self._queue.schedule_async_request(request._replace(finalize_fns=finalize))
            self._previous_saved, self.last_saved = self.last_saved, iteration
            if not self._config.checkpoint.async_save:
                self._finalize(blocking=True)

    @abstractmethod
    def newest(self, seconds: float | None = None, run: str = "") -> int | None:
        """Returns the iteration that :meth:`load` would resume the run from; None if there is none, or on timeout.

        ``run`` is the run of the snapshots.
        """

    @abstractmethod
    def check(self, iteration: int, run: str) -> None:
        """Checks that saves after an iteration replace no checkpoint of another run; ``run`` as for :meth:`newest`.

        Raises:
            CheckpointError: on all workers: ``--save`` holds a checkpoint that this run does not continue.
        """

    @property
    @abstractmethod
    def beginning(self) -> str:
        """Flags of a beginning at a checkpoint of another run, for snapshots; empty without one."""

    @abstractmethod
    def check_beginning(self, recorded: str | None) -> None:
        """Checks that the run of the snapshots began as this command would; None if the snapshots record nothing.

        Raises:
            CheckpointError: on all workers: it began at another checkpoint.
        """

    @abstractmethod
    def lineage(self) -> dense_files.Lineage:
        """Returns the run that its checkpoints record."""

    @abstractmethod
    def load(self) -> Position | None:
        """Loads the checkpoint that the flags name; returns None on a first start.

        Raises:
            CheckpointError: on all workers: a file is missing or damaged, or the checkpoint is of another model.
        """

    @abstractmethod
    def request(self, position: Position, staging: Path) -> AsyncRequest:
        """Returns the function of the forked process that writes a checkpoint, and the functions that follow it."""

    def retry_is_due(self) -> bool:
        """Returns whether to retry a failed save now; collective only after a failure."""
        return self._attempts.due()

    def poll(self) -> None:
        """Commits the checkpoint if all workers have finished writing it; does not wait."""
        if self._queue.async_calls:
            with self._attempts.attempt(self.last_saved, self._give_up(self.last_saved)):
                self._finalize(blocking=False)

    def finish(self) -> None:
        """Waits for a save in progress, and commits it."""
        if self._queue.async_calls:
            with self._attempts.attempt(self.last_saved, self._give_up(self.last_saved)):
                self._finalize(blocking=True)

    def close(self) -> None:
        """Drops a save in progress, as a kill of this worker would; does not communicate."""
        while self._queue.async_calls:
            self._queue.async_calls.popleft().async_caller.close(abort=True)
        writer.forget_results()

    def finalize_together(self, finalize: Callable[[], None], *writes: tuple[Any, str]) -> None:
        """Runs a finalizer of megatron-core that may fail on one worker; a failure raises on all.

        Args:
            finalize: the finalizer.
            writes: owners and names of functions: rank 0 writes in them, and the others wait in a collective.

        Raises:
            CheckpointError: on all workers: a worker could not write.
        """
        failure, failures = None, []
        try:
            with contextlib.ExitStack() as stack:
                failures = [stack.enter_context(writer.deferring_errors(*write)) for write in writes]
                finalize()
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            if isinstance(error, (Aborted, PeerFailure)):
                raise
            failure = error
        failure = next((write_error for write_errors in failures for write_error in write_errors), failure)
        if problem := first_reported(None if failure is None else with_code(self._attempts.not_written(failure))):
            raise CheckpointError(problem)

    def _give_up(self, iteration: int | None) -> Callable[[], int | None]:
        def give_up() -> int | None:
            self.close()
            if self._world.rank == 0 and iteration is not None and self._fence is not None:
                dense_files.give_up(str(self._config.checkpoint.save), iteration, self._fence)
            if self.last_saved == iteration:
                self.last_saved = self._previous_saved
            return self.last_saved

        return give_up

    def _finalize(self, blocking: bool) -> None:
        with self._attempts.reporting():
            self._queue.maybe_finalize_async_calls()
            pause_s = 0.01
            while blocking and self._queue.async_calls:  # polled: a worker stuck in storage must notice a lost worker
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
                self._queue.maybe_finalize_async_calls()

    def commit(self, root: Path, iteration: int) -> None:
        """Commits the files that all workers have written."""
        retain = self._config.checkpoint.save_retain_interval
        complete = functools.partial(
            writer.commit, root, iteration, self._world.size, retain, self._fence, self.format, self.lineage()
        )
        run_on_rank0(complete, "cannot complete a checkpoint")
        self.last_committed = iteration
        self._attempts.succeeded(iteration)


def _fence(config: Config, world: World) -> Fence | None:
    """Returns the fence that guards this generation's saves; does not read or write files."""
    save = config.checkpoint.save
    return None if save is None else Fence(Path(save), Claim(world.job.id, world.job.term))
