"""Decides which checkpoint a start continues, and refuses saves that could replace checkpoints of another run.

A checkpoint in ``--save`` is the command's own if this launch has saved it, if it belongs to the run of the snapshots,
or if the command that saved it began at the same *origin*: the same ``--load`` elsewhere, with the same flags.  A start
continues its own newest checkpoint.  Without one it loads the checkpoint of its flags, as Megatron-LM does.  It is
refused if its saves could replace a checkpoint that it does not continue.

The tracker file names the newest checkpoint, as in Megatron-LM.  If a kill kept it from naming a newer checkpoint of
this program, the newer one counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moc.errors import with_code
from moc.store import dense_files
from moc.store.dense_files import TRACKER_FILE, Published
from moc.store.errors import CheckpointError


@dataclass(frozen=True)
class Directory:
    """A directory of checkpoints.

    Attributes:
        path: its real path.
        has_tracker: it has a tracker file.
        tracked: iteration in the tracker file; None without one, or if it names a release.
        iterations: iterations that have a directory, complete or not.
        complete: complete checkpoints, ascending.
        problem: the error of an invalid tracker file, with its code; empty if there is none.
    """

    path: str
    has_tracker: bool = False
    tracked: int | None = None
    iterations: tuple[int, ...] = ()
    complete: tuple[Published, ...] = ()
    problem: str = ""

    @classmethod
    def at(cls, path: str | None) -> Directory | None:
        """Reads a directory; returns None without a path."""
        if path is None:
            return None
        listed = tuple(dense_files.list_iterations(path)), tuple(dense_files.published(path))
        has_tracker, real = os.path.lexists(Path(path) / TRACKER_FILE), os.path.realpath(path)
        try:
            return cls(real, has_tracker, dense_files.latest_iteration(path), *listed)
        except CheckpointError as error:
            return cls(real, has_tracker, None, *listed, with_code(error))

    @property
    def current(self) -> int | None:
        """Iteration of the newest checkpoint; None without one, or if it is a release."""
        pending = [
            checkpoint
            for checkpoint in self.complete
            if checkpoint.lineage and (self._is_newer(checkpoint) or not self.has_tracker)
        ]
        return pending[-1].iteration if pending else self.tracked

    @property
    def committed(self) -> list[Published]:
        """Complete checkpoints, without an interrupted save of Megatron-LM, which the tracker file does not name."""
        return [checkpoint for checkpoint in self.complete if checkpoint.lineage or not self._is_newer(checkpoint)]

    @property
    def holds_checkpoint(self) -> bool:
        """Whether Megatron-LM, or this program after a kill, finds a checkpoint."""
        return self.has_tracker or self.current is not None

    def _is_newer(self, checkpoint: Published) -> bool:
        """Returns whether the tracker file names an older checkpoint, and was last changed before this one."""
        return self.has_tracker and not checkpoint.is_announced and checkpoint.iteration > (self.tracked or 0)


@dataclass(frozen=True)
class Command:
    """The flags that select a checkpoint, and the directories that they name.

    Attributes:
        job: this launch.
        run: run of the snapshots in ``--ckpt-dir``; empty without snapshots.
    """

    load: Directory | None = None
    save: Directory | None = None
    pretrained: Directory | None = None
    ckpt_step: int | None = None
    finetune: bool = False
    no_load_optim: bool = False
    exit_on_missing: bool = False
    job: str = ""
    run: str = ""

    @classmethod
    def of(cls, arguments: Any, job: str = "", run: str = "") -> Command:
        """Reads the directories that Megatron-LM's arguments name."""
        return cls(
            load=Directory.at(arguments.load),
            save=Directory.at(arguments.save),
            pretrained=Directory.at(arguments.pretrained_checkpoint),
            ckpt_step=arguments.ckpt_step,
            finetune=arguments.finetune,
            no_load_optim=arguments.no_load_optim,
            exit_on_missing=arguments.exit_on_missing_checkpoint,
            job=job,
            run=run,
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the command continues the checkpoints of its own ``--save``."""
        load, save = self.load, self.save
        return load is not None and save is not None and load.path == save.path and not self.finetune

    @property
    def origin(self) -> str:
        """Flags of a beginning in another directory; empty if its own checkpoints follow from ``--load``."""
        if self.is_in_place and self.ckpt_step is None and not self.no_load_optim:
            return ""
        words = [f"--load {self.load.path}"] if self.load is not None else []
        words += [f"--pretrained-checkpoint {self.pretrained.path}"] if self.pretrained is not None else []
        if not words:
            return ""
        words += [f"--ckpt-step {self.ckpt_step}"] if self.ckpt_step is not None else []
        words += [f"--{name.replace('_', '-')}" for name in ("finetune", "no_load_optim") if getattr(self, name)]
        return " ".join(words)

    def owns(self, checkpoint: Published) -> bool:
        """Returns whether a checkpoint in ``--save`` is the command's own."""
        if checkpoint.lineage is None:
            return False
        same_run, same_origin = checkpoint.lineage.run == self.run != "", checkpoint.lineage.origin == self.origin != ""
        return checkpoint.job == self.job or same_run or same_origin


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint that a start loads.

    Attributes:
        root: its directory; None if the run begins with new weights.
        iteration: its iteration; None for a release, or if there is no checkpoint.
        begins: only the weights are loaded, at iteration 0.
        is_own: it is the command's own, so flags of the beginning (such as ``--no-load-optim``) do not apply.
    """

    root: str | None = None
    iteration: int | None = None
    begins: bool = False
    is_own: bool = False

    @property
    def metadata(self) -> tuple[int, bool]:
        """The content of a tracker file that names this checkpoint: its iteration, and whether it is a release."""
        return (0, True) if self.iteration is None else (self.iteration, False)

    def arguments(self, given: Any) -> dict[str, Any]:
        """Returns the arguments that let Megatron-LM load it, by name; ``given`` are the arguments of the command line.

        Flags of the beginning do not apply to a later checkpoint of the run, which has its position and its optimizer
        state.
        """
        return {
            "load": self.root,
            "pretrained_checkpoint": None,
            "ckpt_step": self.iteration,
            "finetune": self.begins,
            "no_load_optim": given.no_load_optim and (given.no_save_optim or not self.is_own),
            "override_ckpt_iteration": None if self.is_own else given.override_ckpt_iteration,
        }


def choose(command: Command) -> CheckpointChoice:
    """Returns the checkpoint that a start loads.

    Raises:
        CheckpointError: the flags name a missing checkpoint, or the newest one is unknown.
    """
    save, load, begins = command.save, command.load, command.finetune
    if save is not None:
        newest = next((checkpoint for checkpoint in save.complete if checkpoint.iteration == save.current), None)
        if newest is not None and command.owns(newest):
            return CheckpointChoice(save.path, newest.iteration, is_own=True)
    _refuse_unknown(load, command)
    if command.pretrained is not None and not (load is not None and load.holds_checkpoint):
        load, begins = command.pretrained, True
        _refuse_unknown(load, command)
    if load is None:
        return CheckpointChoice()
    if not load.holds_checkpoint and (command.exit_on_missing or load is command.pretrained):
        raise CheckpointError(
            f"{load.path} holds no checkpoint, and --exit-on-missing-checkpoint or --pretrained-checkpoint needs one. "
            "Fix: correct the path, or drop the flag",
            code="checkpoint-missing",
        )
    iteration = load.current if command.ckpt_step is None else command.ckpt_step
    if iteration is not None and iteration not in load.iterations:
        raise CheckpointError(
            f"{dense_files.checkpoint_path(load.path, iteration)} does not exist. Fix: correct --load, --ckpt-step or "
            f"{TRACKER_FILE}",
            code="checkpoint-missing",
        )
    return CheckpointChoice(load.path, iteration, begins)


def newest(command: Command) -> int | None:
    """Returns the iteration of the checkpoint that a run with snapshots may resume from; None if there is none.

    A run that saves elsewhere begins at ``--load``, and does not return there, even if it has a newer checkpoint.

    Raises:
        CheckpointError: as :func:`choose`, but not for a missing checkpoint: there may be a snapshot.
    """
    try:
        choice = choose(command)
    except CheckpointError as error:
        if error.code == "checkpoint-missing":
            return None
        raise
    returns = choice.is_own or command.save is None or command.save.path == choice.root
    return choice.iteration if returns and not choice.begins else None


def check_early(arguments: Any, may_be_absent: bool) -> None:
    """Checks the checkpoint that a command names, before its run is known; changes nothing.

    Args:
        arguments: Megatron-LM's arguments.
        may_be_absent: the directories may hold no checkpoint, as where a snapshot replaces it.

    Raises:
        CheckpointError: as :func:`choose`.
    """
    command = Command.of(arguments)
    save = command.save
    if save is not None and any(checkpoint.iteration == save.current for checkpoint in save.complete):
        return  # the run may own this checkpoint, and then loads no other
    is_interrupted = save is not None and bool(dense_files.find_replaced(save.path))  # workers restore the checkpoint
    (newest if may_be_absent or is_interrupted else choose)(command)


def _refuse_unknown(directory: Directory | None, command: Command) -> None:
    """Refuses an invalid tracker file, and a missing one: checkpoints of another program may be incomplete."""
    if directory is None or command.ckpt_step is not None:
        return
    if directory.problem:
        raise CheckpointError(directory.problem)
    if directory.holds_checkpoint or not directory.complete:
        return
    newest = directory.complete[-1].iteration
    raise CheckpointError(
        f"{directory.path} holds checkpoints up to iteration {newest}, and no {TRACKER_FILE} names the one to load. "
        f"Fix: write an iteration into it, or pass --ckpt-step {newest}",
        code="tracker-missing",
    )


def beginning(load: str | None, save: str | None, pretrained: str | None, finetune: bool) -> str:
    """Returns the flags of a beginning at a checkpoint of another run; empty without one.  Reads no directory."""
    directories = [None if path is None else Directory(os.path.abspath(path)) for path in (load, save, pretrained)]
    return Command(directories[0], directories[1], directories[2], finetune=finetune).origin


def check_beginning(command: Command, own_beginning: str, recorded: str | None) -> None:
    """Checks that the run of the snapshots began as this command would, if that begins at a checkpoint of another run.

    Args:
        command: the command, with the run of the snapshots.
        own_beginning: its :func:`beginning`.
        recorded: the beginning that the snapshots record; None if unknown.

    Raises:
        CheckpointError: it began in another way, so its state would replace the checkpoint that the command names.
    """
    directories = [directory for directory in (command.load, command.pretrained) if directory is not None]
    with_checkpoint = [directory for directory in directories if directory.holds_checkpoint]
    if recorded is None or not own_beginning or own_beginning == recorded or not with_checkpoint:
        return
    lineages = [checkpoint.lineage for directory in with_checkpoint for checkpoint in directory.complete]
    runs = {lineage.run for lineage in lineages if lineage is not None}
    if command.run in runs - {""}:
        return
    raise CheckpointError(
        f"--ckpt-dir holds snapshots of a run that began with {recorded or 'new weights'}, and this command begins "
        f"with {own_beginning}. Fix: choose another --ckpt-dir, or continue that run with its flags",
        code="snapshots-of-another-run",
    )


def check_saves(command: Command, iteration: int) -> None:
    """Checks that saves after an iteration replace no checkpoint that the run does not continue.

    Raises:
        CheckpointError: ``--save`` holds such a checkpoint.
    """
    save = command.save
    committed = save.committed if save is not None else []
    foreign_iterations = [
        checkpoint.iteration for checkpoint in committed if not _continues(command, checkpoint, iteration)
    ]
    if save is not None and foreign_iterations:
        raise CheckpointError(
            f"--save {save.path} holds iteration {foreign_iterations[-1]}, which this command does not continue: "
            f"it begins at iteration {iteration}, and its saves could replace it. Fix: continue it with --load "
            f"{save.path}, without --finetune and --ckpt-step, or choose another --save",
            code="save-of-another-run",
        )


def _continues(command: Command, checkpoint: Published, iteration: int) -> bool:
    if checkpoint.lineage is not None and checkpoint.job == command.job:
        return True
    return checkpoint.iteration <= iteration and (command.is_in_place or command.owns(checkpoint))
