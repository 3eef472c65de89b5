"""A job of MIN to MAX nodes: it continues on those that are left, and takes in those that come."""

import json

from moc.runtime.membership import Membership
from moc.runtime.orders import Abort, Cause, Connect, End, Kill, SaveAndExit, StartWorker, WorkerRecord
from moc.runtime.termination import SAVED, USAGE
from tests.unit.runtime.members import LEAST, PER_NODE, PLACES, begun, names, starts, told_of


def test_job_starts_with_connected_nodes():
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    assert membership.node_joined(3) == [] and not membership.can_grow and membership.missing_nodes() == [0, 1, 2]
    assert membership.node_joined(1) == [] and membership.can_grow and membership.missing_nodes() == []
    begin = starts(membership.grow())
    assert [(order.node, order.rank, order.size) for order in begin] == [(1, 0, 4), (1, 1, 4), (3, 2, 4), (3, 3, 4)]
    assert not membership.can_grow


def test_lost_node_is_removed_without_waiting():
    membership, workers = begun()
    *kills, abort = (order for order in membership.node_lost(1) if not isinstance(order, StartWorker))
    assert abort == Abort(1, Cause.NODE_LOST) and "3 of 4" in abort.reason
    assert {order.worker for order in kills} == set(workers[:2] + workers[4:])
    assert [(w.node, w.rank) for w in membership.workers.values()] == [(0, 0), (0, 1), (2, 2), (2, 3), (3, 4), (3, 5)]
    assert membership.size == 6 and all(worker.starts_together for worker in membership.workers.values())


def test_lost_worker_of_smaller_job_is_replaced():
    membership, _ = begun()
    told_of(membership, membership.node_lost(1))
    lost = next(worker for worker in membership.workers.values() if worker.rank == 2)
    _, start = membership.worker_exited(lost.name, -9)
    assert (start.node, start.rank, start.size, start.starts_together) == (2, 2, 6, False)


def test_spare_replaces_lost_node_and_others_stay():
    membership, _ = begun()
    membership.node_joined(4)
    abort, *start = membership.node_lost(1)
    assert abort.cause is Cause.NODE_LOST and "node 1" in abort.reason and "node 4" in abort.reason
    assert [(order.node, order.rank) for order in start] == [(4, 2), (4, 3)]


def test_too_few_nodes_wait_and_continue_unchanged():
    membership, _ = begun(2)
    abort = membership.node_lost(1)
    assert abort == [Abort(1, Cause.NODE_LOST)] and membership.missing_nodes() == [1, 2, 3]
    assert [(order.node, order.rank) for order in starts(membership.node_joined(1))] == [(1, 2), (1, 3)]
    assert len(membership.workers) == 4 and membership.size == 4


def test_job_below_minimum_continues_with_other_node():
    membership, _ = begun(2)
    membership.node_lost(1)
    assert [(order.node, order.rank) for order in starts(membership.node_joined(3))] == [(0, 0), (0, 1), (3, 2), (3, 3)]


def test_joining_node_is_admitted_after_all_workers_saved():
    membership, _ = begun()
    workers = names(membership.node_lost(1))
    assert not membership.can_grow
    for name in workers:
        membership.worker_reported(name, 1)
    assert membership.node_joined(1) == [] and membership.can_grow and membership.scale_up.all_arrived
    assert membership.grow() == [SaveAndExit()]
    for name in workers[:-1]:
        assert membership.worker_exited(name, SAVED, released_memory="/memory") == []
    orders = membership.worker_exited(workers[-1], SAVED)
    assert orders[0] == Abort(2, Cause.NODES_ARRIVED) and "4 of 4" in orders[0].reason
    assert [order.rank for order in starts(orders)] == list(range(8)) and not membership.scale_up.in_progress
    assert membership.restarts == 0


def test_workers_that_do_not_exit_are_killed():
    membership, workers = begun(3)
    membership.node_joined(3)
    assert membership.grow() == [SaveAndExit()] and membership.can_grow
    membership.worker_exited(workers[0], SAVED)
    orders = membership.grow()
    assert [order.worker for order in orders if isinstance(order, Kill)] == workers[1:]
    assert len(starts(orders)) == 8


def test_loss_during_save_and_exit_admits_nodes_at_once():
    for lost in (lambda m, w: m.worker_exited(w[3], -9), lambda m, w: m.node_lost(1)):
        membership, workers = begun(3)
        membership.node_joined(3)
        membership.grow()
        membership.worker_exited(workers[0], SAVED)
        assert starts(lost(membership, workers)) and not membership.scale_up.in_progress


def test_finished_job_admits_no_node():
    membership, workers = begun(3)
    membership.node_joined(3)
    membership.grow()
    orders = [order for name in workers for order in membership.worker_exited(name, 0)]
    assert orders == [End(0, "", workers_exiting=True)]


def test_returning_abandoned_node_has_its_workers_ended():
    membership, workers = begun()
    stale = [WorkerRecord.from_message(w.to_message()) for w in membership.workers.values() if w.node == 1]
    told_of(membership, membership.node_lost(1))
    assert membership.node_joined(1, stale) == [Kill(1, workers[2]), Kill(1, workers[3])]


def test_new_controller_continues_with_known_nodes():
    membership, _ = begun()
    there = told_of(membership, membership.node_lost(1))
    kept = json.loads(json.dumps(membership.state_dict()))
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    membership.load_state_dict(kept)
    assert [membership.node_joined(node, there[node], 1) for node in (2, 0, 3)] == [[], [], []] and membership.running


def test_new_controller_continues_without_absent_node():
    membership, _ = begun()
    there = told_of(membership, membership.node_lost(1))
    kept = json.loads(json.dumps(membership.state_dict()))
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    membership.load_state_dict(kept)
    assert membership.node_joined(2, there[2], 1) == membership.node_joined(0, there[0], 1) == []
    assert [order.rank for order in starts(membership.node_lost(3))] == [0, 1, 2, 3]


def test_program_that_refuses_node_count_starts_on_fewer():
    membership, _ = begun()
    workers = names(membership.node_lost(1))
    orders = membership.worker_exited(workers[0], USAGE)
    assert [order.node for order in starts(orders)] == [0, 0, 2, 2]
    (abort,) = [order for order in orders if isinstance(order, Abort)]
    assert abort.cause is Cause.NODES_REFUSED and "3 nodes" in abort.reason and "2 of 4" in abort.reason
    told_of(membership, orders)
    assert not membership.can_grow  # on three, that is
    membership.node_joined(1)
    assert membership.can_grow and membership.grow() == [SaveAndExit()]


def test_program_that_refuses_every_node_count_ends_job():
    membership, workers = begun()
    (end,) = membership.worker_exited(workers[0], USAGE)
    assert end == End(USAGE, end.reason, workers_exiting=False) and "worker 0" in end.reason


def test_waiting_workers_of_same_generation_connect():
    membership, _ = begun()
    workers = names(membership.node_lost(1))
    assert [order for name in workers for order in membership.worker_reported(name, 1)] == [Connect(1)]
