"""Fault tolerance for torchtitan's Trainer (docs/how-to/own-loop.md).

    trainer = moc.torchtitan.FaultTolerantTrainer(ConfigManager().parse_args(), protection={"policy": "full"})
    trainer.train()

The trainer computes a step as torchtitan's does: only the update of the model and the order of events around it belong
to :mod:`moc.torch`.
"""

# pyright: reportMissingImports=false
# torchtitan is not among the packages of development.

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from moc.policy import full_policy_name, is_full_policy
from moc.private_interfaces import require
from moc.session.settings import SettingsError
from moc.torch.frameworks import Stepping, do_nothing
from moc.torch.loop import ProtectedRun, init, protect


class FaultTolerantTrainer(Trainer):
    """A ``Trainer`` that survives the loss of workers.

    It resumes from the snapshots of :func:`moc.torch.protect`.  torchtitan's checkpoints are saved as configured, and
    only ``initial_load_path`` is loaded, before the first step.

    Args:
        config: configuration of torchtitan.
        protection: arguments of :func:`moc.torch.protect`, such as policy, tier and directory.

    Attributes:
        run: the protected run; None before :meth:`train`.

    Raises:
        SettingsError: an option of torchtitan is not supported.
    """

    def __init__(self, config: Trainer.Config, protection: Mapping[str, Any] | None = None):
        require("torchtitan")
        _check(config, protection or {})
        if config.debug.seed is None:
            config.debug.seed = 0  # torchtitan would send a random one, which a replacement cannot receive
        self._job, self._protection = init(), dict(protection or {})
        self._progress, self._loss = _Progress(), 0.0
        self.run: ProtectedRun | None = None
        self._checkpoints = config.checkpoint
        # the constructor of torchtitan's checkpointer may communicate, so all workers create it together
        with _distributing_alone():
            super().__init__(dataclasses.replace(config, checkpoint=CheckpointManager.Config()))

    def init_distributed(self) -> ParallelDims:
        """Returns the dimensions of the job's groups, which :func:`moc.torch.init` has connected."""
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan does, for its stack of meshes
        return ParallelDims.from_config(self.config.parallelism, self._job.size)

    def train(self) -> None:
        """Trains until the configured step.

        Raises:
            SettingsError: a parameter is no DTensor although there are several workers, or torchtitan's checkpoints of
                another run would be overwritten.
        """
        run = self.run = self._protect()
        with self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder) as profiler:
            for batches in run:
                self.step, self.ntokens_seen = self._progress.step + 1, self._progress.ntokens_seen
                self._loss = 0.0
                self.gc_handler.run(self.step)
                try:
                    self.train_step(self.batch_generator(batches))
                except _Interrupted:
                    continue
                self._progress.step, self._progress.ntokens_seen = self.step, self.ntokens_seen
                self.checkpointer.save(self.step, last_step=self.step == run.iterations)
                if self.config.validator.enable and self.validator.should_validate(self.step):
                    self.validator.validate(self.model_parts, self.step)
                profiler.step()

    def _protect(self) -> ProtectedRun:
        (model,), (optimizer,), (scheduler,) = self.model_parts, self.optimizers, self.lr_schedulers.schedulers
        if self._job.size > 1:
            _check_partitioned(model)
        run = protect(
            model,
            optimizer,
            data=_Position(self.dataloader),
            scheduler=scheduler,
            iterations=self.config.training.steps,
            accumulate=self.gradient_accumulation_steps,
            grouped=True,
            state={"torchtitan": self._progress},
            seed=self.config.debug.seed,
            data_rank=self._data_rank,
            wrap=self._open_checkpoints if self._checkpoints.enable else None,
            **self._protection,
        )
        self.optimizers.optimizers = [Stepping(optimizer, self._commit)]  # after the container's hooks
        self.lr_schedulers.schedulers = [Stepping(scheduler, do_nothing)]
        return run

    def _open_checkpoints(self, model: nn.Module) -> nn.Module:
        """Creates torchtitan's checkpointer, and loads initial weights; all workers call it after each recovery."""
        assert self.run is not None  # it calls this method
        config, assets = self.config, self.config.hf_assets_path
        convert = config.model_spec.state_dict_adapter if config.model_spec is not None else None
        self.checkpointer.close()
        self.checkpointer = self._checkpoints.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None if convert is None else convert(self.model_config, assets),
            base_folder=config.dump_folder,
        )
        if not self.run.iteration:
            folder = Path(config.dump_folder, self._checkpoints.folder)
            if any(folder.glob("step-*")):
                raise SettingsError(
                    f"{folder} has checkpoints of another run, and there are no snapshots to continue from. Fix: set "
                    "another checkpoint.folder; to begin with their weights, set checkpoint.initial_load_path",
                    code="save-of-another-run",
                )
            self.checkpointer.load()
        return model

    @property
    def _data_rank(self) -> int:
        return self.parallel_dims.get_mesh("batch").get_local_rank() if self.parallel_dims.dp_enabled else 0

    def _forward_backward_body(self, *arguments: Any) -> Tensor:
        loss = super()._forward_backward_body(*arguments)
        self._loss = self._loss + loss.detach()
        return loss

    def _commit(self) -> None:
        """Updates the model on all workers, or on none; in place of the optimizer's ``step``.

        Raises:
            _Interrupted: a worker was lost.
        """
        assert self.run is not None  # set before the first step
        # the loss of a worker is divided by the tokens of all: their sum, and not their mean, is the loss of the batch
        shares = self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
        if not self.run.step(self._loss * shares * self.gradient_accumulation_steps):
            raise _Interrupted


@contextlib.contextmanager
def _distributing_alone() -> Iterator[None]:
    """Lets workers distribute values that all of them have, since a replacement cannot receive them."""
    defaults: Any = distribute_tensor.__kwdefaults__
    before, defaults["src_data_rank"] = defaults["src_data_rank"], None
    try:
        yield
    finally:
        defaults["src_data_rank"] = before


class _Interrupted(Exception):
    """A worker was lost during a step, which is repeated."""


class _Progress:
    """Step and tokens of the last committed update."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


class _Position:
    """A loader whose state contains no pickle; the state of torchtitan's loader does.

    Args:
        loader: torchtitan's loader.
    """

    def __init__(self, loader: BaseDataLoader):
        self._loader, self.num_workers = loader, getattr(loader, "num_workers", 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    @property
    def worker_init_fn(self) -> Callable | None:
        return getattr(self._loader, "worker_init_fn", None)

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable) -> None:
        loader: Any = self._loader
        loader.worker_init_fn = function

    def state_dict(self) -> Any:
        is_torchdata = isinstance(self._loader, StatefulDataLoader)
        return StatefulDataLoader.state_dict(self._loader) if is_torchdata else self._loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if isinstance(self._loader, StatefulDataLoader):
            StatefulDataLoader.load_state_dict(self._loader, state_dict)
        else:
            self._loader.load_state_dict(state_dict)


def _check(config: Trainer.Config, protection: Mapping[str, Any]) -> None:
    policy = protection.get("policy", full_policy_name())
    if policy is not None and not is_full_policy(policy):
        raise SettingsError(
            f"policy {policy} needs the tokens of each expert or repeats iterations, which moc.torchtitan cannot. Fix: "
            f"choose policy {full_policy_name()}",
            code="loop-policy-unsupported",
        )
    parallelism, checkpoint = config.parallelism, config.checkpoint
    optimizers = {group.optimizer_name for group in config.optimizer.param_groups}
    unsupported = {
        "parallelism.pipeline_parallel_degree": parallelism.pipeline_parallel_degree > 1,
        "comm.mode": config.comm.mode != "default",
        "several optimizers in optimizer.param_groups": len(optimizers) > 1,
        "optimizer.implementation=fused_opt_states_bf16": config.optimizer.implementation == "fused_opt_states_bf16",
        "checkpoint.create_seed_checkpoint": checkpoint.create_seed_checkpoint,
        "checkpoint.load_step": checkpoint.load_step != -1,
        "checkpoint.initial_load_path without initial_load_model_only": bool(checkpoint.initial_load_path)
        and not checkpoint.initial_load_model_only,
        "checkpoint.async_mode": getattr(checkpoint, "async_mode", "disabled") != "disabled",
        "CUDA graphs": not config.training.disable_cuda_graphs,
    }
    if option := next((name for name, is_used in unsupported.items() if is_used), None):
        remedy = "set training.disable_cuda_graphs" if option == "CUDA graphs" else "drop it from the configuration"
        raise SettingsError(
            f"a protected trainer of torchtitan does not support {option}. Fix: {remedy}", code="loop-call-unsupported"
        )


def _check_partitioned(model: nn.Module) -> None:
    """Refuses parameters whose gradients torchtitan adds itself, where the run would average them again."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise SettingsError(
                f"parameter {name} is no DTensor, so its gradients would be averaged twice. Fix: set "
                "parallelism.data_parallel_shard_degree=-1",
                code="loop-call-unsupported",
            )
