"""Defines the environment variables of a job's processes, in addition to torchrun's variables."""

import os

from moc.errors import UserError

AGENT = "MOC_AGENT"
"""Address of this node's agent, for its workers."""

WORKER = "MOC_WORKER"
"""Unique name of a worker process; a replacement has a different name."""

GENERATION = "MOC_GENERATION"
"""Number of the generation that a worker was started for."""

STARTS_TOGETHER = "MOC_TOGETHER"
"""1 if all workers start together; 0 for a replacement, which initializes independently."""

NODE = "MOC_NODE"
"""Number of the worker's node; several nodes may share a machine, and the number does not determine ranks."""

MAX_NODES = "MOC_PLACES"
"""Number of rank blocks of the job, which is the number of training nodes if none is missing."""

MIN_NODES = "MOC_LEAST_PLACES"
"""Fewest nodes that the job continues on after it has lost the others."""

JOB_SIZE = "MOC_SIZE"
"""Number of workers of the job with all nodes, for the forkserver."""

PARTIAL_MODEL_PARTS = "MOC_HELPERS"
"""Comma-separated model parts of the partial-model nodes, which are the last nodes in the order of ranks."""

REPLICA_SERVER = "MOC_REPLICA_SERVER"
"""Address of this node's replica server, for its workers."""

LEASE = "MOC_LEASE"
"""Descriptor of the shared memory with the lease of this node's workers."""

SILENCE_TIMEOUT = "MOC_SILENCE_TIMEOUT"
"""Seconds of silence after which a worker or a node is lost (``--silence-timeout``)."""

MONITOR = "MOC_MONITOR"
"""Directory of the launch's monitor, where rank 0 names its event file; unset without a monitor."""

EVENTS_LINK = "events"
"""Name of the link to the event file in that directory."""

OUTPUT_DIRECTORY = "MOC_OUTPUT"
"""Directory of the files with the workers' output; unset without such files."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the network interfaces of gloo and NCCL."""

DEFAULT_VARIABLES = {
    # Each generation has its own threads. With one glibc heap arena per thread, long-lived allocations pin otherwise
    # free pages: memory in use stays constant, but resident memory grows by 20 MB in 50 generations.
    "MALLOC_ARENA_MAX": "1",
    # torch would print a stack trace when the store dies with its controller, which is harmless.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of workers, unless the launcher's environment sets these variables."""

FIXED_VARIABLES = {
    # the NVML-based check does not initialize CUDA, so forked workers can use CUDA
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of workers, regardless of the launcher's environment."""


def node_limits() -> tuple[int, int]:
    """Returns MIN and MAX of the job's nodes, for its workers; equal if the number of nodes is fixed."""
    return int(os.environ.get(MIN_NODES, "1")), int(os.environ.get(MAX_NODES, "1"))


def min_nodes() -> int | None:
    """Returns MIN of a job with MIN to MAX nodes, which continues after lost nodes; None if the number is fixed."""
    minimum, maximum = node_limits()
    return minimum if minimum < maximum else None


class PlaceError(UserError, ValueError):
    """Unusable environment variable of a launcher such as torchrun."""

    code = "environment-malformed"
    remedy = "start the program with mocrun or torchrun, or unset RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"


def launcher_ranks() -> tuple[int, int, int]:
    """Returns rank, number of workers, and workers of each node, from the launcher's variables.

    Raises:
        PlaceError: a variable is no number, or they contradict each other.
    """
    texts = {name: os.environ.get(name, default) for name, default in _DEFAULTS.items()}
    for name, value in texts.items():
        if not value.isdecimal():
            raise PlaceError(f"the environment variable {name} is {value!r}, which is no number")
    rank, size, per_node = map(int, texts.values())
    if rank >= size:
        raise PlaceError(f"the environment variable RANK is {rank}, and WORLD_SIZE is {size}")
    if per_node < 1:
        raise PlaceError(f"the environment variable LOCAL_WORLD_SIZE is {per_node}")
    return rank, size, per_node


_DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""Values of torchrun's variables without a launcher."""
