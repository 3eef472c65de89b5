"""Environment variables by which the processes of a job find each other, beside torchrun's."""

AGENT = "MOC_AGENT"
"""Address of the agent of this node, for its workers."""

WORKER = "MOC_WORKER"
"""Name of this worker process; one that replaces it has another one."""

GENERATION = "MOC_GENERATION"
"""Number of the membership that a worker was started for."""

TOGETHER = "MOC_TOGETHER"
"""1 where all workers begin together; 0 for one that takes the place of a lost one, and builds alone."""

NODE = "MOC_NODE"
"""Number of the node that a worker is on; several may be on one machine, and ranks do not follow from it."""

REPLICA_SERVER = "MOC_REPLICA_SERVER"
"""Address of the process that keeps copies of other nodes' snapshots on this node, for its workers."""

LEASE = "MOC_LEASE"
"""Descriptor of the shared memory that says until when the workers of a node may run."""

UNLESS_SET = {
    # Each generation has threads of its own. In as many arenas of C's heap as glibc makes for them, what lives on keeps
    # pages that are free but for it: no more is in use, but 20 MB more are taken after 50 generations.
    "MALLOC_ARENA_MAX": "1",
    # The store goes with a controller that dies, which is nothing to worry about; torch would print a stack for it.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""With what workers begin where the launcher's environment says nothing else."""

SET = {
    # asked through NVML, CUDA is not touched, so that a fork can use it
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""With what they begin in any case."""
