"""The flags of the launcher, for its parts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Flags:
    """The parsed command line."""

    nnodes: int  # most nodes that train
    least_nodes: int  # fewest nodes that train
    nproc_per_node: int
    spares: int  # nodes beyond nnodes, which wait until one is lost
    node_rank: int  # of this node; spares come last; ranks of workers follow from a node's place, not from this
    endpoints: tuple[str, ...]  # host:port of each controller candidate, from node 0 on; port 0 for any free one
    own_controllers: bool  # candidates run on nodes of the job; otherwise controllers are started separately
    alone: bool  # the job has this machine only, and spares are child processes of this launcher
    max_restarts: int  # lost workers that are replaced before the job gives up
    log_dir: Path | None  # for the workers' output; None to inherit this process's streams
    silence_s: float  # after so many seconds of silence, a worker or a node is lost
    hang_caps: dict[str, float]  # most seconds of a worker in a section, by section: see moc.runtime.hangs
    max_wait_s: float  # for missing nodes
    grow_wait_s: float  # for more nodes, once there are enough, or new ones
    patience_s: float  # for a lost controller, and for workers to exit
    network_interface: str | None  # for traffic between workers; None for the one towards the controller
    own: list[str]  # the flags as given, for spares
    command: list[str]  # script and arguments

    @property
    def workers(self) -> int:
        """Workers of the job, if all nodes are there."""
        return self.nnodes * self.nproc_per_node

    @property
    def has_other_nodes(self) -> bool:
        """Whether the job has other nodes, whose workers could take the places of this one's."""
        return self.nnodes + self.spares > 1


def parse_nodes(text: str) -> tuple[int, int]:
    """Parses ``--nnodes``: ``MAX``, or ``MIN:MAX`` if training continues on fewer nodes; returns both.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    least, _, most = text.rpartition(":")
    try:
        numbers = int(least or most), int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nodes nor MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text} must be MIN:MAX with 1 <= MIN <= MAX")
    return numbers
