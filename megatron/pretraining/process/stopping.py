"""Stops before the last iteration on a signal or time limit of any worker; all agree."""

from __future__ import annotations

import signal
import time

from megatron.pretraining.config import Config
from moc.runtime.collectives import sum_over_workers
from moc.runtime.job import Job, World
from moc.runtime.termination import handled_stop_signals

EXIT_DONE = 0
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: stop requested; restart the same command to resume


class StopRequested(Exception):
    """A stop was requested during setup, and nothing is lost if all workers end immediately."""

    def __init__(self):
        super().__init__(
            f"exiting in set-up after a signal (exit code {EXIT_REQUEUE}), with nothing to save: the same command "
            "continues from the newest complete snapshot or checkpoint, or begins if there is none"
        )


class StopRequests:
    """Records stop requests to this worker.

    With ``--exit-signal-handler``, SIGTERM, SIGINT, SIGUSR1, SIGHUP and ``--exit-signal`` request a stop.
    ``--exit-duration-in-mins`` requests it after that time.
    """

    def __init__(self, config: Config):
        self.signal: str | None = None
        self._in_memory = config.snapshot.ckpt_policy is not None and config.snapshot.ckpt_tier != "disk"
        minutes = config.training.exit_duration_in_mins
        self._deadline = time.monotonic() + 60.0 * minutes if minutes else None
        if config.training.exit_signal_handler:
            for number in {*handled_stop_signals(), getattr(signal, config.training.exit_signal)}:
                signal.signal(number, self._record_signal)

    def _record_signal(self, number, frame) -> None:
        self.signal = signal.Signals(number).name

    @property
    def pending(self) -> bool:
        """Whether this worker requests a stop."""
        return self.signal is not None or (self._deadline is not None and time.monotonic() > self._deadline)

    def any_signal(self, world: World) -> bool:
        """Returns whether any worker has received a stop signal; a collective call."""
        return sum_over_workers({"signal": float(self.signal is not None)}, world)["signal"] > 0

    def may_lose(self, job: Job) -> bool:
        """Returns whether the job may lose state if it ends before this worker is set up.

        It may if other workers have trained and wait for this worker, or may have left a snapshot in memory that is
        newer than the snapshots in storage.
        """
        return job.joins_running_job or (self._in_memory and job.is_restart)

    def check_set_up(self, world: World, would_lose_state: bool) -> bool:
        """Stops during setup, if any worker has received a stop signal; a collective call.

        Args:
            world: this worker's coordinates.
            would_lose_state: whether this worker knows of state that would be lost.

        Returns:
            Whether to stop after setup: state that any worker would lose is saved first.

        Raises:
            StopRequested: on all workers, if no worker loses anything.
        """
        totals = sum_over_workers({"signal": float(self.signal is not None), "loses": float(would_lose_state)}, world)
        if totals["signal"] > 0 and not totals["loses"]:
            raise StopRequested
        return totals["signal"] > 0
