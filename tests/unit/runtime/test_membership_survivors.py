"""A job of MIN to MAX nodes whose workers stay: they get other ranks, and those of nodes that come build as guests."""

import json

from moc.runtime.membership import Membership
from moc.runtime.orders import (
    Abort,
    AssignRank,
    Cause,
    ChangeNotice,
    Connect,
    Kill,
    ReleaseNode,
    StopNode,
    WorkerRecord,
)
from tests.cases import each_row
from tests.unit.runtime.members import LEAST, PER_NODE, PLACES, meet_guests, names, staying


def test_remaining_workers_get_new_ranks_without_restart():
    membership, workers = staying()
    *seats, abort = membership.node_lost(1)
    assert seats == [AssignRank(n // 2, workers[n], rank, 1, 6) for rank, n in enumerate((0, 1, 4, 5, 6, 7))]
    assert abort == Abort(1, Cause.NODE_LOST) and "3 of 4" in abort.reason
    assert [order for name in (*workers[:2], *workers[4:]) for order in membership.worker_reported(name, 1)] == [
        Connect(1)
    ]


def test_joining_workers_initialize_then_get_ranks():
    membership, workers = staying()
    membership.node_lost(1)
    for name in (*workers[:2], *workers[4:]):
        membership.worker_reported(name, 1)
    membership.node_joined(1)
    guests = membership.grow()
    assert [(order.node, order.rank, order.size, order.is_joining) for order in guests] == [
        (1, 2, 8, True),
        (1, 3, 8, True),
    ]
    assert membership.grow() == [] and membership.scale_up.in_progress and membership.running
    membership.worker_ready(guests[0].worker, survives_resize=True)
    assert not membership.scale_up.joining_workers_are_ready
    membership.worker_ready(guests[1].worker, survives_resize=True)
    assert membership.scale_up.joining_workers_are_ready
    *seats, abort = meet_guests(membership)
    assert sorted((seat.rank, seat.node) for seat in seats) == [(rank, rank // 2) for rank in range(8)]
    assert abort.cause is Cause.NODES_ARRIVED and "4 of 4" in abort.reason and not membership.joining


def with_guests():
    """A job of three nodes, its workers, and the names of a fourth one's guests, which are ready."""
    membership, workers = staying(3)
    membership.node_joined(3)
    guests = names(membership.grow())
    for name in guests:
        membership.worker_ready(name, survives_resize=True)
    assert membership.scale_up.joining_workers_are_ready
    return membership, workers, guests


def test_generation_continues_until_all_workers_drained():
    membership, workers, _ = with_guests()
    assert membership.grow() == [ChangeNotice(0)] == membership.grow()  # again, for those that have not heard it
    for name in workers[:-1]:
        assert membership.worker_drained(name, 0) == [] == membership.worker_drained(name, 0)
    again = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    again.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    for node in range(PLACES):
        there = [*membership.workers.values(), *membership.joining.values()]
        assert (
            again.node_joined(
                node, [WorkerRecord.from_message(worker.to_message()) for worker in there if worker.node == node], 0
            )
            == []
        )
    assert (
        again.running and again.scale_up.joining_workers_are_ready and not again.has_scale_up_notice
    )  # it tells so itself
    abort = again.worker_drained(workers[-1], 0)[-1]
    assert abort.cause is Cause.NODES_ARRIVED and "4 of 4" in abort.reason
    assert again.worker_drained(workers[-1], 0) == [] and again.generation == 1  # of a generation that is over


def test_lost_joining_workers_are_restarted():
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[:-1]:
        membership.worker_drained(name, 0)
    membership.worker_exited(guests[0], -9)
    assert membership.worker_drained(workers[-1], 0) == [Abort(1, Cause.JOINING_NODES_LOST)]
    for name in workers:
        membership.worker_reported(name, 1)
    assert (
        membership.running
        and membership.can_grow
        and membership.scale_up.all_arrived
        and not membership.scale_up.in_progress
    )
    assert len(names(membership.grow())) == 2


@each_row("parted", [0, 3, 5])
def test_node_lost_before_drain_is_replaced_by_joining_node(parted):
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[:parted]:
        membership.worker_drained(name, 0)
    *seats, abort = membership.node_lost(1)
    assert abort == Abort(1, Cause.NODE_LOST) and "3 of 4" in abort.reason
    assert {seat.worker for seat in seats} == {*workers[:2], *workers[4:], *guests}
    left = [workers[0], *workers[4:], *guests]
    assert [order for name in [workers[1], *left] for order in membership.worker_reported(name, 1)] == [Connect(1)]
    assert membership.worker_drained(workers[0], 0) == [] and membership.running and not membership.has_scale_up_notice


def test_worker_hanging_before_drain_starts_generation():
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[1:]:
        membership.worker_drained(name, 0)
    assert membership.worker_blocked(workers[0], 0, "hangs") == [Abort(1, Cause.WORKER_HANGS)]
    for name in workers[1:]:
        membership.worker_reported(name, 1)
    assert not membership.running and not membership.can_grow  # for as long as the other one hangs
    _, start = membership.worker_exited(workers[0], -9)
    for name in [*workers[1:], start.worker]:
        membership.worker_reported(name, 2)
        membership.worker_ready(name, survives_resize=True)
    assert membership.running and membership.scale_up.joining_workers_are_ready and not membership.has_scale_up_notice
    assert meet_guests(membership)[-1].generation == 3 and not membership.joining


def test_stopping_job_admits_no_joining_workers():
    membership, workers, _ = with_guests()
    membership.grow()
    assert membership.stop_requested(15) == []
    *others, last = workers
    assert [order for name in others for order in membership.worker_drained(name, 0)] == []
    assert membership.worker_drained(last, 0) == [Abort(1, Cause.JOB_STOPS)]


def test_dead_joining_worker_is_restarted_without_disruption():
    membership, workers = staying(3)
    membership.node_joined(3)
    first, second = names(membership.grow())
    assert membership.worker_exited(first, 1) == [Kill(3, second)]
    assert membership.running and len(names(membership.grow())) == 2


def test_loss_does_not_wait_for_joining_workers():
    membership, workers = staying(3)
    membership.node_joined(3)
    guests = names(membership.grow())
    *seats, abort = membership.node_lost(1)
    assert {seat.worker for seat in seats} == {*workers[:2], *workers[4:6]} and set(membership.joining) == set(guests)
    assert abort.cause is Cause.NODE_LOST and "2 of 4" in abort.reason


def departing(*nodes, spares=()):
    """A job of four nodes whose workers stay, some of whose nodes have asked to leave; its workers, and the orders."""
    membership, workers = staying()
    for name in workers:
        membership.worker_connected(name, 0)
    for node in spares:
        membership.node_joined(node)
    return membership, workers, [order for node in nodes for order in membership.departure_requested(node)]


def test_departing_nodes_leave_after_others_connect():
    membership, workers, orders = departing(1, 3, 1, spares=[4])
    assert orders == [] and membership.announce_departures() == [ChangeNotice(0, (1, 3))]
    assert not membership.has_departures_to_announce
    for name in workers:
        orders = membership.worker_drained(name, 0, membership.workers[name].node in (1, 3))
    assert {order.worker for order in orders if isinstance(order, Kill)} == {*workers[2:4], *workers[6:]}
    assert orders[-1] == Abort(1, Cause.NODE_DEPARTED) and "2 of 4" in orders[-1].reason
    left = [*workers[:2], *workers[4:6]]
    assert [order for name in left for order in membership.worker_reported(name, 1)] == [Connect(1)]
    connected = [order for name in left for order in membership.worker_connected(name, 1)]
    assert connected == [ReleaseNode(1), ReleaseNode(3)] and membership.node_lost(3) == []
    assert membership.can_grow and {order.node for order in membership.grow()} == {4}  # the spare


def test_departure_below_minimum_stops_the_job():
    membership, _, orders = departing(0, 1, 2)
    assert orders == [StopNode(0), StopNode(1), StopNode(2)] and not membership.has_departures_to_announce
    membership, _, orders = departing(4, spares=[4])
    assert orders == [ReleaseNode(4)] and membership.node_lost(4) == [] and membership.running


def test_lost_departing_node_is_named_in_abort_reason():
    membership, workers, _ = departing(1)
    membership.announce_departures()
    for name in workers[:3]:
        membership.worker_drained(name, 0, membership.workers[name].node == 1)
    assert "before it has moved its state" in membership.node_lost(1)[-1].reason
    assert not membership.departing
