"""The state of a job as one node's launcher knows it: members, leader, and the workers of the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class WorkerView:
    """A worker of this node.

    Attributes:
        section: section of its compute thread (:mod:`moc.runtime.progress`); None for none.
        seconds: seconds in the section, without waits.
        iteration: newest iteration that it has reported; None without one.
        state: ``joining``, ``starting``, ``waiting`` for other workers, or ``working``.
    """

    rank: int
    pid: int | None
    section: str | None
    seconds: float
    iteration: int | None
    state: str

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> WorkerView:
        """Returns the worker of an agent's description."""
        state = "waiting" if values["waits"] else "working"
        state = state if values["ready"] else "starting"
        state = "joining" if values["joins"] else state
        own = {name: values[name] for name in ("rank", "pid", "section", "seconds", "iteration")}
        return cls(**own, state=state)


@dataclass(frozen=True)
class JobView:
    """State of a job at one node.

    Attributes:
        node: number of this node.
        workers: this node's workers, by rank.
        workers_per_node: number of workers of each node.
        lease_s: seconds until this node's workers end without a controller; None if they do not.
        leader: number of the leading controller candidate.
        job: id of the launch; empty until a controller has admitted the node.
        epoch: epoch of the controller.
        generation: number of the current generation.
        changed_at: Unix seconds when the generation last changed; 0 if it has not changed since the first message.
        loss: sentence about the loss that began the current generation; empty if there was none.
        restarts: workers lost by signals that were replaced.
        states: ``training``, ``lost``, ``partial model`` or ``not training``, by node.
        first_node: node of the first worker, which has the events of the run; None if it is not known.
        end: why the job has ended, and its exit code; None while it runs.
        time: Unix seconds of the newest message; 0 without one.
    """

    node: int = 0
    workers: tuple[WorkerView, ...] = ()
    workers_per_node: int = 0
    lease_s: float | None = None
    leader: int = 0
    job: str = ""
    epoch: int = 0
    generation: int = 0
    changed_at: float = 0.0
    loss: str = ""
    restarts: int = 0
    states: Mapping[int, str] | None = None
    first_node: int | None = None
    end: tuple[str, int] | None = None
    time: float = 0.0

    def updated(self, message: Mapping[str, Any], time: float) -> JobView:
        """Returns the state after a message of the launcher (:meth:`moc.runtime.agent.Agent.describe`)."""
        workers = sorted(map(WorkerView.from_message, message["workers"]), key=lambda worker: worker.rank)
        own = {name: message[name] for name in ("node", "lease_s", "leader")}
        view = replace(self, workers=tuple(workers), workers_per_node=message["per_node"], time=time, **own)
        control = message.get("control")
        if control is None or not control["membership"]:
            return view
        membership = control["membership"]
        end, has_changed = membership["end"], self.states is not None and membership["generation"] != self.generation
        return replace(
            view,
            job=control["job"],
            epoch=control["epoch"],
            generation=membership["generation"],
            changed_at=time if has_changed else self.changed_at,
            loss=_loss_of(membership),
            restarts=membership["restarts"],
            states=_states_of_nodes(membership),
            first_node=dict(membership["places"]).get(next(iter(membership["members"]), None)),
            end=None if end is None else (end["reason"], end["code"]),
        )

    @property
    def workers_by_state(self) -> dict[str, int]:
        """Number of this node's workers by state; ``lost`` counts workers that do not run."""
        counts = Counter(worker.state for worker in self.workers)
        trains = (self.states or {}).get(self.node) in ("training", "partial model")
        counts["lost"] = max(0, self.workers_per_node - len(self.workers)) if trains and self.end is None else 0
        return counts

    @property
    def nodes_by_state(self) -> dict[str, int]:
        """Number of nodes by state."""
        return Counter((self.states or {}).values())


def _loss_of(membership: Mapping[str, Any]) -> str:
    losses = membership["losses"][1]
    is_current = losses and losses[-1]["generation"] == membership["generation"]
    return describe_loss(losses[-1]) if is_current else ""


def describe_loss(loss: Mapping[str, Any]) -> str:
    """Returns the reason of a loss, with its node if it is known."""
    reason, node = loss["reason"], f"node {loss.get('node')}"
    return reason if loss.get("node") is None or node in reason else f"{reason}, on {node}"


def _states_of_nodes(membership: Mapping[str, Any]) -> dict[int, str]:
    blocks, vacant = membership["members"], set(membership["vacant"])
    members, partial = set(blocks), set(blocks[len(blocks) - len(membership["helpers"]) :])
    states = {}
    for block, node in membership["places"]:
        trains = "partial model" if block in partial else "training" if block in members else "not training"
        states[node] = "lost" if block in vacant else trains
    return states
