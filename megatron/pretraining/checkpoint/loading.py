"""``--load``: finds and verifies a checkpoint, and loads model and optimizer from it in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pretraining.checkpoint import contents, fragments
from megatron.pretraining.checkpoint.state import read_state
from megatron.pretraining.checkpoint.unpickling import check_metadata, nothing_runs
from megatron.pretraining.config import Config, global_batch_size
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import VotedOptimizer
from megatron.pretraining.engine.owned import set_step
from megatron.pretraining.model.parameters import unwrap
from moc.runtime.agreement import first_line, first_reported, run_on_rank0
from moc.runtime.world import World
from moc.state.record import Position
from moc.store import dense_files
from moc.store.errors import CheckpointError


class CheckpointLoader:
    """Loads this worker's model and optimizer; all methods are collective, and fail on all workers together."""

    def __init__(
        self,
        config: Config,
        world: World,
        chunks: list[DistributedDataParallel],
        modules: ModuleState,
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        say: Callable[[str], None],
    ):
        self._config, self._world, self._chunks, self._say = config, world, chunks, say
        self._modules, self._optimizer, self._scheduler = modules, optimizer, scheduler

    def find(self) -> Path | None:
        """The checkpoint that ``--load`` and ``--ckpt-step`` name, or None on a first start."""
        checkpoint = self._config.checkpoint
        if checkpoint.load is None:
            return None
        found = run_on_rank0(self._look, "cannot look for a checkpoint")
        if found is None:
            self._say(f"{checkpoint.load} holds no checkpoint: starting from random weights")
        return Path(found) if found else None

    def load(self, directory: Path) -> Position:
        """Loads model, optimizer and schedule; returns the position to resume from."""
        checkpoint = self._config.checkpoint
        self._say(f"loading checkpoint {directory}")
        manifest = self._verified_manifest(directory)
        state = read_state(directory, resumes=True) if manifest else None
        if state:
            contents.check_shape(self._config, state["shape"], directory)
        elif checkpoint.load_optim and not checkpoint.finetune:
            raise CheckpointError(
                f"{directory} holds no optimizer state of this program. Fix: pass --no-load-optim, or --finetune to "
                "start at iteration 0",
                code="optimizer-state-missing",
            )
        loaded = self._load_weights(directory)
        if checkpoint.finetune or not checkpoint.load_optim:
            self._optimizer.core.reload_model_params()
        else:
            assert manifest is not None and state is not None  # rejected above otherwise
            self._load_optimizer(directory, manifest, state)
        if checkpoint.finetune:
            return Position()
        if not state:
            iteration = int(loaded.get("iteration", 0))
            return Position(iteration, iteration * global_batch_size(self._config, self._world.size))
        if checkpoint.load_optim:
            contents.warn_of_other_package(self._optimizer, state, self._say)
        contents.warn_of_other_samples(self._config, self._world, state["sample_order"], self._say)
        return Position(state["iteration"], state["consumed_samples"], state["skipped_iterations"])

    def _look(self) -> str | None:
        checkpoint, root = self._config.checkpoint, self._config.checkpoint.load
        assert root is not None  # checked by find()
        if checkpoint.save and Path(root).is_dir():
            dense_files.restore_replaced(root)
        iteration = checkpoint.ckpt_step
        if iteration is None:
            iteration = dense_files.latest_iteration(root)
        if iteration is not None:
            return str(dense_files.directory_of(root, iteration))
        if checkpoint.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"{checkpoint.load} holds no checkpoint ({dense_files.TRACKER} is missing). Fix: check --load, or "
                "drop --exit-on-missing-checkpoint to start from random weights",
                code="checkpoint-missing",
            )
        return None

    def _verified_manifest(self, directory: Path) -> dict | None:
        manifest = run_on_rank0(lambda: dense_files.read_manifest(directory), "cannot read a checkpoint")
        if manifest is None:
            if not self._config.checkpoint.trust:
                raise CheckpointError(
                    f"{directory} has no {dense_files.MANIFEST}, so another program wrote it, and it cannot be "
                    "verified. Fix: pass --trust if you know where it is from",
                    code="manifest-missing",
                )
            self._say(f"{directory} has no {dense_files.MANIFEST} (another program wrote it): it is not verified")
            return None
        mine = dict(sorted(manifest["files"].items())[self._world.rank :: self._world.size])
        if damage := first_reported(dense_files.damage_in(directory, mine)):
            raise dense_files.damaged(damage)
        return manifest if manifest["format"] == dense_files.FORMAT else None

    def _load_weights(self, directory: Path) -> dict:
        register_safe_globals()  # the non-tensor types in stock Megatron-LM's common.pt
        keys = run_on_rank0(lambda: check_metadata(directory), "cannot read a checkpoint")
        described = contents.described_weights(self._chunks)
        contents.name_as_stored(described, frozenset(keys))
        try:
            with nothing_runs():
                loaded: Any = dist_checkpointing.load(described, str(directory))
        except (CheckpointingException, CheckpointException, KeyError, RuntimeError, OSError, ValueError) as error:
            raise CheckpointError(
                f"the weights in {directory} do not fit this model: {first_line(error)}. Fix: pass the flags of the "
                "model that was saved, or load another checkpoint",
                code="checkpoint-of-another-model",
            ) from error
        for i, chunk in enumerate(self._chunks):
            unwrap(chunk).load_state_dict(loaded["model" if len(self._chunks) == 1 else f"model{i}"], strict=False)
        self._modules.take_over()
        return loaded

    def _load_optimizer(self, directory: Path, manifest: dict, state: dict) -> None:
        contents.check_optimizer(self._config, state, directory)
        paths = [directory / name for name in manifest["files"] if name.startswith(fragments.DIRECTORY)]
        if missing := first_reported(fragments.fill(directory, paths, self._chunks, self._optimizer)):
            raise CheckpointError(missing)
        set_step(self._optimizer.core, state["optimizer_step"])
        contents.restore_grad_scaler(self._optimizer, state["grad_scaler"])
        contents.restore_scheduler(self._scheduler, state["scheduler"], directory)
