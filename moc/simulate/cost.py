"""Describes a cluster and the duration of an iteration on it (MoEvement, Appendix C)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.sharding import ParallelLayout
from moc.simulate import SimulationError
from moc.state.operators import Operator


@dataclass(frozen=True)
class Cluster:
    """Cluster of machines of one kind.  Bandwidths are in bytes per second, times in seconds.

    Attributes:
        gpus_per_node: GPUs that fail together and share a network card.
        flops: peak of one GPU in 16-bit arithmetic, operations per second.
        utilisation: share of the peak that a stage reaches while it computes, without pipeline bubbles.
        memory_bandwidth: of a GPU's own memory, which bounds the optimizer's update.
        intra_bandwidth: from a GPU to others in its node.
        inter_bandwidth: from a node to other nodes.
        latency_s: alpha, latency of one message or one step of a collective.
        host_bandwidth: from one GPU to host memory during computation, with pinned copies.
        storage_bandwidth: from all nodes of the job to storage.
        detect_s: from a fault until all workers have stopped and groups can be rebuilt.
        restart_s: additional time of a global rollback until replay starts: processes, groups, loading.
        replay_slowdown: duration of a replayed iteration relative to an ordinary one, in a global rollback.
    """

    name: str
    gpus: int
    gpus_per_node: int
    flops: float
    utilisation: float
    memory_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float
    host_bandwidth: float
    storage_bandwidth: float
    latency_s: float = 2e-5
    detect_s: float = 5.0
    restart_s: float = 155.0
    replay_slowdown: float = 1.0

    def __post_init__(self):
        for name, value in vars(self).items():
            may_be_zero = name in ("latency_s", "detect_s", "restart_s")
            if name != "name" and not (value >= 0 if may_be_zero else value > 0):
                raise SimulationError(
                    f"the cluster's {name} cannot be {value}. Fix: give a number above 0",
                    code="value-out-of-range",
                )

    @property
    def nodes(self) -> int:
        """Nodes of the job; the last may have fewer GPUs."""
        return -(-self.gpus // self.gpus_per_node)


# MoEvement (NSDI '26), section 5.1: NC96ads_A100_v4, 600 GB/s NVLink, 80 Gbps between nodes, 40 Gbps to Blob Storage.
# Pinned copies reach 25 of the 32 GB/s of PCIe 4 x16.  No data sheet gives the utilisation or restart_s (here the time
# of the paper's recoveries): measure yours.
_A100 = Cluster(
    name="a100-80gb",
    gpus=96,
    gpus_per_node=8,
    flops=312e12,
    utilisation=0.4,
    memory_bandwidth=2.0e12,
    intra_bandwidth=300e9,
    inter_bandwidth=10e9,
    host_bandwidth=25e9,
    storage_bandwidth=5e9,
)

# The same paper, section 5.7: 900 GB/s NVLink, 200 Gbps InfiniBand; 50 of the 64 GB/s of PCIe 5 x16.
_H100 = Cluster(
    name="h100-80gb",
    gpus=128,
    gpus_per_node=8,
    flops=989e12,
    utilisation=0.4,
    memory_bandwidth=3.35e12,
    intra_bandwidth=450e9,
    inter_bandwidth=25e9,
    host_bandwidth=50e9,
    storage_bandwidth=5e9,
)

# MoC-System (ASPLOS '25), section 6.2.4, simulates both at 20 % of their peak; 1 and 2 GB/s to host memory.
_A800_MOC = dataclasses.replace(
    _A100, name="a800-moc", gpus=256, utilisation=0.2, intra_bandwidth=200e9, inter_bandwidth=100e9, host_bandwidth=1e9
)
_H100_MOC = dataclasses.replace(
    _H100, name="h100-moc", gpus=256, utilisation=0.2, inter_bandwidth=200e9, host_bandwidth=2e9
)

# Not hardware: fitted to reproduce the figures of MoEvement's tables (docs/results/papers.md, "What is calibrated").
_A100_FITTED = dataclasses.replace(
    _A100, name="a100-moevement-fitted", utilisation=0.56, host_bandwidth=0.24e9, restart_s=155.0
)
_H100_FITTED = dataclasses.replace(
    _H100, name="h100-moevement-fitted", utilisation=0.15, host_bandwidth=0.166e9, restart_s=0.0, replay_slowdown=1.45
)

FITTED: Mapping[str, Cluster] = {c.name: c for c in (_A100_FITTED, _H100_FITTED)}
"""Clusters fitted to a paper's figures, by name; they predict nothing of a real cluster."""

CLUSTERS: Mapping[str, Cluster] = {c.name: c for c in (_A100, _H100, _A800_MOC, _H100_MOC)} | FITTED
"""All presets by name."""

EXPLAINED = (
    f"{_A100.name} and {_H100.name} have the hardware's figures, {_A800_MOC.name} and {_H100_MOC.name} the "
    f"figures of MoC-System's simulation, {' and '.join(FITTED)} bandwidths fitted to MoEvement's tables"
)
"""Description of the presets, for ``--help``."""


def cluster_named(text: str) -> Cluster:
    """Returns the cluster of a flag's value: ``NAME`` or ``NAME:GPUS``.

    Raises:
        ValueError: the preset does not exist, or the number of GPUs is invalid.
    """
    name, colon, gpus = text.partition(":")
    if name not in CLUSTERS:
        raise SimulationError(
            f"there is no cluster {name!r}. Fix: choose one of {', '.join(CLUSTERS)}, as in a100-80gb:96",
            code="cluster-unknown",
        )
    if not colon:
        return CLUSTERS[name]
    if not gpus.isdigit() or not int(gpus):
        raise SimulationError(
            f"{gpus!r} is no number of GPUs. Fix: give one above 0, as in {name}:96",
            code="value-out-of-range",
        )
    return dataclasses.replace(CLUSTERS[name], gpus=int(gpus))


_FORWARD_AND_BACKWARD = 6  # operations per parameter and token
_ALL_TO_ALLS = 4  # dispatch and combine, forward and backward
_UPDATE_BYTES = 30  # per parameter: gradient, master and moments read, the latter two and the weight written


@dataclass(frozen=True)
class Work:
    """Work of an iteration.

    Attributes:
        global_batch: sequences.
        micro_batch: sequences per micro batch of one pipeline, over all of its data- or expert-parallel ranks.
        seq_length: tokens per sequence.
        hidden_size: elements of a token between layers.
        topk: experts per token.
        pipelines: parallel pipelines; 0 for the number of data-parallel ranks.  If expert parallelism uses
            data-parallel ranks, a pipeline may be as wide as ``ep``, and a micro batch is divided among them, as in
            MoEvement (section 5.1).
        overlap: share of the gradients' reduction that the backward pass hides.
    """

    global_batch: int = 512
    micro_batch: int = 32
    seq_length: int = 2048
    hidden_size: int = 2048
    topk: int = 8
    pipelines: int = 0
    overlap: float = 0.9

    def __post_init__(self):
        if min(self.global_batch, self.micro_batch, self.seq_length, self.hidden_size) < 1:
            raise SimulationError(
                "batch, micro batch, sequence or width is less than 1. Fix: pass 1 or more",
                code="value-out-of-range",
            )
        if not 0 <= self.overlap <= 1:
            raise SimulationError(
                f"overlap is a share, and cannot be {self.overlap}. Fix: pass a number from 0 to 1",
                code="value-out-of-range",
            )


@dataclass(frozen=True)
class Timing:
    """Duration of an iteration, in seconds.

    Attributes:
        pipeline_s: forward and backward of all micro batches, including bubbles.
        sync_s: exposed time of the gradients' reduction.
        update_s: the optimizer's step.
        micro_batches: M, micro batches per pipeline.
        stages: S, pipeline stages.
        slowest_s: max t_s, one micro batch in the slowest stage.
    """

    iteration_s: float
    pipeline_s: float = 0.0
    sync_s: float = 0.0
    update_s: float = 0.0
    micro_batches: int = 1
    stages: int = 1
    slowest_s: float = 0.0

    @property
    def forward_backward_s(self) -> float:
        """Time before the update, which can hide a snapshot's copy."""
        return self.iteration_s - self.update_s

    @property
    def without_bubbles(self) -> float:
        """Share of an iteration that a stage needs without waiting: M of M + S - 1 (MoEvement, section 3.4)."""
        return self.micro_batches / (self.micro_batches + self.stages - 1)


def measured_timing(iteration_s: float, micro_batches: int = 1, stages: int = 1) -> Timing:
    """Returns the timing of a measured iteration whose parts are unknown."""
    if not (math.isfinite(iteration_s) and iteration_s > 0):
        raise SimulationError(
            f"an iteration cannot take {iteration_s} s. Fix: give the seconds that were measured",
            code="value-out-of-range",
        )
    return Timing(iteration_s, iteration_s, micro_batches=micro_batches, stages=stages)


def message_s(cluster: Cluster, nbytes: float, ranks: int, across_nodes: bool) -> float:
    """Returns the seconds of a collective or message: alpha(p) + beta(p) m (Appendix C); alpha grows as log p.

    ``nbytes`` is m, of one rank, counting both directions.  Across nodes, the ranks of a node share its network card.
    """
    if ranks < 2:
        return 0.0
    rate = cluster.inter_bandwidth / cluster.gpus_per_node if across_nodes else cluster.intra_bandwidth
    return cluster.latency_s * math.ceil(math.log2(ranks)) + nbytes * (ranks - 1) / ranks / rate


def estimate(operators: Sequence[Operator], layout: ParallelLayout, cluster: Cluster, work: Work) -> Timing:
    """Returns the timing of an iteration of plain or interleaved 1F1B, only from sizes.

    T_pipeline = (M + S - 1) max t_s (Appendix C).  With v virtual stages the warm-up is v times shorter, which gives M
    + (S - 1) / v (Narayanan et al., SC '21, section 2.2.2).  The exposed part of the gradients' reduction and the
    update are added.

    Raises:
        ValueError: the batch does not divide into micro batches per pipeline.
    """
    stages = split_stages(operators, layout.pp)
    pipelines = work.pipelines or layout.dp
    micro_batches, remainder = divmod(work.global_batch, work.micro_batch * pipelines)
    if remainder or not micro_batches:
        raise SimulationError(
            f"a batch of {work.global_batch} is not divisible into micro batches of {work.micro_batch} in "
            f"{pipelines} pipelines. Fix: change one of them",
            code="batch-not-divisible",
        )
    wide = layout.world // (layout.pp * pipelines)  # ranks per stage of a pipeline
    slowest_s = max(_stage_s(stage, layout, cluster, work, wide) for stage in stages)
    pipeline_s = (micro_batches + (layout.pp - 1) / layout.vpp) * slowest_s
    holders = {True: layout.etp * layout.ep, False: layout.tp}  # by whether the operator is an expert
    parameters_per_rank = max(sum(o.parameters / holders[o.kind == "expert"] for o in stage) for stage in stages)
    gradients = 2 * 2 * parameters_per_rank  # reduce-scatter and all-gather, 2 bytes each
    across = layout.dp * layout.tp > cluster.gpus_per_node
    sync_s = (1 - work.overlap) * message_s(cluster, gradients, layout.dp, across)
    update_s = _UPDATE_BYTES * parameters_per_rank / max(1, layout.expert_dp) / cluster.memory_bandwidth
    return Timing(pipeline_s + sync_s + update_s, pipeline_s, sync_s, update_s, micro_batches, layout.pp, slowest_s)


def _stage_s(stage: Sequence[Operator], layout: ParallelLayout, cluster: Cluster, work: Work, wide: int) -> float:
    """Returns t_s: computation and communication of one micro batch."""
    tokens = work.micro_batch * work.seq_length
    operations = _FORWARD_AND_BACKWARD * tokens * sum(active(stage, work.topk))
    compute_s = operations / (wide * cluster.flops * cluster.utilisation)
    layers = len({o.layer for o in stage if o.kind == "expert"})
    sent = 2 * tokens / wide * work.hidden_size  # bytes of a rank's tokens, 16-bit
    all_to_all_s = message_s(cluster, sent * work.topk, layout.ep, layout.ep * layout.etp > cluster.gpus_per_node)
    here_s = compute_s + _ALL_TO_ALLS * layers * all_to_all_s
    # communication with the next stage overlaps with the next micro batch's computation
    border_s = cluster.latency_s + 2 * sent / (cluster.inter_bandwidth / cluster.gpus_per_node)
    return here_s if layout.pp == 1 else max(here_s, border_s)


def active(stage: Sequence[Operator], topk: int) -> Iterator[float]:
    """Yields parameters that a token uses; the embedding is only looked up."""
    yield from (o.parameters for o in stage if o.kind not in ("expert", "embedding"))
    experts = {o.layer: o.parameters for o in stage if o.kind == "expert"}
    yield from (topk * parameters for parameters in experts.values())


def split_stages(operators: Sequence[Operator], stages: int) -> list[list[Operator]]:
    """Returns the operators of each stage: contiguous layers, split evenly, the embedding first, the output last.

    If the layers do not divide evenly, the middle stages hold one more, since the first and the last also have
    embedding and output.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = 1 + max((o.layer for o in operators if o.layer is not None), default=-1)
    if layers < stages:
        raise SimulationError(
            f"{layers} layers cannot fill {stages} pipeline stages. Fix: take fewer stages",
            code="stages-exceed-layers",
        )
    base, remainder = divmod(layers, stages)
    first = (stages - remainder) // 2
    layer_counts = [base + (first <= stage < first + remainder) for stage in range(stages)]
    stage_of_layer = [stage for stage, count in enumerate(layer_counts) for _ in range(count)]
    split: list[list[Operator]] = [[] for _ in range(stages)]
    for operator in operators:
        if operator.layer is not None:
            split[stage_of_layer[operator.layer]].append(operator)
        else:
            split[-1 if operator.kind == "output" else 0].append(operator)
    return split
