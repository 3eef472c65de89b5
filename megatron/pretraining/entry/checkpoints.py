"""``--save`` and ``--load``: checkpoints in Megatron-LM's format, written and read by Megatron-LM's code.

They contain digests of the state: see :mod:`megatron.pretraining.checkpoint.digests`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.training import checkpointing, get_wandb_writer, training

from megatron.pretraining.checkpoint import contents, fragments, lineage, writer
from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.checkpoint.digests import digest_state, verify_loaded
from megatron.pretraining.checkpoint.state import read_data, read_state
from megatron.pretraining.checkpoint.unpickling import read_metadata
from megatron.pretraining.data.identity import DATA
from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.owned import members
from megatron.pretraining.engine.sharded import FragmentedOptimizer
from megatron.pretraining.engine.small_moments import SmallMomentsAdam
from megatron.pretraining.entry import previous
from megatron.pretraining.entry.configuration import described
from megatron.pretraining.entry.model import check_shape
from megatron.pretraining.entry.own_flags import OWN_PROGRAM
from megatron.pretraining.entry.stock import get_args, reads_checkpoint, replaced
from megatron.pretraining.logging.writers import WandbWriter
from megatron.pretraining.parts import WorkerParts
from moc.fault_points import reach
from moc.files.safe_directory import write_durably
from moc.runtime.collectives import first_reported, run_on_rank0
from moc.state.record import Position
from moc.store import dense_files
from moc.store.errors import CheckpointError

_WRITES = ((serialization, "save_config"), (FileSystemWriterAsync, "finish"))
"""Functions of the first worker that write, while the other workers wait."""
_PERMIT_MISSING = "log_all", "return_all", "ignore_all"
"""Values of ``--dist-ckpt-strictness`` that accept missing tensors, which keep their values."""
_EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the embedding's tensor in Megatron-LM's checkpoints of GPT models."""


class StockCheckpoints(Saves):
    """Saves and loads a worker's state by Megatron-LM's functions; all methods are collective."""

    format = dense_files.MEGATRON_FORMAT

    def __init__(self, parts: WorkerParts, model: Model):
        super().__init__(parts.config, parts.world, parts.log)
        self._parts, self._model, self._records, self._origin = parts, model, [], ""
        core = members(parts.optimizer.core)
        fragmented = any(isinstance(member, FragmentedOptimizer) for member in core)
        # torch casts loaded tensors to the dtype of the parameter, which destroys encoded moments
        encoded = any(isinstance(getattr(member, "optimizer", None), SmallMomentsAdam) for member in core)
        self._needs_fragments = parts.moving is not None or fragmented or encoded
        # this program's checkpoints load in any layout, unlike Megatron-LM's optimizer state
        self._saves_fragments = self._needs_fragments or getattr(get_args(), OWN_PROGRAM, False)

    def newest(self, seconds: float | None = None, run: str = "") -> int | None:
        self.run = run
        look = lambda: lineage.newest(self._command())  # noqa: E731
        return run_on_rank0(lambda: self.look(seconds, look), "cannot look for a checkpoint")

    def check(self, iteration: int, run: str) -> None:
        self.run = run or self.run
        look = lambda: lineage.check_saves(self._command(), iteration)  # noqa: E731
        run_on_rank0(look, "cannot look for checkpoints")

    @property
    def beginning(self) -> str:
        args = get_args()
        return lineage.beginning(args.load, args.save, args.pretrained_checkpoint, args.finetune)

    def check_beginning(self, recorded: str | None) -> None:
        look = lambda: lineage.check_beginning(self._command(), self.beginning, recorded)  # noqa: E731
        run_on_rank0(look, "cannot look for checkpoints")

    def lineage(self) -> dense_files.Lineage:
        return dense_files.Lineage(self.run or self._world.job.id, self._origin)

    def _command(self) -> lineage.Command:
        """Reads the directories that the flags name; restores a checkpoint whose replacement a kill interrupted."""
        args = get_args()
        if args.save is not None:
            dense_files.restore_replaced(args.save)
        command = lineage.Command.of(args, self._world.job.id, self.run)
        self._origin = command.origin
        return command

    def _saves_to(self, root: str) -> bool:
        save = get_args().save
        return save is not None and os.path.realpath(save) == root

    def load(self) -> Position | None:
        """Loads the checkpoint that ``--load`` and ``--pretrained-checkpoint`` name; None on a first start.

        Raises:
            CheckpointError: Megatron-LM cannot load it.
        """
        args = get_args()
        args.iteration = args.num_floating_point_operations_so_far = 0
        choose = lambda: dataclasses.asdict(lineage.choose(self._command()))  # noqa: E731
        choice = lineage.CheckpointChoice(**run_on_rank0(choose, "cannot look for a checkpoint"))
        if choice.root is None:
            return None
        if choice.is_own and self._origin:
            self._log.message(f"the run that began with {self._origin} continues in --save, at {choice.iteration}")
        with replaced(args, **choice.arguments(args)), replaced(checkpointing, read_metadata=lambda _: choice.metadata):
            position = self._load(choice)
        if position is not None and self._saves_to(choice.root):
            self.last_saved = position.iteration
        return position

    def _load(self, choice: lineage.CheckpointChoice) -> Position | None:
        """Loads a checkpoint, which Megatron-LM's arguments name."""
        args, parts, root = get_args(), self._parts, choice.root
        assert root is not None  # or there is nothing to load
        directory = dense_files.checkpoint_path(root, choice.iteration or 0)
        manifest = self._verify(directory)
        if manifest is not None and self._saves_to(root):
            self.run = self.run or manifest.get("run", "")
        if "vocabulary-padding" not in parts.config.training.corrections:
            run_on_rank0(lambda: _refuse_other_padding(directory, args.padded_vocab_size), "cannot read a checkpoint")
        if manifest is not None and manifest["format"] == dense_files.FORMAT:
            return self._load_own_format(directory, manifest)
        state = None
        if manifest is not None and dense_files.STATE_FILE in manifest["files"]:
            state = run_on_rank0(lambda: read_state(directory, resumes=True), "cannot read a checkpoint")
        saved = state or self._saved_data(directory, manifest)
        if not args.finetune and root == args.load:
            contents.check_data(parts.config, parts.data, saved, directory)
        fragmented = self._needs_fragments or state is not None
        # Megatron-LM refuses other sizes of tensor and pipeline parallelism for optimizer state in its own files
        shards = args.use_distributed_optimizer and not fragmented
        utils: Any = checkpointing.wandb_utils
        report = functools.partial(_report_to_wandb, utils.on_load_checkpoint_success)
        with (
            reads_checkpoint(root),
            replaced(args, use_distributed_optimizer=shards),
            replaced(utils, on_load_checkpoint_success=report),
        ):
            chunks, optimizer = self._parts_of_megatron(fragmented)
            scheduler = parts.scheduler if state is None else None
            loaded: Any = training.load_checkpoint(chunks, optimizer, scheduler, checkpointing_context={})
        args.iteration, args.num_floating_point_operations_so_far = loaded
        parts.modules.take_over()
        resumes = not (args.iteration == 0 or choice.begins or args.no_load_optim)
        if fragmented:
            if not resumes:
                parts.optimizer.core.reload_model_params()
            else:
                fragments.load(directory, manifest, state, parts.config, parts.chunks, parts.optimizer)
                assert state is not None  # or nothing was loaded
                contents.restore_scheduler(parts.scheduler, state["scheduler"], directory)
        if args.dist_ckpt_strictness in _PERMIT_MISSING:
            self._log.message(f"the state of {directory} is not verified: a part of it may be missing")
        else:
            verify_loaded(parts, self._model, directory, manifest, resumes)
        if args.iteration == 0:
            return None
        if state is not None:
            contents.warn_of_other_run(parts.config, parts.world, parts.optimizer, parts.data, state, self._log.message)
        else:
            contents.warn_of_other_data(parts.data, saved, self._log.message)
        return Position(args.iteration, args.consumed_train_samples)

    def _load_own_format(self, directory: Path, manifest: dict) -> Position | None:
        """Loads a checkpoint that a converter or the previous release wrote, in any layout."""
        args, parts = get_args(), self._parts
        resumes = not (args.finetune or args.no_load_optim)
        state = run_on_rank0(lambda: read_state(directory, resumes), "cannot read a checkpoint")
        self._log.message(f"loading checkpoint {directory}")
        if previous.described_by_flags(state["shape"]):
            previous.check_flags(described(args), state["shape"], directory)
        else:
            self._check_layers(state["shape"], directory)
        if not args.finetune:
            contents.check_data(parts.config, parts.data, state, directory)
        position = previous.load(parts, directory, manifest, state, described(args), resumes)
        verify_loaded(parts, self._model, directory, manifest, resumes)
        if args.finetune or position.iteration == 0:
            return None
        args.iteration, args.consumed_train_samples = position.iteration, position.consumed_samples
        return position

    def _saved_data(self, directory: Path, manifest: Mapping | None) -> dict[str, Any]:
        """Returns the identity of the data in a checkpoint without training state, under its key in one."""
        if manifest is None or dense_files.DATA_FILE not in manifest["files"]:
            return {}
        return {DATA: run_on_rank0(lambda: read_data(directory), "cannot read a checkpoint")}

    def _check_layers(self, saved: Mapping, directory: Path) -> None:
        """Rejects other layers; the vocabulary may have another padding."""
        own_shape = self._model.described["shape"]
        own_layers, saved_layers = (
            {n: count for n, count in shape.items() if n.startswith("layers.")} for shape in (own_shape, saved)
        )
        if saved_layers:
            check_shape(own_layers, saved_layers, directory)

    def request(self, position: Position, staging: Path) -> AsyncRequest:
        args, parts, scheduled = get_args(), self._parts, []
        args.iteration, args.consumed_train_samples = position.iteration, position.consumed_samples
        for chunk in parts.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        writer.use_mortal_result_queue()
        digests = None
        if parts.config.snapshot.digest_interval:
            digests = digest_state(parts, self._model, not args.no_save_optim)
        in_background = args.ckpt_format == "torch_dist"  # Megatron-LM writes other formats synchronously
        settings: dict[str, Any] = dict(async_save=in_background, async_strategy="mcore")

        def save() -> None:
            training.save_checkpoint(
                position.iteration,
                *self._parts_of_megatron(self._saves_fragments),
                parts.scheduler,
                args.num_floating_point_operations_so_far,
                {},
                train_data_iterator=None,
                preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
            )

        with replaced(args, **settings), replaced(checkpointing, schedule_async_save=scheduled.append):
            with self._saving_to(staging, position.iteration):
                self.finalize_together(save, *_WRITES)
        if digests is not None:
            run_on_rank0(lambda: digests.write(staging), "cannot write a checkpoint")
        entries = None
        if not self._saves_fragments and parts.data is not None:
            data = json.dumps(parts.data.plain(), indent=1)
            run_on_rank0(lambda: write_durably(staging / dense_files.DATA_FILE, data), "cannot write a checkpoint")
        if self._saves_fragments:
            state = functools.partial(self._write_state, staging, position)
            run_on_rank0(state, "cannot write a checkpoint")
        if self._saves_fragments and not args.no_save_optim:
            entries = fragments.entries_of(parts.chunks, parts.optimizer)
        stock: Any = scheduled[0] if scheduled else AsyncRequest(None, (), [])
        write = functools.partial(writer.write_files, stock.async_fn, staging, self._world.rank, entries)
        end = functools.partial(self._end, staging, position.iteration, stock.finalize_fns)
        return stock._replace(async_fn=write, finalize_fns=[end])

    def _write_state(self, staging: Path, position: Position) -> None:
        parts, world = self._parts, self._world
        state = contents.training_state(
            parts.config, world, position, parts.optimizer, parts.scheduler, self._model.described, parts.data
        )
        if get_args().no_save_optim:
            state |= {"optimizer": None, "optimizer_package": None}
        write_durably(staging / dense_files.STATE_FILE, json.dumps(state, indent=1))

    def _end(self, staging: Path, iteration: int, finalizers: Sequence[Callable[[], None]]) -> None:
        """Runs Megatron-LM's finalizers once all workers have written."""
        reach("persisting")

        def finalize() -> None:
            for finalizer in finalizers:
                finalizer()

        with self._saving_to(staging, iteration):
            self.finalize_together(finalize, *_WRITES)

    def commit(self, root: Path, iteration: int) -> None:
        """See :class:`Saves`; reports the checkpoint to W&B, with its final paths."""
        super().commit(root, iteration)
        final = str(dense_files.checkpoint_path(root, iteration))
        if self._records:  # on the worker with the W&B writer; may include records of failed saves
            self._records.clear()
            utils: Any = checkpointing.wandb_utils
            _report_to_wandb(
                utils.on_save_checkpoint_success, final, str(root / dense_files.TRACKER_FILE), str(root), iteration
            )

    @contextlib.contextmanager
    def _saving_to(self, staging: Path, iteration: int) -> Iterator[None]:
        """Lets Megatron-LM save to a staging directory; publishing writes the tracker file and removes checkpoints."""
        stock: Any = checkpointing
        final, real = dense_files.checkpoint_path(get_args().save, iteration), stock.get_checkpoint_name

        def name(*words: Any, **options: Any) -> str:
            return str(staging / os.path.relpath(real(*words, **options), final))

        with (
            replaced(stock, get_checkpoint_name=name),
            replaced(stock, get_checkpoint_tracker_filename=lambda _: os.devnull),
            replaced(stock.wandb_utils, on_save_checkpoint_success=lambda *paths: self._records.append(paths)),
            replaced(get_args(), save_retain_interval=None),
        ):
            yield

    def _parts_of_megatron(self, fragmented: bool) -> tuple[list[Any], Any]:
        """Returns the chunks, and the optimizer unless its state is saved in fragments next to Megatron-LM's files."""
        chunks: list[Any] = self._parts.chunks
        return ([chunk.module for chunk in chunks], None) if fragmented else (chunks, self._parts.optimizer.core)

    def _verify(self, directory: Path) -> dict | None:
        """Compares the files of a checkpoint with its manifest, and returns it; Megatron-LM's checkpoints have none.

        Raises:
            CheckpointError: on all workers: a file is missing or damaged.
        """

        def read_existing() -> dict | None:  # Megatron-LM looks for other kinds, or reports that there is none
            return dense_files.read_manifest(directory) if directory.is_dir() else None

        manifest = run_on_rank0(read_existing, "cannot read a checkpoint")
        if manifest is not None:
            local_files = dict(sorted(manifest["files"].items())[self._parts.world.rank :: self._parts.world.size])
            if damage := first_reported(dense_files.find_damage(directory, local_files)):
                raise dense_files.damage_error(damage)
        return manifest


def _report_to_wandb(report: Callable[..., None], *words: object) -> None:
    """Lets a function of Megatron-LM report a checkpoint to W&B in the background, since the service may hang."""
    utils: Any = checkpointing.wandb_utils

    def run(wandb: Any) -> None:
        with replaced(utils, get_wandb_writer=lambda: wandb):
            report(*words)

    if isinstance(board := get_wandb_writer(), WandbWriter):
        board.submit(run)


def _refuse_other_padding(directory: Path, rows: int) -> None:
    """Refuses a checkpoint whose embedding has other rows: rows of padding are part of the softmax.

    Raises:
        CheckpointError: the number of rows differs.
    """
    with contextlib.suppress(FileNotFoundError):  # another format, whose reader compares shapes
        stored = read_metadata(directory).state_dict_metadata.get(_EMBEDDING)
        saved = stored.size[0] if stored is not None else rows
        if saved != rows:
            raise CheckpointError(
                f"{directory} has {saved} rows of the vocabulary, and this run has {rows}: rows of padding change the "
                "loss. Fix: pass --correct vocabulary-padding, which excludes them from the softmax, or "
                f"--padded-vocab-size {saved}",
                code="vocabulary-padding-differs",
            )
