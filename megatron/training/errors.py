"""How a run ends that cannot go on: one sentence, and a non-zero exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from megatron.training.checkpoint_files import CheckpointError
from megatron.training.config import ConfigError
from megatron.training.first_worker import let_first_worker_speak
from megatron.training.step import NonFiniteError
from megatron.training.tokenizer import TokenizerError

EXIT_FLAGS = 2
EXIT_FAILED = 1


@contextlib.contextmanager
def reported():
    """Ends the process with a sentence where the cause is known, said by one of the workers that raise it."""
    try:
        yield
    except (ConfigError, TokenizerError, CheckpointError, NonFiniteError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: the launcher may end this at once
        let_first_worker_speak()
        rank = os.environ.get("RANK", "0")
        print(f"pretrain_gpt_moe.py: error (worker {rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED if isinstance(error, (CheckpointError, NonFiniteError)) else EXIT_FLAGS)
