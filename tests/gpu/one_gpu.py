"""Many workers of one job on one GPU, over NCCL: for tests alone.

NCCL refuses two ranks on a device by comparing their hosts, and takes ``NCCL_HOSTID`` for a host's name.  Ranks that
seem to be on different hosts talk over sockets, slowly; a killed peer is then a real remote error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

MEMORY = os.environ.get("TEST_MEMORY", "/dev/shm")
"""Memory file system, or a directory there which is removed whatever happens to a test."""

ASKED = "MOC_GPU_CHECK_ONE_GPU"
"""Environment variable by which a test asks for it."""

MOST_WORKERS = 8


class NotHere(RuntimeError):
    """This is no test on one machine."""


def one_gpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what a worker's environment must have, so that it shares the machine's first GPU with all others.

    Args:
        environment: of the worker, as the launcher set it.

    Raises:
        NotHere: no test asked for it, or the job has several nodes or many workers.
    """
    if environment.get(ASKED) != "1":
        raise NotHere(f"workers share a GPU in tests alone: {ASKED} is not 1")
    if any(environment.get(nodes, "1") != "1" for nodes in ("MOC_PLACES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")):
        raise NotHere("workers share a GPU on one machine alone, and this job has several")
    if int(environment["WORLD_SIZE"]) > MOST_WORKERS:
        raise NotHere(f"at most {MOST_WORKERS} workers share a GPU, not {environment['WORLD_SIZE']}")
    return {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"r{environment['RANK']}",  # NCCL up to 2.28
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from 2.30 on
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
