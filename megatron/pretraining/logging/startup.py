"""Describes a run on the console before its first iteration, in addition to its options and earlier messages."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise

import torch
from torch.cuda import nccl

from megatron.pretraining.config import Config
from moc.cli_output import counted, human
from moc.policy import Policy, recovers_exactly
from moc.runtime.collectives import gather
from moc.runtime.environment import OUTPUT_DIRECTORY
from moc.runtime.job import World
from moc.state.operators import Operator


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the training data, from the sizes of their files.

    Attributes:
        documents: documents of the training split.
        tokens: tokens of the files, times the split's share of their documents.
    """

    documents: int
    tokens: int


@dataclass(frozen=True)
class WorkerFacts:
    """Contribution of one worker to the description.

    Attributes:
        node: name of its machine.
        device: name of its device; empty on a CPU.
        allocated_bytes: device memory in use before the first iteration.
        device_bytes: memory of the device.
        stage: its pipeline stage.
        parameters: parameters that it holds.
    """

    node: str
    device: str
    allocated_bytes: int
    device_bytes: int
    stage: int
    parameters: int


def facts_of_worker(world: World, parameters: int) -> WorkerFacts:
    """Returns the facts of this worker, which holds ``parameters`` parameters."""
    node, device = platform.node(), world.device
    if device.type != "cuda":
        return WorkerFacts(node, "", 0, 0, world.pipeline_rank, parameters)
    properties = torch.cuda.get_device_properties(device)
    used = torch.cuda.memory_allocated(device)
    return WorkerFacts(node, properties.name, used, properties.total_memory, world.pipeline_rank, parameters)


def gather_facts(world: World, parameters: int) -> list[WorkerFacts]:
    """Returns the facts of all workers, by rank; a collective call."""
    return gather(facts_of_worker(world, parameters))


def versions() -> str:
    """Returns the releases that determine a result."""
    packages = {name: version(name) for name in ("moc-megatron", "torch", "megatron-core")}
    entries = [*(f"{name} {number}" for name, number in packages.items()), f"Python {platform.python_version()}"]
    if torch.cuda.is_available():
        entries += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, nccl.version()))}"]
    return ", ".join(entries)


def describe_devices(workers: Sequence[WorkerFacts]) -> str:
    """Returns the devices of all workers and their memory."""
    nodes = counted(len({worker.node for worker in workers}), "machine")
    names = sorted({worker.device for worker in workers})
    if names == [""]:
        return f"{counted(len(workers), 'CPU worker')} on {nodes}"
    used = max(worker.allocated_bytes for worker in workers)
    least = min(worker.device_bytes for worker in workers)
    return f"{len(workers)} x {', '.join(names)} on {nodes}; at most {human(used)} of {human(least)} are allocated"


def describe_layout(config: Config, world: World) -> str:
    """Returns the sizes of all parallel dimensions."""
    parallel = config.parallel
    sizes = {
        "TP": world.tensor_size,
        "CP": parallel.context_parallel_size,
        "PP": world.pipeline_size,
        "DP": world.data_size,
        "EP": parallel.expert_model_parallel_size,
        "expert TP": parallel.expert_tensor_parallel_size,
    }
    return f"{counted(world.size, 'worker')}: " + ", ".join(f"{name} {size or 1}" for name, size in sizes.items())


def stage_lines(workers: Sequence[WorkerFacts], stage_of_layer: Sequence[int]) -> list[str]:
    """Returns a line for each pipeline stage: workers, layers, and parameters of one worker."""
    lines = []
    for stage in sorted({worker.stage for worker in workers}):
        ranks = [rank for rank, worker in enumerate(workers) if worker.stage == stage]
        layers = [layer + 1 for layer, layer_stage in enumerate(stage_of_layer) if layer_stage == stage]
        max_parameters = max(workers[rank].parameters for rank in ranks)
        lines.append(f"workers {ranges(ranks)}; layers {ranges(layers)}; up to {max_parameters:,} parameters each")
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with runs as ranges: ``0-3, 6``; ``none`` without numbers."""
    starts = [index for index, (number, following) in enumerate(pairwise(numbers), 1) if following != number + 1]
    runs = [(numbers[begin], numbers[end - 1]) for begin, end in pairwise([0, *starts, len(numbers)]) if begin < end]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"


def describe_parameters(operators: Sequence[Operator], experts_per_token: int) -> str:
    """Returns the number of parameters of the model, and the number that a token uses."""
    total = sum(operator.parameters for operator in operators)
    layers: dict[int | None, list[int]] = {}
    for operator in operators:
        if operator.kind == "expert":
            layers.setdefault(operator.layer, []).append(operator.parameters)
    idle = sum(sum(sizes) * (1 - min(experts_per_token, len(sizes)) / len(sizes)) for sizes in layers.values())
    return f"{total:,} in total, {round(total - idle):,} active for each token"


def describe_data(data: DataSizes | None, samples: int, seq_length: int) -> str:
    """Returns the sizes of the data, and the epochs of a run that reads ``samples`` samples."""
    tokens = samples * seq_length
    if data is None or not data.tokens:
        return f"the run reads {tokens:,} tokens"
    epochs = tokens / data.tokens
    return f"{data.documents:,} documents, {data.tokens:,} tokens; the run reads {tokens:,} ({epochs:.3g} epochs)"


def describe_policy(policy: Policy | None, tier: str, save_interval: int | None, iteration_s: float | None) -> str:
    """Returns the policy with the expected cost of a failure.

    Args:
        policy: of the snapshots; None without them.
        tier: first tier of the snapshots.
        save_interval: iterations between checkpoints of ``--save``, which a run without snapshots resumes from.
        iteration_s: seconds of an iteration; None if they are not known yet.
    """
    cost = expected_failure_cost(policy, save_interval)
    if cost is None:
        return "none, and no checkpoints: a lost worker costs all iterations"
    saves = "none; checkpoints" if policy is None else f"{policy.name}, {tier},"
    return f"{saves} {counted(cost.interval, 'iteration')} apart; {cost.described(iteration_s)}"


@dataclass(frozen=True)
class FailureCost:
    """Work that a lost worker causes, besides the seconds to detect the loss and to connect the workers again.

    Attributes:
        interval: iterations between the states that a run can resume from.
        replays: iterations of a window that are replayed in addition, at most in the time of an iteration each.
        restarts: all workers are started again, since no snapshots are saved.
        is_exact: the recovery loses no tokens of experts.
    """

    interval: int
    replays: int
    restarts: bool
    is_exact: bool

    def described(self, iteration_s: float | None) -> str:
        """Returns the expected and the largest cost in iterations, and in seconds if an iteration's are known."""
        expected, max_iterations = self.interval / 2 + self.replays, self.interval + self.replays
        seconds = "" if iteration_s is None else f" = {expected * iteration_s:.3g} s"
        limit = "" if iteration_s is None else f" = {max_iterations * iteration_s:.3g} s"
        window = f", including the replay of {self.replays} in a window" if self.replays else ""
        extra_costs = [*["a restart"] * self.restarts, *["tokens of experts"] * (not self.is_exact)]
        return (
            f"expected cost of a lost worker: {expected:g} iterations{seconds} of repeated work, at most "
            f"{max_iterations}{limit}{window}{''.join(f', and {extra_cost}' for extra_cost in extra_costs)}"
        )


def expected_failure_cost(policy: Policy | None, save_interval: int | None) -> FailureCost | None:
    """Returns the cost of a lost worker, as for :func:`describe_policy`; None if nothing is saved."""
    if policy is not None:
        schedule = policy.schedule
        return FailureCost(schedule.snapshot_interval, schedule.window_length - 1, False, recovers_exactly(policy))
    return None if save_interval is None else FailureCost(save_interval, 0, True, True)


def describe_logs(config: Config) -> str:
    """Returns the places of all logs."""
    logging = config.logging
    locations = {
        "events": logging.log_dir,
        "TensorBoard": logging.tensorboard_dir,
        "MLflow": logging.mlflow_experiment,
        "workers": os.environ.get(OUTPUT_DIRECTORY),
    }
    described = ", ".join(f"{name} {location}" for name, location in locations.items() if location)
    return described or "none (--log-dir names a directory)"


def summary_lines(parts: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Returns aligned lines of a description by title; further lines of a part have no title."""
    rows = [
        (title if number == 0 else "", line)
        for title, lines in parts.items()
        for number, line in enumerate([lines] if isinstance(lines, str) else lines)
    ]
    width = max(len(title) for title, _ in rows)
    return [f"  {title.ljust(width)}  {line}" for title, line in rows]
