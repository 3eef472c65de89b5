"""Jobs of MIN to MAX nodes for tests, and their orders."""

from moc.runtime.membership import Membership
from moc.runtime.orders import ChangeNotice, StartWorker, WorkerRecord

PLACES, LEAST, PER_NODE = 4, 2, 2


def starts(orders):
    return [order for order in orders if isinstance(order, StartWorker)]


def names(orders):
    return [order.worker for order in starts(orders)]


def told_of(membership, orders):
    """Live workers by node, as agents would tell them, all of which train."""
    workers = membership.workers
    assert set(names(orders)) == set(workers)
    for name in workers:
        membership.worker_reported(name, membership.generation)
        membership.worker_ready(name)
        membership.worker_connected(name, membership.generation)
    return {
        node: [WorkerRecord.from_message(w.to_message()) for w in workers.values() if w.node == node]
        for node in range(PLACES + 1)
    }


def begun(nodes=PLACES):
    """A job that trains on the first nodes, and the names of its workers."""
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    for node in range(nodes):
        assert membership.node_joined(node) == []
    orders = membership.grow()
    told_of(membership, orders)
    assert membership.running
    return membership, names(orders)


def staying(nodes=PLACES):
    """A job whose workers stay, and their names by rank."""
    membership, workers = begun(nodes)
    for name in workers:
        membership.worker_ready(name, survives_resize=True)
    return membership, workers


def meet_guests(membership):
    """All workers leave at the end of an iteration; the orders that follow when the last one has."""
    generation = membership.generation
    assert membership.grow() == [ChangeNotice(generation)] and membership.has_scale_up_notice
    *others, last = membership.workers
    assert [order for name in others for order in membership.worker_drained(name, generation)] == []
    assert membership.generation == generation and membership.running
    return membership.worker_drained(last, generation)
