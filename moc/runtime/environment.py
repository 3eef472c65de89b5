"""Environment variables by which a job's processes find each other, in addition to torchrun's."""

import os

AGENT = "MOC_AGENT"
"""Address of this node's agent, for its workers."""

WORKER = "MOC_WORKER"
"""Unique name of a worker process; its replacement has another."""

GENERATION = "MOC_GENERATION"
"""Number of the generation that a worker was started for."""

TOGETHER = "MOC_TOGETHER"
"""1 if all workers start together; 0 for a replacement, which builds alone."""

NODE = "MOC_NODE"
"""Number of the worker's node; several nodes may share a machine, and ranks do not follow from it."""

PLACES = "MOC_PLACES"
"""Number of places of the job: the nodes that train, if all are there."""

LEAST_PLACES = "MOC_LEAST_PLACES"
"""With so many nodes the job continues, if it has lost the others."""

SIZE = "MOC_SIZE"
"""Number of workers of the job with all nodes, for the process that workers are forked from."""

HELPERS = "MOC_HELPERS"
"""Of the last nodes in the order of ranks, which help: the part of the model that each has, separated by commas."""

REPLICA_SERVER = "MOC_REPLICA_SERVER"
"""Address of this node's replica server, for its workers."""

LEASE = "MOC_LEASE"
"""Descriptor of the shared memory with the lease of this node's workers."""

SILENCE = "MOC_SILENCE_TIMEOUT"
"""Seconds after which a worker or a node that sends nothing is lost (``--silence-timeout``)."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Names of the network interfaces that torch and NCCL listen on."""

UNLESS_SET = {
    # Each generation has its own threads. With one glibc heap arena per thread, long-lived allocations pin otherwise
    # free pages: the memory in use stays constant, but 20 MB more are resident after 50 generations.
    "MALLOC_ARENA_MAX": "1",
    # The store dies with its controller, which is harmless; torch would print a stack trace for it.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of workers, unless the launcher's sets these variables."""

SET = {
    # the NVML-based check does not initialize CUDA, so forked workers can use it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of workers in any case."""


def numbers_of_nodes() -> tuple[int, int]:
    """MIN and MAX of the job's nodes, for its workers; equal if their number does not vary."""
    return int(os.environ.get(LEAST_PLACES, "1")), int(os.environ.get(PLACES, "1"))


def fewest_nodes() -> int | None:
    """MIN, if a job of MIN to MAX nodes continues after it has lost nodes; None if their number does not vary."""
    least, most = numbers_of_nodes()
    return least if least < most else None
