"""The flags of the launcher, for its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Flags:
    """The parsed command line."""

    nnodes: int
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
    patience_s: float  # for a lost controller, and for workers to exit
    network_interface: str | None  # for traffic between workers; None for the one towards the controller
    own: list[str]  # the flags as given
    command: list[str]  # script and arguments

    @property
    def has_other_nodes(self) -> bool:
        """Whether the job has other nodes, whose workers could take the places of this one's."""
        return self.nnodes + self.spares > 1
