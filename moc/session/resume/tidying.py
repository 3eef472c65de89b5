"""Cleanup when a run resumes: snapshots that it will take again, and leftovers of killed jobs."""

from __future__ import annotations

from moc.recovery.carrying import Carrier
from moc.session.resume.point import ResumePoint
from moc.session.tiers import Tiers


def tidy_storage(tiers: Tiers, start: ResumePoint) -> None:
    """Sets aside newer snapshots, and removes unpublished leftovers of killed jobs; on rank 0."""
    for newer in tiers.storage.iterations():
        if newer > start.position.iteration:
            tiers.storage.set_aside(newer)
    tiers.storage.clear_unpublished()


def tidy_memory(tiers: Tiers, start: ResumePoint) -> None:
    """Moves newer snapshots aside in this node's memory, and removes useless ones; on the node's leading worker."""
    if tiers.memory is not None and tiers.leads_node:
        tiers.memory.place.remove("slots")
        before = tiers.before
        assert before is not None  # set with a memory tier
        for other in before.iterations():
            if other not in start.before:
                before.remove(other)
        for other in tiers.memory.iterations():
            if other in start.newer:
                before.remove(other)
                tiers.memory.move(other, before)
            elif other not in (*start.in_memory, *start.experts):
                tiers.memory.remove(other)
        Carrier(tiers.memory, ()).delete()
        tiers.memory.clear_unpublished()
