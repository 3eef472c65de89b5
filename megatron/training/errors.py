"""How a run ends that cannot go on: one sentence, and a non-zero exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from megatron.training.checkpoint_files import CheckpointError
from megatron.training.config import ConfigError
from megatron.training.step import NonFiniteError
from megatron.training.tokenizer import TokenizerError

EXIT_FLAGS = 2
EXIT_FAILED = 1
_FIRST_WORKER_SPEAKS_WITHIN = 3.0  # seconds


@contextlib.contextmanager
def reported():
    """Ends the process with a sentence where the cause is known.

    Mostly all workers raise the same; then the first one says it, and its exit makes the launcher end the others
    while they wait.  A worker that is alone with its error says it after the wait.
    """
    try:
        yield
    except (ConfigError, TokenizerError, CheckpointError, NonFiniteError) as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_FIRST_WORKER_SPEAKS_WITHIN)
        print(f"pretrain_gpt_moe.py: error (worker {rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED if isinstance(error, (CheckpointError, NonFiniteError)) else EXIT_FLAGS)
