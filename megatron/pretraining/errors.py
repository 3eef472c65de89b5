"""Ends a failed run with one sentence and a non-zero exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

import torch.distributed as dist

from megatron.pretraining.config import ConfigError
from megatron.pretraining.data.tokenizer import TokenizerError
from megatron.pretraining.process.topology import wait_for_first_worker
from moc.cli_output import print_lines
from moc.errors import UserError, with_code
from moc.runtime.collectives import first_line
from moc.runtime.groups import Aborted, PeerFailure
from moc.session.settings import SettingsError

EXIT_FLAGS = 2
EXIT_FAILED = 1


@contextlib.contextmanager
def reported(program: str = "pretrain_gpt_moe.py"):
    """Ends the process with one sentence if the cause is known; rank 0 prints it for all that raise it."""
    try:
        yield
    except ConfigError as error:
        _end(program, map(with_code, error.problems), EXIT_FLAGS)
    except (SettingsError, TokenizerError) as error:
        _end(program, [with_code(error)], EXIT_FLAGS)
    except (Aborted, PeerFailure, dist.DistError) as error:  # a survivor of an announced loss resumes instead
        unreachable = UserError(
            f"another worker or the store cannot be reached ({first_line(error)}), and the launcher has reported no "
            "lost worker. Fix: read its last messages, and restart the job to resume",
            code="worker-unreachable",
        )
        _end(program, [with_code(unreachable)], EXIT_FAILED)
    except UserError as error:
        _end(program, [with_code(error)], EXIT_FAILED)


def _end(program: str, sentences: Iterable[str], code: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save; the launcher may end this process now
    wait_for_first_worker()
    worker = f" (worker {os.environ['RANK']})" if "RANK" in os.environ else ""
    print_lines(*(f"{program}: error{worker}: {sentence}" for sentence in sentences), error=True, flush=True)
    sys.exit(code)
