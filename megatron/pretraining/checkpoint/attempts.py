"""Attempts to save checkpoints: a failed one is reported and repeated, unless ``--save-failure stop`` is given."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pretraining.config import Config
from megatron.pretraining.logging.records import Records
from moc.errors import cause_of, code_of, warning, with_code
from moc.runtime.collectives import first_line, run_on_rank0
from moc.runtime.groups import Aborted, PeerFailure
from moc.store.errors import CheckpointError, TakenError
from moc.trouble import Trouble


class Attempts:
    """Attempts that fail on all workers together.

    Attributes:
        problem: the error of the last failed attempt; empty after a success.
    """

    def __init__(self, config: Config, log: Records):
        self._save, self._stops, self._log = config.checkpoint.save, config.checkpoint.save_failure == "stop", log
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
        begun = time.monotonic()
        try:
            yield
        except CheckpointError as error:
            over = isinstance(error, TakenError) or isinstance(error.__cause__, (Aborted, PeerFailure))
            if self._stops or over:
                raise
            newest, self.problem = give_up(), with_code(error)
            warns = self._trouble.failed(time.monotonic() - begun)
            facts = dict(reason=cause_of(error), failures=self._trouble.count, newest=newest)
            lasted_s = round(self._trouble.seconds, 3)
            self._log.events.write("save_failed", what="checkpoint", iteration=iteration, lasted_s=lasted_s, **facts)
            if warns:
                there = "none was saved since this start" if newest is None else f"the newest is of iteration {newest}"
                sentence = (
                    f"the checkpoint of iteration {iteration} is not saved: {cause_of(error)}. Training continues, and "
                    f"tries again; in {self._save}, {there}. Fix: make room or repair the disk"
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
