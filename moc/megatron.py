"""Runs a script of Megatron-LM with this project's loop: ``import moc.megatron`` as the script's first import.

``mocrun`` needs no such line (:mod:`moc.runtime.import_hook`).  Only this module of ``moc`` imports an engine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from megatron.pretraining.entry import cpu
from megatron.pretraining.process.core import CoreError
from megatron.pretraining.process.topology import wait_for_first_worker
from moc.errors import with_code
from moc.private_interfaces import UnknownReleaseError, refuse_import

_LATE = ("torch._dynamo", "torch._inductor.utils", "megatron.core.tokenizers.text.models.gpt_tokenizer")
"""Modules that torch and megatron-core import lazily."""


def warm_up() -> None:
    """Parses option descriptions before workers are forked."""
    describe_options()


def import_lazy_modules() -> None:
    """Imports modules that training imports lazily, before workers are forked and after the options are checked."""
    for module in _LATE:
        with contextlib.suppress(ImportError):  # other releases may have other modules
            importlib.import_module(module)


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a job downloads nothing; read when megatron-core imports transformers
try:
    with refuse_import():
        cpu.install()
        from megatron.pretraining.entry.install import describe_options, install

        install()
except (CoreError, UnknownReleaseError) as error:
    wait_for_first_worker()
    sys.exit(f"{sys.argv[0]}: error: {with_code(error)}")
