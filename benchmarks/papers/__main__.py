"""Entry point of ``python -m benchmarks.papers NAME``."""

import sys

from benchmarks.papers.program import main

if __name__ == "__main__":
    sys.exit(main())
