"""Checks the paths of flags before a run trains: inputs must exist, and outputs must be writable.

The launcher checks them before it forks workers, and changes nothing. The first worker creates the directories.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.pretraining.checkpoint import lineage
from megatron.pretraining.config import Config
from megatron.pretraining.config.flag import ConfigError, Problems
from moc.background import within
from moc.errors import cause_of
from moc.files.safe_directory import MAX_MANIFEST_BYTES, open_user_file
from moc.store.errors import OUT_OF_SPACE_ERRNOS

if TYPE_CHECKING:
    from megatron.pretraining.config.snapshot import SnapshotFlags
    from moc.runtime.job import Job

_TIMEOUT_S = 3.0  # seconds to check a directory; a slower one is not refused
_BLOCK = 1 << 16  # bytes written to check for free space
_LISTS = ("data_args_path", "per_split_data_args_path")
_FILES = ("tokenizer_model", "vocab_file", "merge_file", *_LISTS)
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_OUTPUTS = ("--save", "--log-dir", "--tensorboard-dir", "--data-cache-path")
TOKENIZERS_IN_FILES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
"""Types of tokenizers whose model is a file; other models may be names on a hub."""


def check_paths(arguments: Any, snapshot: SnapshotFlags, log_dir: str | None, reads_tokens: bool, nodes: int) -> None:
    """Checks the paths of this machine that flags name, and creates none of them.

    Directories that cannot be written are refused only in a job of one node: in others, only some nodes may write them.

    Args:
        arguments: Megatron-LM's arguments.
        snapshot: the flags of snapshots.
        log_dir: value of ``--log-dir``.
        reads_tokens: whether each data prefix names token files, as Megatron-LM's own datasets require.
        nodes: nodes of the job.

    Raises:
        ConfigError: a file is missing, a directory is a file, or a directory is not writable.
    """
    problems = Problems()
    for flag, path, problem in _input_problems(arguments, snapshot, reads_tokens):
        problems.refuse(True, f"{flag} {path}: {problem}. Fix: correct the path", code="input-missing")
    if nodes == 1:
        directories = arguments.save, log_dir, arguments.tensorboard_dir, arguments.data_cache_path
        named = [*zip(_OUTPUTS, directories, strict=True), ("--ckpt-dir", snapshot.ckpt_dir)]
        local_paths = ((flag, path) for flag, path in named if path and _is_local(path))
        _refuse_unwritable(problems, local_paths, _problem_without_creating)
    problems.raise_found()


def check_load(arguments: Any, may_be_absent: bool) -> None:
    """Checks the tracker file and the directory of the checkpoint that a command loads; :func:`lineage.check_early`.

    Checkpoints of other storage, and directories that respond too late, are left to the workers.

    Raises:
        CheckpointError: the newest checkpoint is unknown, or the named one is missing.
        ConfigError: a directory cannot be read.
    """
    directories = arguments.load, arguments.save, arguments.pretrained_checkpoint
    if all(_is_local(path) for path in directories if path):
        try:
            within(_TIMEOUT_S, lineage.check_early, arguments, may_be_absent)
        except OSError as error:
            raise ConfigError(
                f"--load, --save or --pretrained-checkpoint names a directory that cannot be read ({cause_of(error)}). "
                "Fix: correct the path or its permissions",
                code="input-missing",
            ) from error


def _input_problems(arguments: Any, snapshot: SnapshotFlags, reads_tokens: bool) -> Iterator[tuple[str, str, str]]:
    """Yields flags, their paths, and the problems of these paths."""
    for name in _FILES:
        path = getattr(arguments, name, None)
        is_file = name != "tokenizer_model" or arguments.tokenizer_type in TOKENIZERS_IN_FILES
        if path and is_file and _is_local(path) and not os.path.isfile(path):
            yield _flag(name), path, "there is no such file"
        elif path and not is_file and is_explicit_path(path) and not os.path.exists(path):
            yield _flag(name), path, "there is no such file or directory"
    for name in ("load", "pretrained_checkpoint"):
        path = getattr(arguments, name, None)
        if path and os.path.exists(path) and not os.path.isdir(path):
            yield _flag(name), path, "it is no directory"
    may_start_new_run = (
        snapshot.ckpt_policy or arguments.pretrained_checkpoint or not arguments.exit_on_missing_checkpoint
    )
    if arguments.load and _is_local(arguments.load) and not os.path.exists(arguments.load) and not may_start_new_run:
        yield "--load", arguments.load, "there is no such directory, and --exit-on-missing-checkpoint needs it"
    uses_memory = snapshot.ckpt_policy and (snapshot.ckpt_tier != "disk" or snapshot.upstream_logging)
    if uses_memory and not os.path.isdir(snapshot.ckpt_memory_dir):
        yield "--ckpt-memory-dir", snapshot.ckpt_memory_dir, "there is no such directory"
    for name in _PREFIXES if reads_tokens and not arguments.mock_data else ():
        yield from _problems_of_blend(_flag(name), getattr(arguments, name) or ())
    for name in _LISTS if reads_tokens and not arguments.mock_data else ():
        path = getattr(arguments, name)
        if path and _is_local(path) and os.path.isfile(path):
            yield from _problems_of_list(_flag(name), path, name == "per_split_data_args_path")


def _problems_of_blend(flag: str, blend: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    if len(blend) % 2 and any(map(_is_number, blend)):
        yield flag, " ".join(blend), "a weight or a prefix is missing"
        return
    prefixes = _prefixes(blend)
    for weight in blend[::2] if len(prefixes) < len(blend) else ():
        if not 0 < float(weight) < math.inf:
            yield flag, " ".join(blend), f"the weight {weight} is no positive number"
    for prefix in filter(_is_local, prefixes):
        missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not os.path.isfile(path)]
        ending = os.path.splitext(prefix)[1]
        if missing and ending in (".bin", ".idx") and os.path.isfile(prefix):
            yield flag, prefix, f"the prefix of two files has no {ending}"
        elif missing:
            yield flag, prefix, f"there is no file {' and no '.join(missing)}"


def _problems_of_list(flag: str, path: str, is_by_split: bool) -> Iterator[tuple[str, str, str]]:
    """Yields the problems of a file with a blend, or of a JSON file with the blends of the splits."""
    try:
        with open(open_user_file(path, MAX_MANIFEST_BYTES), encoding="utf-8") as file:
            text = file.read()
        contents = [json.loads(text)[split] for split in ("train", "valid", "test")] if is_by_split else [text]
        blends = [each.split() if isinstance(each, str) else [*map(str, each)] for each in contents if each is not None]
    except OSError as error:
        yield flag, path, f"it cannot be read ({error.strerror})"
    except (LookupError, TypeError, ValueError):
        wanted = "JSON with the words of train, valid and test" if is_by_split else "text"
        yield flag, path, f"it is no {wanted}"
    else:
        for blend in blends:
            yield from _problems_of_blend(flag, blend) if blend else [(flag, path, "a blend in it has no word")]


def _prefixes(blend: Sequence[str]) -> Sequence[str]:
    """Returns the prefixes of a blend, which are the second of each two words if the first are weights."""
    weights = blend[::2] if len(blend) % 2 == 0 else ()
    named = blend[1::2] if weights and all(map(_is_number, weights)) else blend
    return [prefix.strip() for prefix in named]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_explicit_path(path: str) -> bool:
    """Returns whether this cannot be a name on a hub."""
    return path.startswith(("/", "./", "../"))


def _is_local(path: str) -> bool:
    return "://" not in path


def check_outputs(config: Config, job: Job) -> None:
    """Creates the directories that the flags name, on the first worker of a new launch.

    Later write failures, and directories that respond too late, are reported and do not end training.

    Raises:
        ConfigError: a directory is not writable.
    """
    if not (job.rank or job.joins_running_job or job.is_restart):
        check_directories(config)


def check_directories(config: Config) -> None:
    """Creates the directories that the flags name; raises ConfigError if one of them is not writable."""
    problems = Problems()
    logging = config.logging
    directories = config.checkpoint.save, logging.log_dir, logging.tensorboard_dir, config.data.data_cache_path
    named_paths = ((flag, path) for flag, path in zip(_OUTPUTS, directories, strict=True) if path)
    _refuse_unwritable(problems, named_paths, _problem)
    problems.raise_found()


def _refuse_unwritable(
    problems: Problems, named: Iterable[tuple[str, str]], problem_of: Callable[[Path], str | None]
) -> None:
    for flag, directory in named:
        problem = within(_TIMEOUT_S, problem_of, Path(directory))
        problems.refuse(
            problem,
            f"{flag} {directory} cannot be written: {problem}. Fix: correct the path, its permissions or its free "
            "space, or choose another directory",
            code="output-not-writable",
        )


def _problem_without_creating(directory: Path) -> str | None:
    """Returns the reason why no file can be created in a directory or its nearest existing parent; None if one can."""
    while not os.path.lexists(directory) and directory != directory.parent:
        directory = directory.parent
    return _problem(directory)


def _problem(directory: Path) -> str | None:
    """Creates a directory; returns the reason why no file can be created in it, or None if one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            return None
    except FileExistsError:
        return f"{directory} is no directory"
    except OSError as error:
        if error.errno in OUT_OF_SPACE_ERRNOS and _holds_run(directory):
            return None  # its saves are repeated, and first remove unpublished files
        return error.strerror or str(error)


def _holds_run(directory: Path) -> bool:
    """Returns whether a run has written checkpoints, snapshots or events into a directory."""
    return any(re.match(r"\.?iter_|\.run\.json|events\.jsonl", name) for name in os.listdir(directory))
