"""Describes clusters in numbers: compute, bandwidths, and recovery times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from moc.simulate import SimulationError


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
