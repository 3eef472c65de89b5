"""How a run ends that cannot go on: one sentence, and a non-zero exit code."""

from __future__ import annotations

import contextlib
import os
import sys

from megatron.training.checkpoint_files import CheckpointError
from megatron.training.config import ConfigError
from megatron.training.step import NonFiniteError
from megatron.training.tokenizer import TokenizerError

EXIT_FLAGS = 2
EXIT_FAILED = 1


@contextlib.contextmanager
def reported():
    """Ends the process with a sentence where the cause is known; all workers raise these alike, one says it."""
    try:
        yield
    except (ConfigError, TokenizerError, CheckpointError, NonFiniteError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain_gpt_moe.py: error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED if isinstance(error, (CheckpointError, NonFiniteError)) else EXIT_FLAGS)
