"""Checks megatron-core's version before it is imported, and the private interfaces that a run needs.

Names the directory of an unsupported version on ``PYTHONPATH``. ``MOC_UNCHECKED_VERSIONS=1`` skips checks of
versions, so that tests can run with a newer release.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moc import private_interfaces
from moc.errors import UserError

if TYPE_CHECKING:  # a program that reads a checkpoint by Megatron-LM alone needs no configuration
    from megatron.pretraining.config import Config

OLDEST, BEFORE = (0, 19, 2), (0, 20, 0)
"""Supported versions, as in ``pyproject.toml``; bounded above, since private interfaces are used."""

WANTED = "megatron-core>=0.19.2,<0.20"


def unchecked() -> bool:
    """Returns whether the environment allows any version of megatron-core and DeepSpeed."""
    return os.environ.get("MOC_UNCHECKED_VERSIONS") == "1"


class CoreError(UserError, RuntimeError):
    """megatron-core is missing or of an unsupported version; the message states the fix."""

    code = "megatron-core-unusable"


def check_core() -> None:
    """Checks the version that ``megatron.core`` would be imported from; raises CoreError if unsupported or missing."""
    spec = find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        raise CoreError(f"megatron-core is not installed. Fix: pip install '{WANTED}'")
    if unchecked():
        return
    directory = Path(next(iter(spec.submodule_search_locations)))
    version = version_in(directory)
    if version is None or not OLDEST <= version < BEFORE:
        version_text = "unknown" if version is None else ".".join(map(str, version))
        raise CoreError(
            f"megatron.core is taken from {directory}, whose version is {version_text}: this program needs {WANTED}. "
            f"Fix: if that is a checkout of Megatron-LM, take {directory.parent.parent} off PYTHONPATH, or run scripts "
            f"of its release core_v{'.'.join(map(str, OLDEST[:2]))}.0; otherwise pip install '{WANTED}'"
        )


def transformer_engine() -> str | None:
    """Returns the release of Transformer Engine that megatron-core has imported; None without one."""
    return getattr(sys.modules.get("transformer_engine"), "__version__", None)


def version_in(directory: Path) -> tuple[int, int, int] | None:
    """Returns the version of the megatron-core in a directory; None if it states none."""
    try:
        text = (directory / "package_info.py").read_text()
    except OSError:
        return None
    names = ("MAJOR", "MINOR", "PATCH")
    major, minor, patch = (re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in names)
    return (int(major[1]), int(minor[1]), int(patch[1])) if major and minor and patch else None


def features(config: Config) -> frozenset[str]:
    """Returns the features of :data:`moc.private_interfaces.TABLE` that the flags of a run need; pure."""
    parallel, precision, elastic = config.parallel, config.mixed_precision, config.elastic.elastic
    snapshots, pipeline = config.snapshot.ckpt_policy is not None, parallel.pipeline_model_parallel_size > 1
    deepspeed, experts = config.zero.deepspeed, config.moe.num_experts is not None
    needed = {
        "training": True,
        "core optimizer": not deepspeed,
        "snapshots": snapshots,
        "16-bit weights": (precision.fp16 or precision.bf16) and not deepspeed,
        "distributed optimizer": parallel.use_distributed_optimizer and not config.shards_by_blocks,
        "fragments": deepspeed or config.shards_by_blocks,
        "experts": experts,
        "expert biases": experts and config.network.add_bias_linear,
        "fp8 by Transformer Engine": precision.fp8_format is not None and config.network.transformer_impl != "local",
        "fp8": precision.fp8_format is not None and config.network.transformer_impl == "local",
        "pipeline traffic": pipeline and (snapshots or elastic),
        "elastic": elastic,
        "reading checkpoints": config.checkpoint.load is not None,
        "writing checkpoints": config.checkpoint.save is not None,
        "data files": not config.data.mock_data,
        "mock data": config.data.mock_data,
        "SentencePieceTokenizer": config.tokenizer.tokenizer_type == "SentencePieceTokenizer",
        "deepspeed": deepspeed,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def check_releases(config: Config) -> None:
    """Compares the installed libraries with the private interfaces that a run needs.

    Call it after :func:`megatron.pretraining.process.cpu.install`, and before modules of this package that import
    megatron-core.

    Raises:
        UnknownReleaseError: an interface differs.
    """
    private_interfaces.require(*(features(config) - {"deepspeed"}))
    if config.zero.deepspeed:
        from megatron.pretraining.engine.zero.build import load

        with suppress(ImportError):  # the check names the module
            load()
        private_interfaces.require("deepspeed")
