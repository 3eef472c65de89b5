"""Stops before the last iteration: signals and time limits, noticed by one worker and agreed on by all."""

from __future__ import annotations

import signal
import time

from megatron.pretraining.config import Config
from moc.runtime.agreement import sum_over_workers
from moc.runtime.world import World

EXIT_DONE = 0
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: asked to stop; restart the same command to resume


class StopRequested(Exception):
    """A worker was asked to stop during set-up; there is no state to save yet."""


class StopRequests:
    """Records, from its construction on, whether this worker has been asked to stop.

    With ``--exit-signal-handler``, SIGTERM, SIGUSR1 and ``--exit-signal`` request it; ``--exit-duration-in-mins``
    requests it when the time is over.
    """

    def __init__(self, config: Config):
        self.signal: str | None = None
        minutes = config.training.exit_duration_in_mins
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        if config.training.exit_signal_handler:
            for number in {signal.SIGTERM, signal.SIGUSR1, getattr(signal, config.training.exit_signal)}:
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

    def check_set_up(self, world: World) -> None:
        """Raises StopRequested on all workers if any has received a stop signal; a collective call."""
        if self.anybody_in(world):
            raise StopRequested
