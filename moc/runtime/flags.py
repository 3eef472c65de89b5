"""Defines the parsed flags of the launcher."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MonitorFlags:
    """Flags of the monitor of this node's launcher."""

    metrics_port: int | None = None  # for Prometheus
    dashboard_port: int | None = None  # for the page
    address: str = "127.0.0.1"  # of both
    on_event: str | None = None  # shell command to run with each event

    @property
    def is_enabled(self) -> bool:
        """Whether the launcher runs a monitor."""
        return any(flag is not None for flag in (self.metrics_port, self.dashboard_port, self.on_event))


@dataclass(frozen=True)
class LauncherFlags:
    """Parsed command line."""

    nnodes: int  # most nodes that train
    min_nodes: int  # fewest nodes that train
    nproc_per_node: int
    spares: int  # additional nodes, which wait until a node is lost
    node_rank: int  # number of this node, spares last; ranks follow from its rank block, not from this
    endpoints: tuple[str, ...]  # host:port of each controller candidate, from node 0 on; port 0 for any free one
    runs_controllers: bool  # candidates run on the job's nodes; otherwise controllers are started separately
    is_single_machine: bool  # single-machine job, whose spares are child processes of this launcher
    max_restarts: int  # lost workers that are replaced before the job gives up
    max_standstill: int  # generations in a row that may lose a worker at one iteration before the job gives up
    log_dir: Path | None  # for copies of the workers' output; None for no copies
    silence_timeout_s: float  # seconds of silence after which a worker or a node is lost
    hang_caps: dict[str, float]  # by section, most seconds of a worker in it: see moc.runtime.progress
    max_wait_s: float  # seconds to wait for missing nodes
    grow_wait_s: float  # seconds to wait for more nodes, once enough or new nodes have joined
    drain_s: float  # seconds for a node to move its state to the others after SIGTERM; 0 to stop the job instead
    patience_s: float  # seconds for a lost controller to return, and for workers to exit
    network_interface: str | None  # for traffic between workers; None for the interface to the controller
    launcher_arguments: list[str]  # the flags as given, for spares
    command: list[str]  # script and arguments
    monitor: MonitorFlags = MonitorFlags()
    run_log_dir: Path | None = None  # of the program's events, if it is known

    @property
    def max_workers(self) -> int:
        """Number of workers of the job with all nodes."""
        return self.nnodes * self.nproc_per_node

    @property
    def has_other_nodes(self) -> bool:
        """Whether the job has other nodes, whose workers could take over the ranks of this node."""
        return self.nnodes + self.spares > 1


def parse_node_range(text: str) -> tuple[int, int]:
    """Parses ``--nnodes``: ``MAX``, or ``MIN:MAX`` if training continues on fewer nodes; returns both.

    Raises:
        argparse.ArgumentTypeError: the text has neither form.
    """
    minimum, _, maximum = text.rpartition(":")
    try:
        numbers = int(minimum or maximum), int(maximum)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nodes nor MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text} must be MIN:MAX with 1 <= MIN <= MAX")
    return numbers
