"""``--save`` and ``--load``: dense checkpoints that any layout loads and stock Megatron-LM reads.

A checkpoint is a directory ``iter_0000100`` with

* the weights in megatron-core's ``torch_dist`` format, as Megatron-LM writes them;
* ``optimizer/*.safetensors``: master weights and moments as boxes of the unpartitioned tensors (:mod:`moc.store`),
  since megatron-core's own optimizer checkpoints lose Adam's step without Transformer Engine and refuse to change
  the expert-parallel size;
* ``training_state.json``: position, learning-rate schedule, loss scale, and the shape of the model;
* ``manifest.json``: every file with its hash, written last.

No random state is saved: it follows from the iteration.  Nothing is unpickled but what megatron-core's reader of
``torch_dist`` unpickles, after its hash was verified.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training import checkpoint_files as files
from megatron.training import checkpoint_writer as writer
from megatron.training.checkpoint_files import CheckpointError
from megatron.training.config import Config, global_batch_size, train_iterations
from megatron.training.initialize import World
from megatron.training.optimizer import VotedOptimizer
from moc.state.fragments import Fragment, optimizer_fragments
from moc.state.optimizer import get_step, members, set_step
from moc.state.parameters import unwrap
from moc.state.region import Region
from moc.store.regions import MissingRegionError, RegionReader, RegionTensor

STATE = "training_state.json"
_SHAPE = {  # what must be the same for weights to fit, by flag group
    "network": ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
                "kv_channels", "position_embedding_type", "normalization", "swiglu", "add_bias_linear",
                "untie_embeddings_and_output_weights", "qk_layernorm"),
    "moe": ("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
}  # fmt: skip


@dataclass(frozen=True)
class Position:
    """How far a run has come; iterations and samples completed, and of these iterations those skipped."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0


class Checkpoints:
    """Saves and loads the state of this worker's model and optimizer; all methods are collective.

    Args:
        config: the flags in force.
        world: this worker's place.
        chunks: the model.
        optimizer: its optimizer.
        scheduler: its learning-rate schedule.
        say: prints a line on the first worker.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        chunks: list[DistributedDataParallel],
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        say: Callable[[str], None],
    ):
        self._config, self._world, self._chunks, self._say = config, world, chunks, say
        self._optimizer, self._scheduler = optimizer, scheduler
        self._queue = AsyncCallsQueue()
        self.last_saved: int | None = None

    # ---------------------------------------------------------------- saving

    def save(self, position: Position) -> None:
        """Saves, or with ``--async-save`` starts to; an earlier save still under way is waited for.

        Raises:
            CheckpointError: on all workers, if any cannot write; earlier checkpoints are untouched.
        """
        self.finish()
        root, iteration = Path(self._config.checkpoint.save), position.iteration
        self._on_first(lambda: files.start(root, iteration), "cannot start a checkpoint")
        staging = files.staging_of(root, iteration)
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        request = dist_checkpointing.save(
            self._weights(position), str(staging), self._strategy(), async_sharded_save=True
        )
        if self._world.rank == 0:
            files.write_durably(staging / STATE, json.dumps(self._training_state(position), indent=1))
        entries = self._optimizer_entries() if self._config.checkpoint.save_optim else None
        self._queue.schedule_async_request(
            request._replace(
                async_fn=functools.partial(writer.write_files, request.async_fn, staging, self._world.rank, entries),
                finalize_fns=[*request.finalize_fns, lambda: self._publish(root, iteration)],
            )
        )
        self.last_saved = iteration
        if not self._config.checkpoint.async_save:
            self.finish()

    def poll(self) -> None:
        """Publishes a checkpoint that all workers have finished writing; returns at once otherwise."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Waits for a save under way, and publishes it."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        try:
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        except CheckpointingException as error:
            raise CheckpointError(
                f"the checkpoint in {self._config.checkpoint.save} could not be written; earlier ones are untouched: "
                f"make room or repair the disk, and start again ({_first_line(error)})"
            ) from error

    def _publish(self, root: Path, iteration: int) -> None:
        self._on_first(
            lambda: writer.publish(root, iteration, self._world.size, self._config.checkpoint.save_retain_interval),
            "cannot complete a checkpoint",
        )
        self._say(f"saved checkpoint at iteration {iteration} to {root}")

    def _strategy(self):
        writer.use_mortal_result_queue()
        strategy = get_default_save_sharded_strategy("torch_dist", 1)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return FullyParallelSaveStrategyWrapper(strategy, group)

    def _weights(self, position: Position | None) -> dict:
        models = [unwrap(chunk).sharded_state_dict() for chunk in self._chunks]
        described = {"model": models[0]} if len(models) == 1 else {f"model{i}": m for i, m in enumerate(models)}
        if position is None:
            return described
        return described | {"checkpoint_version": 3.0, "iteration": position.iteration}

    def _optimizer_entries(self) -> list[RegionTensor]:
        """This rank's share of the optimizer state, on the host: forked writers cannot read the device."""
        return [
            RegionTensor(f.name, f.slot, f.global_shape, f.region, f.view.cpu())
            for f in optimizer_fragments(self._chunks, self._optimizer.core)
            if f.first_copy
        ]

    def _training_state(self, position: Position) -> dict:
        scalers = [m.grad_scaler for m in members(self._optimizer.core) if getattr(m, "grad_scaler", None)]
        return {
            **asdict(position),
            "optimizer_step": get_step(self._optimizer.core),
            "scheduler": self._scheduler.state_dict(),
            "grad_scaler": _plain(scalers[0].state_dict()) if scalers else None,
            "shape": self._shape(),
            "sample_order": self._sample_order(),
            "optimizer": self._config.regularization.optimizer if self._config.checkpoint.save_optim else None,
        }

    def _shape(self) -> dict:
        groups = {group: getattr(self._config, group) for group in _SHAPE}
        values = {name: getattr(groups[group], name) for group, names in _SHAPE.items() for name in names}
        return json.loads(json.dumps(values))

    def _sample_order(self) -> dict:
        """What the order of samples depends on; megatron-core shuffles all epochs of a run together."""
        data, batch = self._config.data, global_batch_size(self._config, self._world.size)
        order = {
            "seed": self._config.rng.seed,
            "train_samples": train_iterations(self._config, self._world.size) * batch,
            "seq_length": data.seq_length,
            "split": data.split,
        }
        return order | {name: list(getattr(data, name) or ()) for name in ("data_path", "train_data_path")}

    # --------------------------------------------------------------- loading

    def load(self) -> Position | None:
        """Loads what ``--load`` and ``--ckpt-step`` name.

        Returns:
            Where to go on, or None if ``--load`` holds no checkpoint yet (a first start).

        Raises:
            CheckpointError: on all workers alike: nothing to load although ``--exit-on-missing-checkpoint`` or
                ``--ckpt-step`` asks for it, a file missing or damaged, another model, state missing.
        """
        directory = self._find()
        if directory is None:
            return None
        self._say(f"loading checkpoint {directory}")
        manifest = self._verified_manifest(directory)
        state = json.loads((directory / STATE).read_text()) if manifest else {}
        if manifest:
            self._check_shape(state["shape"], directory)
        foreign = self._load_weights(directory)
        if self._config.checkpoint.finetune:
            self._optimizer.core.reload_model_params()
            return Position()
        if manifest and self._config.checkpoint.load_optim:
            self._load_optimizer(directory, manifest, state)
        elif self._config.checkpoint.load_optim:
            raise CheckpointError(
                f"{directory} holds no optimizer state of ours: pass --no-load-optim, or --finetune to start anew"
            )
        else:
            self._optimizer.core.reload_model_params()
        self._warn_of_other_samples(state.get("sample_order", {}))
        position = self._position(state, foreign)
        self.last_saved = position.iteration if self._saves_where_it_loads() else None
        return position

    def _find(self) -> Path | None:
        checkpoint = self._config.checkpoint
        if checkpoint.load is None:
            return None

        def find() -> str | None:
            if Path(checkpoint.load).is_dir() and self._saves_where_it_loads():
                files.restore_replaced(checkpoint.load)
            iteration = (
                checkpoint.ckpt_step if checkpoint.ckpt_step is not None else files.latest_iteration(checkpoint.load)
            )
            if iteration is not None:
                return str(files.directory_of(checkpoint.load, iteration))
            if checkpoint.exit_on_missing_checkpoint:
                raise CheckpointError(
                    f"{checkpoint.load} holds no checkpoint ({files.TRACKER} is missing): check --load, "
                    "or drop --exit-on-missing-checkpoint to start from random weights"
                )
            return None

        found = self._on_first(find, "cannot look for a checkpoint")
        if found is None:
            self._say(f"{checkpoint.load} holds no checkpoint: starting from random weights")
        return Path(found) if found else None

    def _saves_where_it_loads(self) -> bool:
        checkpoint = self._config.checkpoint
        return bool(checkpoint.save) and Path(checkpoint.save).resolve() == Path(checkpoint.load).resolve()

    def _verified_manifest(self, directory: Path) -> dict | None:
        manifest = self._on_first(lambda: files.read_manifest(directory), "cannot read a checkpoint")
        if manifest is None:
            self._say(f"{directory} has no {files.MANIFEST} (another program wrote it): it is not verified")
            return None
        mine = dict(sorted(manifest["files"].items())[self._world.rank :: self._world.size])
        damages = _gather(files.damage_in(directory, mine))
        if any(damages):
            raise files.damaged(next(filter(None, damages)))
        return manifest

    def _check_shape(self, saved: dict, directory: Path) -> None:
        for name, value in self._shape().items():
            if saved.get(name) != value:
                flag = "--" + name.replace("_", "-")
                raise CheckpointError(
                    f"{directory} holds another model: {flag} is {saved.get(name)} there and {value} here"
                )

    def _warn_of_other_samples(self, saved: dict) -> None:
        for name, value in self._sample_order().items():
            if name in saved and saved[name] != value:
                self._say(
                    f"WARNING: {name.replace('_', ' ')} was {saved[name]} and is {value}: from here on samples come in "
                    "another order, and some may come twice or never"
                )

    def _load_weights(self, directory: Path) -> dict:
        try:
            loaded = dist_checkpointing.load(self._weights(None), str(directory))
        except (CheckpointingException, KeyError, RuntimeError, OSError) as error:
            raise CheckpointError(f"the weights in {directory} do not fit this model: {_first_line(error)}") from error
        for i, chunk in enumerate(self._chunks):
            unwrap(chunk).load_state_dict(loaded["model" if len(self._chunks) == 1 else f"model{i}"], strict=True)
        return loaded

    def _load_optimizer(self, directory: Path, manifest: dict, state: dict) -> None:
        optimizer = self._config.regularization.optimizer
        if state["optimizer"] != optimizer:
            raise CheckpointError(
                f"{directory} holds state of optimizer {state['optimizer']}, not of {optimizer}: "
                "change --optimizer, or pass --no-load-optim"
            )
        paths = [directory / name for name in manifest["files"] if name.startswith(writer.OPTIMIZER)]
        error = None
        try:
            reader = RegionReader(paths)
            for fragment in optimizer_fragments(self._chunks, self._optimizer.core):
                _fill(fragment, reader)
        except MissingRegionError as missing:
            error = str(missing)
        if any(errors := _gather(error)):
            raise CheckpointError(f"{directory} is incomplete: {next(filter(None, errors))}")
        set_step(self._optimizer.core, state["optimizer_step"])
        for member in members(self._optimizer.core):
            if getattr(member, "grad_scaler", None) and state["grad_scaler"]:
                scaler = {**state["grad_scaler"], "scale": torch.tensor(state["grad_scaler"]["scale"])}
                member.grad_scaler.load_state_dict(scaler)
        try:
            self._scheduler.load_state_dict(state["scheduler"])
        except AssertionError as mismatch:
            raise CheckpointError(
                f"the learning-rate schedule differs from the one in {directory} ({_first_line(mismatch)}): pass "
                "--use-checkpoint-opt-param-scheduler to keep the old one, --override-opt-param-scheduler for the new"
            ) from None

    def _position(self, state: dict, foreign: dict) -> Position:
        if not state:
            return Position(iteration=int(foreign.get("iteration", 0)))
        return Position(state["iteration"], state["consumed_samples"], state["skipped_iterations"])

    def _on_first(self, action: Callable, what: str):
        """Runs on the first worker; all get its result or its error."""
        outcome = [None, None]
        if self._world.rank == 0:
            try:
                outcome = [action(), None]
            except CheckpointError as error:
                outcome = [None, str(error)]
            except OSError as error:
                outcome = [None, f"{what}: {error}; check the path, its permissions and free space"]
            if isinstance(outcome[0], Path):
                outcome[0] = None
        dist.broadcast_object_list(outcome, src=0)
        result, error = outcome
        if error:
            raise CheckpointError(error)
        return result


def _fill(fragment: Fragment, reader: RegionReader) -> None:
    region, view = fragment.region, fragment.view
    if fragment.padded:
        whole = Region((0,) * len(fragment.global_shape), reader.global_shape(fragment.name, fragment.slot))
        common = region.intersect(whole)
        if common != region:  # vocabulary rows that only this layout pads with
            view.zero_()
            if common is None:
                return
            part = torch.empty(common.shape, dtype=view.dtype, device=view.device)
            reader.read(fragment.name, fragment.slot, common, into=part)
            view.view(region.shape)[common.slices(region.offset)] = part
            return
    elif (saved := reader.global_shape(fragment.name, fragment.slot)) != fragment.global_shape:
        raise MissingRegionError(f"{fragment.name} has shape {saved} there and {fragment.global_shape} here")
    reader.read(fragment.name, fragment.slot, region, into=view)


def _gather(value) -> list:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _plain(state: dict) -> dict:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
