"""Exit codes that say something to launchers and to whoever starts a job: docs/reference/exit-codes.md."""

FAILED = 1
"""Of a program that cannot run, as with an unknown release of a library."""

USAGE = 2
"""Of a program that refuses its settings, such as a batch that this number of workers cannot divide."""

LOST = 70
"""Of a job that has lost something it depends on (sysexits' EX_SOFTWARE)."""

SAVED = 75
"""Of a worker that was asked to stop, and has saved what would have been lost; of a job: restart it to resume."""

START_OVER = 76
"""Of a worker that asks to be replaced without an error."""

FROM_WHERE = "start the job again to go on from the newest snapshot or checkpoint that is whole"
"""What follows where a job ends with :data:`SAVED`, and part of its last state is gone."""


def how_ended(code: int) -> str:
    """What a worker's exit code says, as a clause; minus the signal's number if a signal killed it."""
    if code < 0:
        return f"was killed by signal {-code}"
    return "was asked to stop, and has ended in good order" if code == SAVED else f"failed (exit code {code})"
