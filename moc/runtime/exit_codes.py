"""Defines the exit codes with a meaning for launchers and users: docs/reference/exit-codes.md."""

FAILED = 1
"""Exit code of a program that cannot run, for example with an unknown release of a library."""

USAGE = 2
"""Exit code of a program that refuses its settings, such as a batch not divisible among the workers."""

LOST = 70
"""Exit code of a job that has lost something it depends on (sysexits' EX_SOFTWARE)."""

SAVED = 75
"""Exit code of a worker that was asked to stop and has saved all state at risk; for a job: restart it to resume."""

START_OVER = 76
"""Exit code of a worker that requests its replacement without an error."""

FROM_WHERE = "start the job again to go on from the newest snapshot or checkpoint that is whole"
"""Remedy in the message of a job that ends with :data:`SAVED` after part of its last state was lost."""


def how_ended(code: int) -> str:
    """Returns a clause that describes a worker's exit code; a negative code is a signal's number."""
    if code < 0:
        return f"was killed by signal {-code}"
    return "was asked to stop, and has ended in good order" if code == SAVED else f"failed (exit code {code})"
