"""Stops before the last iteration: signals and time limits, noticed by one worker and agreed on by all."""

from __future__ import annotations

import signal
import time

from megatron.pretraining.config import Config
from moc.runtime.agreement import sum_over_workers
from moc.runtime.job import Job
from moc.runtime.stop_report import received_stops
from moc.runtime.world import World

EXIT_DONE = 0
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: asked to stop; restart the same command to resume


class StopRequested(Exception):
    """A worker was asked to stop during set-up, and nothing is lost if all end at once."""

    def __init__(self):
        super().__init__(
            f"exiting in set-up after a signal (exit code {EXIT_REQUEUE}), with nothing to save: the same command "
            "continues from the newest complete snapshot or checkpoint, or begins if there is none"
        )


class StopRequests:
    """Records, from its construction on, whether this worker has been asked to stop.

    With ``--exit-signal-handler``, SIGTERM, SIGINT, SIGUSR1, SIGHUP and ``--exit-signal`` request it.
    ``--exit-duration-in-mins`` requests it when the time is over.
    """

    def __init__(self, config: Config):
        self.signal: str | None = None
        self._in_memory = config.snapshot.ckpt_policy is not None and config.snapshot.ckpt_tier != "disk"
        minutes = config.training.exit_duration_in_mins
        self._deadline = time.monotonic() + 60.0 * minutes if minutes else None
        if config.training.exit_signal_handler:
            for number in {*received_stops(), getattr(signal, config.training.exit_signal)}:
                signal.signal(number, self._note)

    def _note(self, number, frame) -> None:
        self.signal = signal.Signals(number).name

    @property
    def pending(self) -> bool:
        """Whether this worker asks to stop."""
        return self.signal is not None or (self._deadline is not None and time.monotonic() > self._deadline)

    def anybody_in(self, world: World) -> bool:
        """Whether any worker has received a stop signal; a collective call."""
        return sum_over_workers({"signal": float(self.signal is not None)}, world)["signal"] > 0

    def may_lose(self, job: Job) -> bool:
        """Whether something is lost if the job ends before this worker is set up, as far as that is known before.

        So it is where others have trained, and wait for this worker, and where they may have left a snapshot in memory
        that is newer than those in storage.
        """
        return job.others_wait or (self._in_memory and job.has_begun_before)

    def check_set_up(self, world: World, loses: bool) -> bool:
        """Stops in set-up, if any worker has received a stop signal; a collective call.

        Args:
            world: this worker's place.
            loses: whether something would be lost, as far as this worker knows.

        Returns:
            Whether to stop once set-up is over: what any worker would lose is saved first.

        Raises:
            StopRequested: on all workers; nobody loses anything.
        """
        told = sum_over_workers({"signal": float(self.signal is not None), "loses": float(loses)}, world)
        if told["signal"] > 0 and not told["loses"]:
            raise StopRequested
        return told["signal"] > 0
