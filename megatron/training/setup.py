"""Builds all parts of a worker, and leaves them where the last run stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.timers import Timers

from megatron.training.auxiliary import AuxiliaryLosses
from megatron.training.checkpoint_contents import Position
from megatron.training.checkpointing import Checkpoints
from megatron.training.config import Config, ConfigError, global_batch_size, num_microbatches, train_iterations
from megatron.training.data import Batch, BatchStream, Datasets
from megatron.training.initialize import World
from megatron.training.logging import Log
from megatron.training.model import ModelProvider, build_model
from megatron.training.optimizer import build_optimizer, build_scheduler
from megatron.training.phases import Phases
from megatron.training.schedule import ForwardStep, Schedule
from megatron.training.snapshot_setup import begin
from megatron.training.snapshots import NoSnapshots, Snapshots
from megatron.training.step import Stepper, sum_over_workers
from megatron.training.stopping import StopRequests
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size


@dataclass(frozen=True)
class Providers:
    """What a program hands to :func:`megatron.training.loop.pretrain`.

    Attributes:
        model: ``(config, core config, vocabulary size, virtual stage or None) -> bare model chunk``.
        datasets: ``(config, tokenizer, samples of train, valid and test) -> Datasets``.
        forward_step: ``(micro batches, model chunk) -> (output, loss function)``; see :class:`Schedule`.
    """

    model: ModelProvider
    datasets: Callable[..., Datasets]
    forward_step: ForwardStep


@dataclass
class Run:
    """A worker's parts, and how far it has come.

    Attributes:
        streams: readers of ``train``, ``valid`` and ``test``; None on stages that read no data.
        splits: the splits that have data, the same on all workers.
        train_iters: iterations of the whole run.
        vocab_size: rows of the embedding.
        position: iterations and samples completed.
    """

    config: Config
    world: World
    stepper: Stepper
    checkpoints: Checkpoints
    snapshots: Snapshots | NoSnapshots
    log: Log
    streams: dict[str, BatchStream | None]
    splits: set[str]
    train_iters: int
    vocab_size: int
    position: Position

    def batches(self, split: str, first_sample: int) -> Iterator[Batch] | None:
        """This worker's micro batches of a split from a position on; None on stages that read no data."""
        stream = self.streams[split]
        return stream.iteration(first_sample) if stream is not None else None


def set_up(config: Config, world: World, providers: Providers, stop: StopRequests, phases: Phases) -> Run:
    """Builds model, optimizer, data and logs, and loads the checkpoint; a collective call.

    Raises:
        ConfigError, TokenizerError, CheckpointError: something that the flags name cannot be used.
        StopRequested: a worker was asked to stop.
    """
    micro_batches, batch = num_microbatches(config, world.size), global_batch_size(config, world.size)
    train_iters = train_iterations(config, world.size)
    timers = Timers(config.logging.timing_log_level, config.logging.timing_log_option)
    tokenizer = build_tokenizer(
        config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model, config.tokenizer.vocab_size
    )
    vocab_size = padded_vocab_size(tokenizer.vocab_size, config.network.make_vocab_size_divisible_by, world.tensor_size)
    log = Log(config, world, vocab_size, train_iters, timers)
    stop.check_set_up(world)
    phases.done("tokenizer")

    chunks = build_model(config, vocab_size, providers.model)
    optimizer = build_optimizer(config, chunks)
    scheduler = build_scheduler(config, optimizer, train_iters * batch, batch)
    chunks[0].config.timers = optimizer.core.config.timers = timers if config.logging.timing_log_level else None
    stop.check_set_up(world)
    phases.done("model")

    checkpoints = Checkpoints(config, world, chunks, optimizer, scheduler, log.message)
    position, snapshots = begin(config, world, chunks, optimizer, scheduler, vocab_size, checkpoints, log)
    stop.check_set_up(world)
    phases.done("load")

    sizes = config.training.micro_batch_size, config.data.seq_length
    stepper = Stepper(
        world=world,
        chunks=chunks,
        schedule=Schedule(providers.forward_step, chunks, micro_batches, *sizes),
        optimizer=optimizer,
        scheduler=scheduler,
        auxiliary=AuxiliaryLosses(config, world, micro_batches),
        seed=config.rng.seed,
        global_batch_size=batch,
        params_norm=config.logging.log_params_norm,
        count_zeros=config.logging.log_num_zeros_in_grad,
        refuse_non_finite=config.training.check_for_nan_in_loss_and_grad,
        rider=snapshots,
    )
    datasets = providers.datasets(config, tokenizer, samples_wanted(config, train_iters, batch))
    streams = _streams(config, world, datasets, micro_batches)
    readers = sum_over_workers({split: float(s is not None) for split, s in streams.items()}, world)
    splits = {split for split, count in readers.items() if count}
    if "train" not in splits:
        raise ConfigError("the data leave nothing to train on: make the first number of --split greater than 0.")
    stop.check_set_up(world)
    phases.done("data")
    log.events.write(
        "start",
        iteration=position.iteration,
        world_size=world.size,
        parameters=count_parameters(chunks),
        startup_s=phases.seconds,
    )
    return Run(config, world, stepper, checkpoints, snapshots, log, streams, splits, train_iters, vocab_size, position)


def samples_wanted(config: Config, train_iters: int, batch: int) -> tuple[int, int, int]:
    """Samples of the three splits that a whole run reads."""
    eval_iters, eval_interval = config.validation.eval_iters, config.validation.eval_interval
    evaluations = train_iters // eval_interval + 1 if eval_interval else 1
    return train_iters * batch, evaluations * eval_iters * batch, eval_iters * batch


def count_parameters(chunks) -> int:
    """Parameters that this worker holds."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())


def _streams(config: Config, world: World, datasets: Datasets, micro_batches: int) -> dict[str, BatchStream | None]:
    def stream(dataset, **options):
        if dataset is None:
            return None
        return BatchStream(dataset, config.training.micro_batch_size, micro_batches, world, **options)

    return {
        "train": stream(datasets.train, num_workers=config.data.num_workers),
        "valid": stream(datasets.valid, wrap=True),
        "test": stream(datasets.test, wrap=True),
    }
