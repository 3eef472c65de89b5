"""Host memory that snapshots of a run take."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moc.policy import Policy
from moc.snapshot.contents import Contents

_SETTLED = 3  # the windows before it are what is under way, and the first one of its kind


class Window(NamedTuple):
    """Snapshots of a policy that a run resumes from together.

    Attributes:
        length: number of them.
        kept: snapshots that recovery needs, at most.
        snapshot: bytes of this rank's largest share of them; None if each is a full snapshot.
    """

    length: int = 1
    kept: int = 1
    snapshot: int | None = None


def next_window(policy: Policy, contents: Contents, iteration: int) -> Window:
    """Returns the windows that a policy would plan now, once those under way are over; changes nothing.

    Args:
        policy: has windows.
        contents: gives this rank's shares.
        iteration: iterations completed.
    """
    trial, begun, held, kept = copy.deepcopy(policy), 0, [], 1
    plans = []
    for after in range(iteration + 1, iteration + 3 + 3 * len(policy.operators)):
        if (plan := trial.plan(after)) is None:
            break
        begun += plan.since == plan.iteration
        if begun > _SETTLED:
            break
        trial.on_snapshot(plan)
        held = [one for one in [*held, plan.iteration] if plan.supersedes is None or one >= plan.supersedes]
        if begun == _SETTLED:
            plans.append(plan)
            kept = max(kept, len(held))
    shares = (contents.with_gradients(plan.operators, plan.compared) for plan in plans if not plan.complete)
    return Window(max(1, len(plans)), kept, max((share.layout.nbytes for share in shares), default=None))


class RankMemory(NamedTuple):
    """Bytes that a rank needs.

    Attributes:
        own: of each of its buffers.
        copies: of each copy that another node keeps of its snapshots.
        small: for manifests and reports.
        logs: of upstream logs.
    """

    own: Sequence[int]
    copies: Sequence[int]
    small: int
    logs: int


@dataclass(frozen=True)
class ReservedMemory:
    """Bytes of the node that needs most.

    Attributes:
        own: of the buffers of its workers.
        copies: for copies of other nodes' snapshots.
        small: for manifests and reports.
        logs: of upstream logs.
    """

    own: int
    copies: int
    small: int
    logs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.own + self.copies + self.small + self.logs

    @classmethod
    def of(cls, sizes: Sequence[RankMemory], nodes: Sequence[str], kept: Sequence[Sequence[str]]) -> ReservedMemory:
        """Adds up what ranks need.

        Args:
            sizes: by rank.
            nodes: by rank, the name of its node.
            kept: by rank, the nodes that its node keeps copies of; empty without peers.
        """
        by_node: dict[str, list[RankMemory]] = {node: [] for node in nodes}
        for node, one in zip(nodes, sizes, strict=True):
            by_node[node].append(one)
        kept_by = dict(zip(nodes, kept, strict=True)) if kept else {}
        found = []
        for node, its in by_node.items():
            others = kept_by.get(node, ())
            own, small = sum(sum(one.own) for one in its), sum(one.small for one in its)
            copies = sum(sum(one.copies) for other in others for one in by_node[other])
            found.append(cls(own, copies, small * (1 + len(others)), sum(one.logs for one in its)))
        return max(found, key=lambda one: one.total)

    def describe(self) -> str:
        """Returns a sentence for people."""
        parts = [f"{self.own / 1e9:.3g} GB for its own snapshots"]
        if self.copies:
            parts.append(f"{self.copies / 1e9:.3g} GB for copies of other nodes' snapshots")
        if self.logs:
            parts.append(f"{self.logs / 1e9:.3g} GB for upstream logs")
        return f"snapshots take {self.total / 1e9:.3g} GB of a node's memory: {', '.join(parts)}"
