"""Converts a window of sparse snapshots into a dense checkpoint by replay (MoEvement, section 3.3).

The training program replays the window like a resuming run (``moc/session/resume/replay.py``), with ``--skip-train``.
Its ``--ckpt-dir`` has hard links to the window's files, so the snapshots are not modified.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron.pretraining.config import ConfigError, layout_sizes
from megatron.pretraining.config.flag import flags_of
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.entry.offline import config_of_words, given_options
from moc.cli_output import print_lines
from moc.errors import code_of
from moc.files.event_log import read_events
from moc.inspect.coverage import operators_of
from moc.recovery.inventory import in_storage, list_checkpoints
from moc.recovery.sources import recovery_paths
from moc.runtime import child_processes
from moc.store import dense_files
from moc.store.errors import CheckpointError
from moc.store.manifest import MANIFEST_FILE as MANIFEST
from moc.store.manifest import Manifest
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name

PROGRAM = "megatron.pretraining.pretrain_gpt_moe"
_NAME = "pretrain_gpt_moe.py"
_SENTENCE = re.compile(rf"{re.escape(_NAME)}: error(?: \(worker \d+\))?: (.+)")
CLOSE = 1e-3
"""Maximum relative difference of a loss in another layout, which sums in another order."""
_IGNORED = frozenset(
    """
    ckpt_step exit_on_missing_checkpoint finetune load no_load_optim no_load_rng no_save_optim no_save_rng
    pretrained_checkpoint save async_save override_ckpt_iteration override_opt_param_scheduler skip_train
    start_eval_at_iter full_validation tensorboard_dir
    """.split()
)
_IGNORED_PREFIXES = ("save_", "log_", "eval_", "non_persistent_", "wandb_", "tensorboard_", "timing_", "profile")
"""Names and prefixes of ignored options; options of snapshots and faults are also ignored."""


@dataclass(frozen=True)
class ConvertedWindow:
    """Snapshots in ``root``, by iteration, that yield the complete state by replay or by saved gradients."""

    root: Path
    manifests: Mapping[int, Manifest]

    @property
    def end(self) -> Manifest:
        """Manifest of the last snapshot."""
        return self.manifests[max(self.manifests)]


def window_in(root: Path, iteration: int | None) -> ConvertedWindow:
    """Returns the newest complete window in a directory, or the one that ends at an iteration.

    Raises:
        CheckpointError: there is none.
    """
    store = Store(LocalStorage(root))
    iterations = [number for number in store.iterations() if iteration in (None, number)]
    if not iterations:
        raise CheckpointError(
            f"{root}: holds no snapshot{'' if iteration is None else f' of iteration {iteration}'}. Fix: name the "
            "directory that --ckpt-dir was, and an iteration that is in it",
            code="checkpoint-missing",
        )
    try:
        operators = operators_of(store.read_manifest(iterations[-1]).state.get("shape"))
    except ValueError as error:
        raise CheckpointError(
            f"the state of the snapshot of iteration {iterations[-1]} {error}. Fix: convert another checkpoint with "
            "--iteration",
            code="model-description-invalid",
        ) from None
    recovery_path = next(
        recovery_paths(in_storage(list_checkpoints(store)[0]), operators, exact=True, only=iteration), None
    )
    if recovery_path is None:
        if iteration is None:
            raise CheckpointError(
                f"{root}: holds neither a full snapshot nor a complete window. Fix: let the run save a full snapshot "
                "or a complete window, and retry",
                code="window-incomplete",
            )
        where = root / checkpoint_name(iteration)
        raise CheckpointError(
            f"{where}: is neither a full snapshot nor the end of a complete window. Fix: name another one with "
            "--iteration",
            code="window-incomplete",
        )
    iterations = [checkpoint.iteration for checkpoint in reversed(recovery_path.checkpoints())]
    return ConvertedWindow(root, {iteration: store.read_manifest(iteration) for iteration in iterations})


def replay_window(
    window: ConvertedWindow, flags: Sequence[str], workers: int | None, scratch: Path
) -> tuple[Path, str]:
    """Runs the training program, which replays the window and saves the state at its end.

    Args:
        window: the window.
        flags: the run's flags; flags about saving, loading and logging are ignored.
        workers: number of processes; by default as in the run.
        scratch: an empty directory, with room for a dense checkpoint; in another file system, also for the window.

    Returns:
        The dense checkpoint, and a remark unless digests prove that it is bit-identical to the run's state.

    Raises:
        CheckpointError: the program failed, or a replayed loss differs from the run's.
    """
    workers = workers or window.end.layout.get("world", 1)
    try:
        other_layout = layout_sizes(config_of_words(flags, workers), workers) != window.end.layout
    except ConfigError as error:
        raise CheckpointError(str(error), code=code_of(error)) from None
    snapshots, save, log_dir = (scratch / name for name in ("window", "dense", "log"))
    for iteration, manifest in window.manifests.items():
        source, target = window.root / checkpoint_name(iteration), snapshots / checkpoint_name(iteration)
        target.mkdir(parents=True)
        for name in (MANIFEST, *manifest.files):
            _link_or_copy(source / name, target / name)
    overrides: dict[str, object] = dict(
        skip_train=True,
        ckpt_policy="full",
        ckpt_dir=str(snapshots),
        ckpt_step=window.end.iteration,
        save=str(save),
        log_dir=str(log_dir),
        eval_iters=0,
        use_checkpoint_opt_param_scheduler=True,  # the schedule of the window's run
    )
    options = {name: value for name, value in given_options().items() if not _is_ignored(name)} | overrides
    (scratch / "flags.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    launch = "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), "--no-python"
    program = child_processes.module_command(PROGRAM, "--config", str(scratch / "flags.yaml"))
    _run([*child_processes.module_command(*launch), *program], snapshots, window.root)
    events = read_events(log_dir)
    for event in events:
        if event["type"] == "replay" and not event["exact"]:
            _check_loss(event["loss"], window.manifests[event["iteration"]], other_layout)
    loaded = [event for event in events if event["type"] == "resume"][-1]
    remark = ""
    if other_layout:
        remark = "replayed in another layout: equal to the run's state up to floating-point rounding"
    elif loaded["unverified"] or not loaded["verified"]:
        remark = "the result is not verified: digests of operators are missing"
    return dense_files.checkpoint_path(save, window.end.iteration), remark


def _link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, which a job can remove safely; copies it if links fail."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _run(command: Sequence[str], copies: Path, root: Path) -> None:
    """Runs the program and shows its output.

    Raises:
        CheckpointError: the program failed; its error sentence names ``root`` in place of the ``copies``.
    """
    reason = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            match = _SENTENCE.match(line)
            reason = reason or (match and match[1])
            if reason is None:  # the launcher's output after the error adds nothing
                print_lines(line.removesuffix("\n"), error=True, flush=True)
    if process.returncode == 0:
        return
    if reason is None:
        raise CheckpointError(
            f"the window cannot be replayed: {_NAME} ended with exit code {process.returncode}. Fix: correct "
            "what it printed above",
            code="replay-failed",
        )
    sentence = f"the window cannot be replayed: {reason.replace(str(copies), str(root))}"
    raise CheckpointError(sentence)  # with the code of the program


def _is_ignored(name: str) -> bool:
    flag_names = (flag.name for group in ("snapshot", "faults") for flag in flags_of(group_classes()[group]))
    return name in _IGNORED or name.startswith(_IGNORED_PREFIXES) or name in flag_names


def _check_loss(loss: float | None, manifest: Manifest, other_layout: bool) -> None:
    """Rejects a replayed iteration whose loss differs."""
    recorded_loss = manifest.state["record"]["loss"]
    if other_layout and loss is not None and abs(loss - recorded_loss) <= CLOSE * abs(recorded_loss):
        return
    raise CheckpointError(
        f"iteration {manifest.iteration} was replayed with a loss of {loss} instead of {recorded_loss}. Fix: give the "
        "data and flags that the run was trained with",
        code="replay-differs",
    )
