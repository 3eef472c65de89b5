"""Tables of faults that are injected into a cluster while a job trains on it."""

from __future__ import annotations

from dataclasses import dataclass

CONTROLLER = -1
"""Placeholder for the number of the controller's host."""


@dataclass(frozen=True)
class Step:
    """One action of a scenario.

    ``cut`` (these hosts from all others), ``mend`` (all links), ``off`` (hosts are powered off), ``on`` (hosts boot,
    and restart their command), ``freeze`` and ``thaw`` (storage), ``stop`` and ``cont`` (launchers, as by Ctrl-Z
    and ``fg``), ``kill worker`` (of these hosts), ``stop controller``, ``cont controller``, ``kill controller``.
    """

    action: str
    hosts: tuple[int, ...] = ()  # numbers of hosts
    more: int = 0  # number of iterations to wait for since the previous step
    seconds: float = 0.0  # additional delay


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    what: str  # description
    steps: tuple[Step, ...]  # in order
    ends: bool = False  # whether the job ends with exit code 75 without a majority, and continues after a restart
    aside: tuple[int, ...] = ()  # hosts that may end with 75, with a reason, while the others continue


def _off(hosts: tuple[int, ...], back: float | None = None) -> tuple[Step, ...]:
    return Step("off", hosts, more=10), *([Step("on", hosts, seconds=back)] if back is not None else [])


def _cut(hosts: tuple[int, ...], seconds: float) -> tuple[Step, ...]:
    return Step("cut", hosts, more=10), Step("mend", seconds=seconds)


def _flapping(host: int, seconds: float) -> tuple[Step, ...]:
    return (Step("cut", (host,), seconds=1.0, more=2), Step("mend", seconds=seconds)) * 5


@dataclass(frozen=True)
class Cluster:
    """Parameters of scenarios.

    Attributes:
        nnodes: number of hosts that have rank blocks; further hosts are spares.
        size: number of all hosts.
        silence: seconds without a heartbeat until a process is lost.
    """

    nnodes: int
    size: int
    silence: float

    @property
    def minority(self) -> int:
        """Maximum number of hosts that can be lost."""
        return (self.size - 1) // 2

    @property
    def last(self) -> int:
        """The last host that has a rank block."""
        return self.nnodes - 1

    @property
    def short(self) -> float:
        """Seconds without heartbeats that are too short for a loss."""
        return self.silence / 3

    @property
    def long(self) -> float:
        """Seconds without heartbeats that are long enough for a loss."""
        return 3 * self.silence


def scenarios(nnodes: int, size: int, silence: float) -> dict[str, Scenario]:
    """Returns all rows, by name; :class:`Cluster` has the same arguments."""
    cluster = Cluster(nnodes, size, silence)
    return _losses(cluster) | _cuts(cluster) | _frozen_storage(cluster) | _stopped_processes(cluster)


def _losses(of: Cluster) -> dict[str, Scenario]:
    """Returns scenarios with hosts that are powered off."""
    last, most = of.last, tuple(range(of.size // 2 + 1))
    return {
        "host lost": Scenario("a host loses its power", _off((last,))),
        "host returns": Scenario("a host loses its power, and boots", _off((last,), back=of.long)),
        "first lost": Scenario("the first host loses its power", _off((0,))),
        "first returns": Scenario("the first host loses its power, and boots", _off((0,), back=of.silence)),
        "controller's host lost": Scenario("the controller's host loses its power", _off((CONTROLLER,))),
        "controller's hosts lost": Scenario(
            "the controller's host, and then the next one's", (*_off((CONTROLLER,)), *_off((CONTROLLER,)))
        ),
        "lost twice": Scenario(
            "a host loses its power, then the first one, and both boot",
            (*_off((last,)), Step("off", (0,), more=10), Step("on", (0, last), seconds=of.silence)),
            ends=of.minority < 2,
        ),
        "most lost": Scenario(
            "all but a minority lose their power, and boot",
            (Step("off", most, more=10), Step("on", most, seconds=of.long)),
            ends=True,
        ),
    }


def _cuts(of: Cluster) -> dict[str, Scenario]:
    """Returns scenarios with cut links."""
    last, short, long = of.last, of.short, of.long
    places, others = tuple(range(of.nnodes)), tuple(range(of.nnodes, of.size))
    lost = tuple(range(of.minority))  # the first node among them
    return {
        "cut for a moment": Scenario("a host is cut off for less than the silence timeout", _cut((last,), short)),
        "cut for long": Scenario("a host is cut off for longer", _cut((last,), long), aside=(last,)),
        "first cut for a moment": Scenario("the first host is cut off for less", _cut((0,), short)),
        "first cut for long": Scenario("the first host is cut off for longer", _cut((0,), long), aside=(0,)),
        "cut for good": Scenario("a host is cut off for good", (Step("cut", (last,), more=10),), aside=(last,)),
        "first cut for good": Scenario("the first host is cut off for good", (Step("cut", (0,), more=10),), aside=(0,)),
        "minority cut": Scenario("all hosts that can be spared, and the first host", _cut(lost, long), aside=lost),
        "world cut": Scenario(
            "all training hosts are cut off from the spares",
            _cut(places, long),
            aside=places if of.nnodes <= of.minority else others,
        ),
        "spares cut": Scenario("a spare is cut off", _cut((of.size - 1,), long), aside=(of.size - 1,)),
        "flapping": Scenario("an unstable link", _flapping(last, short), aside=(last,)),
        "first flapping": Scenario("the first host's link is unstable", _flapping(0, short), aside=(0,)),
    }


def _frozen_storage(of: Cluster) -> dict[str, Scenario]:
    """Returns scenarios with frozen storage."""
    last, short, long = of.last, of.short, of.long
    return {
        "storage frozen": Scenario(
            "storage hangs, for 15 iterations", (Step("freeze", more=10), Step("thaw", more=15))
        ),
        "storage frozen, worker lost": Scenario(
            "storage hangs, and a host is lost",
            (Step("freeze", more=10), Step("off", (last,), more=5), Step("thaw", more=5)),
        ),
        "storage frozen, worker killed": Scenario(
            "storage hangs, and a worker is killed that writes there",
            (Step("freeze", more=10), Step("kill worker", (last,), more=10), Step("thaw", more=5)),
        ),
        "storage frozen for long": Scenario(
            "storage hangs for three times the silence timeout", (Step("freeze", more=10), Step("thaw", seconds=long))
        ),
        "storage frozen for long, host lost": Scenario(
            "storage hangs, and a host loses its power meanwhile",
            (Step("freeze", more=10), Step("off", (last,), seconds=short), Step("thaw", seconds=long)),
        ),
    }


def _stopped_processes(of: Cluster) -> dict[str, Scenario]:
    """Returns scenarios with stopped or killed launchers and controllers."""
    last, long = of.last, of.long
    return {
        "launcher stopped": Scenario(
            "a launcher is stopped, and continued later",
            (Step("stop", (last,), more=10), Step("cont", (last,), seconds=long)),
            aside=(last,),
        ),
        "controller killed": Scenario("the controller is killed", (Step("kill controller", more=10),)),
        "controller stopped": Scenario(
            "the controller stands still for longer than the silence timeout",
            (Step("stop controller", more=10), Step("cont controller", seconds=long)),
        ),
    }
