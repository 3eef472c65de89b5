"""Runs a job of several nodes on this machine, each with a separate launcher, for measurements during training."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.live.job import SHARED, Job, free_ports


@contextmanager
def job_of_nodes(nodes: int, workers: int, program: Sequence[object]) -> Iterator[tuple[Job, Path]]:
    """Yields the job of the first node, which writes the events, and the memory directory of all nodes.

    Args:
        nodes: number of nodes.
        workers: number of workers of each node.
        program: program of the workers, with its flags.
    """
    with ExitStack() as stack:
        files, memory = (
            Path(stack.enter_context(TemporaryDirectory(prefix="nodes-", dir=where))) for where in (None, SHARED)
        )
        address, token = f"127.0.0.1:{free_ports(1)[0]}", {"MOC_TOKEN": secrets.token_hex(32)}
        launcher = ["-m", "moc.launch", "--nnodes", nodes, "--nproc-per-node", workers, "--rdzv-endpoint", address]
        places = ["--ckpt-dir", files / "snapshots", "--ckpt-memory-dir", memory]
        jobs = []
        for node in range(nodes):
            (files / str(node)).mkdir()
            command = [*launcher, "--node-rank", node, *program, *places]
            jobs.append(stack.enter_context(Job(command, files / str(node), environment=token)))
        yield jobs[0], memory


def bytes_in(directory: Path) -> int:
    """Returns the bytes of all files below a directory; counts a file with several names once, skips vanished files."""
    found = {}
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                file = os.stat(os.path.join(where, name))
                found[file.st_ino] = 512 * file.st_blocks
    return sum(found.values())
