"""A job in which a copy of the model takes several nodes: whole copies train, and others that have a part help."""

import json

from moc.runtime.membership import Membership
from moc.runtime.orders import Abort, AssignRank, Cause, Kill, WorkerRecord
from tests.unit.runtime.members import meet_guests, names, starts


def spread(nodes=4, least=2):
    """A job whose model takes two nodes of a worker each, and the names of its workers by node."""
    membership = Membership(nodes, 1, 1000, least)
    for node in range(nodes):
        membership.node_joined(node)
    orders = membership.grow()
    if nodes % 2:
        orders = membership.worker_reported(names(orders)[0], 0, 2)
    workers = train(membership, names(orders))
    return membership, workers


def train(membership, waiting):
    """All workers that wait go on; returns those of the job by node."""
    for name in [*waiting, *membership.workers]:
        membership.worker_reported(name, membership.generation, 2)
        membership.worker_ready(name, survives_resize=True)
    assert membership.running
    return {worker.node: name for name, worker in membership.workers.items()}


def test_surplus_node_without_complete_copy_waits():
    membership, workers = spread(5)
    assert set(workers) == {0, 1, 2, 3} and not membership.can_grow and membership.assignment.nodes_per_model == 2
    assert membership.node_lost(4) == [] and membership.running


def test_partner_of_lost_node_holds_partial_model_until_return():
    membership, workers = spread()
    *seats, abort = membership.node_lost(2)
    assert [(order.node, order.rank, order.size, order.partial_model_parts) for order in seats] == [
        (0, 0, 3, (1,)),
        (1, 1, 3, (1,)),
        (3, 2, 3, (1,)),
    ]
    assert abort.cause is Cause.NODE_LOST and "3 of 4" in abort.reason and ", 1 of" in abort.reason
    train(membership, [])
    assert not membership.can_grow and not membership.scale_up.all_arrived
    membership.node_joined(2)
    guests = starts(membership.grow())
    assert [(order.node, order.rank, order.size, order.is_joining) for order in guests] == [(2, 2, 4, True)]
    membership.worker_ready(guests[0].worker, survives_resize=True)
    assert membership.scale_up.joining_workers_are_ready
    *seats, abort = meet_guests(membership)
    assert [(order.node, order.rank, order.partial_model_parts) for order in seats if order.node != 2] == [
        (0, 0, ()),
        (1, 1, ()),
        (3, 3, ()),
    ]
    assert abort.cause is Cause.NODES_ARRIVED and "4 of 4" in abort.reason
    assert {*workers.values()} - {workers[2]} < {*membership.workers}


def test_partial_model_node_takes_rank_of_lost_node():
    membership, workers = spread()
    membership.node_lost(2)
    train(membership, [])
    *seats, abort = membership.node_lost(1)
    assert [(order.node, order.worker, order.rank, order.partial_model_parts) for order in seats] == [
        (0, workers[0], 0, ()),
        (3, workers[3], 1, ()),
    ]
    assert abort.cause is Cause.NODE_LOST and "2 of 4" in abort.reason


def test_partial_model_node_is_lost_and_its_worker_replaced():
    membership, workers = spread()
    membership.node_lost(2)
    train(membership, [])
    abort, start = membership.worker_exited(workers[3], -9)
    assert (start.node, start.rank, start.size, start.starts_together, start.partial_model_parts) == (
        3,
        2,
        3,
        False,
        (1,),
    )
    train(membership, [start.worker])
    *seats, abort = membership.node_lost(3)
    assert [(order.node, order.rank, order.size, order.partial_model_parts) for order in seats] == [
        (0, 0, 2, ()),
        (1, 1, 2, ()),
    ]


def test_fresh_start_has_no_partial_model_nodes():
    membership, workers = spread()
    membership.node_lost(2)
    for node in (0, 1):
        membership.worker_exited(workers[node], -9)
    orders = membership.worker_exited(workers[3], -9)
    assert [(order.node, order.rank, order.size, order.partial_model_parts) for order in starts(orders)] == [
        (0, 0, 2, ()),
        (1, 1, 2, ()),
    ]
    assert all(order.starts_together for order in starts(orders)) and membership.size == 2


def test_new_controller_restores_partial_model_nodes():
    membership, workers = spread()
    membership.node_lost(2)
    train(membership, [])
    for name in membership.workers:
        membership.worker_connected(name, membership.generation)
    there = {
        w.node: WorkerRecord.from_message(json.loads(json.dumps(w.to_message()))) for w in membership.workers.values()
    }
    again = Membership(4, 1, 1000, 2)
    again.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    assert again.state_dict() == membership.state_dict()
    assert [again.node_joined(node, [worker], 1) for node, worker in there.items()] == [[], [], []]
    assert again.running and [order.rank for order in again.node_lost(1) if isinstance(order, AssignRank)] == [0, 1]


def test_waiting_node_initializes_the_lost_part():
    membership, _ = spread(5)
    membership.node_lost(1)
    train(membership, [])
    assert membership.blocks.members == (0, 3, 2) and membership.can_grow and membership.scale_up.all_arrived
    guests = starts(membership.grow())
    assert [(order.node, order.rank % 2) for order in guests] == [(4, 1)]
    kept = json.loads(json.dumps(membership.state_dict()))
    again = Membership(5, 1, 1000, 2)
    again.load_state_dict(kept)
    assert again.state_dict() == membership.state_dict()
    for order in guests:
        membership.worker_ready(order.worker, survives_resize=True)
    (abort,) = [order for order in meet_guests(membership) if isinstance(order, Abort)]
    assert abort.cause is Cause.NODES_WAITED and "4 of 5" in abort.reason


def test_node_moves_to_lost_part_and_restarts_worker():
    membership, workers = spread()
    membership.node_lost(0)
    train(membership, [])
    assert membership.blocks.members == (2, 1, 3)
    orders = membership.node_lost(2)
    assert membership.blocks.members == (3, 1)
    assert [order.worker for order in orders if isinstance(order, AssignRank)] == [workers[1]]
    assert [(order.node, order.rank) for order in starts(orders)] == [(3, 0)]


def test_workers_wait_for_moved_node_below_minimum_copies():
    membership, workers = spread(6, least=4)
    membership.node_lost(0)
    train(membership, [])
    assert membership.blocks.members == (2, 1, 4, 3, 5)
    orders = membership.node_lost(2)
    assert membership.blocks.members == (4, 1, 5, 3)
    assert [(order.node, order.rank) for order in starts(orders)] == [(5, 2)]


def test_surplus_node_initializes_the_other_part():
    membership, workers = spread(6)
    membership.node_lost(0)
    train(membership, [])
    *orders, abort = membership.node_lost(2)
    assert membership.blocks.members == (4, 1, 3) and membership.assignment.partial_model_parts == (1,)
    assert [order.worker for order in orders if isinstance(order, Kill)] == [workers[5]]
    assert abort.cause is Cause.NODE_LOST and "3 of 6" in abort.reason and ", 1 of" in abort.reason
    train(membership, [])
    assert membership.can_grow and membership.scale_up.all_arrived
    guests = starts(membership.grow())
    assert [(order.node, order.rank, order.is_joining) for order in guests] == [(5, 2, True)]
    membership.worker_ready(guests[0].worker, survives_resize=True)
    meet_guests(membership)
    assert membership.blocks.members == (4, 1, 5, 3) and membership.assignment.partial_model_parts == ()


def test_partial_model_node_moves_if_its_substitutes_are_lost():
    membership, workers = spread(8)
    for node in (0, 2):
        membership.node_lost(node)
        train(membership, [])
        membership.node_joined(node)
        membership.grow()
    membership.node_lost(4)
    train(membership, [])
    assert membership.assignment.partial_model_parts == (1, 1, 1) and len(membership.joining) == 2
    for node in (0, 2):
        membership.node_lost(node)
    orders = meet_guests(membership)
    assert Cause.NODE_MOVES in [order.cause for order in orders if isinstance(order, Abort)]
    assert [order.worker for order in orders if isinstance(order, Kill)] == [workers[5]]
    train(membership, [])
    assert [order.node for order in starts(membership.grow())] == [5]
