"""Runs the tests that failed once more, by themselves: ``python .ci/again.py``, after a run of pytest that failed.

What passes then is told as ``FLAKY name``, a defect to be found; one that fails again, or more than five that failed,
fail the run.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Exit status: 0 if all of them pass now."""
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed; up to {MOST} are run once more", flush=True)
        return 1
    status = subprocess.run([sys.executable, "-m", "pytest", "-v", *failed]).returncode
    if status == 0:
        for name in failed:
            print(f"FLAKY {name}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
