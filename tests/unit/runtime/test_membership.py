"""Generations: whoever is lost is replaced or waited for, and the job becomes whole again or ends."""

import json

from moc.errors import codes_in
from moc.runtime.loss_record import unwritten
from moc.runtime.membership import MAX_DEVICE_FAILURES, MAX_FAILURES_WITHOUT_LOSS, Membership
from moc.runtime.orders import Abort, Cause, Connect, End, Kill, RemoveNode, StartWorker, WorkerRecord
from moc.runtime.termination import LOST, SAVED, START_OVER
from tests.cases import each_row

SIZE, PER_NODE = 4, 2


def begun(size=SIZE, per_node=PER_NODE, max_restarts=1000):
    membership, orders = Membership(size, per_node, max_restarts), []
    for node in range(size // per_node):
        orders += membership.node_joined(node)
    return membership, [order.worker for order in orders if isinstance(order, StartWorker)]


def running(**how):
    membership, names = begun(**how)
    orders = [order for name in names for order in membership.worker_reported(name, 0)]
    assert orders == [Connect(0)]
    for name in names:
        membership.worker_ready(name)
    return membership, names


def test_workers_start_together_when_all_nodes_joined():
    membership = Membership(SIZE, PER_NODE, 1)
    assert membership.node_joined(1) == []
    orders = membership.node_joined(0)
    assert [(order.node, order.rank) for order in orders] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(order.starts_together for order in orders)
    assert len({order.worker for order in orders}) == SIZE


def test_lost_worker_is_replaced_and_others_continue():
    membership, names = running()
    abort, start = membership.worker_exited(names[2], -9)
    assert abort == Abort(1, Cause.WORKER_LOST) and "worker 2" in abort.reason
    assert (start.rank, start.node, start.generation, start.starts_together) == (2, 1, 1, False)
    new = [names[0], names[1], start.worker, names[3]]
    assert [order for name in new for order in membership.worker_reported(name, 1)] == [Connect(1)]


def lose(membership, name, iteration):
    """Loses a worker; the others report an iteration, and the new generation runs. Returns the orders of the loss."""
    orders = membership.worker_exited(name, -9)
    for one in [*membership.workers] if membership.end is None else []:
        membership.worker_reported(one, membership.generation, iteration=iteration)
    return orders


def test_repeated_losses_at_one_iteration_end_job_naming_device():
    membership, _ = running()
    for iteration in (4, 4, 5, 6, 6):  # progress starts the count again
        assert not membership.end
        lose(membership, newest(membership, 3), iteration)
    membership = rejoined(membership)
    abort, _ = lose(membership, newest(membership, 3), 6)
    assert abort.lost.items() >= {"lost_after": 6, "lost_devices": [(1, 1)] * 3}.items()
    (end,) = lose(membership, newest(membership, 3), 6)
    assert end.code == 137 and codes_in(end.reason) == ["progress-missing"]
    assert all(name in end.reason for name in ("device 1", "node 1", "iteration 6"))


def rejoined(membership):
    """The membership of a controller that was started again."""
    workers, again = [*membership.workers.values()], restarted(membership)
    for node in range(SIZE // PER_NODE):
        again.node_joined(node, [one for one in workers if one.node == node], again.generation)
    for one in workers:
        again.worker_reported(one.name, again.generation)
    return again


def newest(membership, rank):
    return next(name for name, worker in membership.workers.items() if worker.rank == rank)


def test_losses_at_once_count_as_one():
    membership, names = running()
    for name in names:
        membership.worker_exited(name, -9, iteration=4)
    assert membership.end is None


@each_row("begin", [begun, running])  # before the workers are connected, and before they report an iteration
def test_losses_before_training_count_until_first_report(begin):
    membership, _ = begin()
    for iteration in (None, None, 0, None, None):  # 0: the workers have resumed
        assert not membership.end
        lose(membership, newest(membership, 2), iteration)
    (end,) = lose(membership, newest(membership, 2), None)
    assert end.code == 137 and codes_in(end.reason) == ["progress-missing"] and "node 1" in end.reason

    membership, _ = begin()
    for _ in range(3):
        assert not membership.end
        abort, *_ = lose(membership, newest(membership, 2), None)
    assert "lost_after" not in abort.lost and abort.lost["lost_devices"] == [(1, 0)] * 3
    (end,) = lose(membership, newest(membership, 2), None)
    assert codes_in(end.reason) == ["progress-missing"]


def breaks(membership, name):
    """A worker is lost to its device; the orders, and the names of the workers in its place."""
    orders = membership.worker_exited(name, -9, "has a broken device", error_code="device-broken")
    return orders, [order.worker for order in orders if isinstance(order, StartWorker)]


def test_node_of_repeatedly_failing_device_is_excluded():
    membership, names = running()
    membership.node_joined(2)  # a spare
    name = names[3]
    for _ in range(MAX_DEVICE_FAILURES - 1):
        (first, *_), (name,) = breaks(membership, name)
        assert isinstance(first, Abort)
        for each in (*names[:3], name):
            membership.worker_reported(each, membership.generation)
            membership.worker_connected(each, membership.generation)
    loaded = Membership(SIZE, PER_NODE, 1000)
    loaded.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    assert loaded.state_dict() == membership.state_dict()  # a successor goes on counting
    orders, started = breaks(membership, name)
    assert orders[0] == Kill(1, names[2])
    assert isinstance(orders[1], RemoveNode) and orders[1].node == 1
    assert codes_in(orders[1].reason) == ["device-broken"]
    assert all(name in orders[1].reason for name in ("worker 3", "signal 9", "device 1", "node 1"))
    assert orders[2].cause is Cause.NODE_GAVE_UP
    assert "node 1" in orders[2].reason and "node 2" in orders[2].reason
    assert len(started) == 2 and all(membership.workers[each].node == 2 for each in started)


def test_device_is_usable_after_generation_ends():
    membership, names = running()
    name = names[3]
    for number in range(3 * MAX_DEVICE_FAILURES):
        if number % 2:
            orders, started = breaks(membership, name)
        else:
            orders, started = membership.worker_exited(names[0], -9, iteration=number), []
        assert not any(isinstance(order, RemoveNode) for order in orders)
        if started:
            (name,) = started
        else:
            (names[0],) = (order.worker for order in orders if isinstance(order, StartWorker))
        for each in (*names[:3], name):
            membership.worker_ready(each)
            membership.worker_reported(each, membership.generation)
            membership.worker_connected(each, membership.generation)


def test_loss_during_joint_start_replaces_all_workers():
    membership, names = begun()
    for name in names:
        membership.worker_reported(name, 0)
    orders = membership.worker_exited(names[0], -9)
    assert [order.worker for order in orders if isinstance(order, Kill)] == names[1:]
    assert [order.rank for order in orders if isinstance(order, StartWorker) and order.starts_together] == [0, 1, 2, 3]
    assert membership.worker_exited(names[1], -9) == []  # it was told to die


def test_second_loss_before_reconnect_starts_next_generation():
    membership, names = running()
    first = membership.worker_exited(names[0], -9)[1]
    abort, second = membership.worker_exited(names[1], -11)
    assert abort.generation == 2 and second.rank == 1
    for name in (first.worker, names[2], names[3]):
        assert membership.worker_reported(name, 1) == []  # too late
        assert membership.worker_reported(name, 2) == []
    assert membership.worker_reported(second.worker, 2) == [Connect(2)]


def test_lost_node_is_awaited_and_its_workers_restarted():
    membership, names = running()
    orders = membership.node_lost(1)
    assert orders == [Abort(1, Cause.NODE_LOST)] and "node 1" in orders[0].reason
    assert [membership.worker_reported(name, 1) for name in names[:2]] == [[], []]
    orders = membership.node_joined(1)
    assert [order.rank for order in orders if isinstance(order, StartWorker)] == [2, 3]


def test_spare_replaces_lost_node_that_returns_as_spare():
    membership, names = running()
    assert membership.node_joined(7) == []
    abort, *starts = membership.node_lost(1)
    assert abort == Abort(1, Cause.NODE_LOST)
    assert "node 1" in abort.reason and "node 7" in abort.reason
    assert [(start.node, start.rank) for start in starts] == [(7, 2), (7, 3)]
    assert membership.node_joined(1) == [] == membership.missing_nodes()
    assert [(start.node, start.rank) for start in membership.node_lost(7)[1:]] == [(1, 2), (1, 3)]


def test_late_spare_replaces_lost_node():
    membership, names = running()
    membership.node_lost(1)
    assert membership.missing_nodes() == [1]
    assert [order.node for order in membership.node_joined(2) if isinstance(order, StartWorker)] == [2, 2]


def test_spare_does_not_replace_node_still_joining():
    membership = Membership(SIZE, PER_NODE, 1)
    assert membership.node_joined(0) == [] == membership.node_joined(2)
    assert membership.missing_nodes() == [1]
    assert [order.node for order in membership.node_joined(1)] == [0, 0, 1, 1]


def test_returning_lost_node_has_its_workers_ended():
    membership, names = running()
    membership.node_joined(2)
    membership.node_lost(1)
    told = [
        WorkerRecord(name, 1, rank, True, True, reported_generation=0) for rank, name in enumerate(names) if rank > 1
    ]
    assert membership.node_joined(1, told, 0) == [Kill(1, names[2]), Kill(1, names[3])]


def test_returning_node_gets_missed_orders():
    membership, names = running()
    membership.node_lost(1)
    told = [
        WorkerRecord(name, 1, rank, True, True, reported_generation=0) for rank, name in enumerate(names) if rank > 1
    ]
    assert membership.node_joined(1, told, 0) == [Abort(2, Cause.NODE_JOINED)]


def test_undetected_loss_of_rejoining_node_restarts_its_workers():
    membership, names = running()
    abort, *starts = membership.node_joined(1)
    assert [start.rank for start in starts] == [2, 3]


def test_job_ends_if_lost_node_does_not_return():
    membership, names = running()
    assert membership.end_if_nodes_missing("late") == []  # nobody is missing
    membership.node_lost(1)
    (end,) = membership.end_if_nodes_missing("late")
    assert end.code == SAVED and not end.workers_exiting and "node 1" in end.reason
    assert codes_in(end.reason) == ["nodes-missing"]
    assert membership.missing_nodes() == []
    membership = Membership(SIZE, PER_NODE, 1)
    membership.node_joined(0)
    assert membership.end_if_nodes_missing("late")[0].code == LOST


def test_node_lost_after_its_workers_finish_is_ignored():
    membership, names = running()
    for name in names[2:]:
        membership.worker_exited(name, 0)
    assert membership.node_lost(1) == []
    assert [membership.worker_exited(name, 0) for name in names[:2]] == [[], [End(0, "", True)]]


def test_memory_is_released_after_successful_end():
    for code in (0, SAVED):
        membership, names = running()
        for name in names:
            membership.worker_exited(name, code, "", "/dev/shm/moc-0/run")
        assert (membership.end.code, membership.end.released_memory) == (code, "/dev/shm/moc-0/run")
        again = Membership(SIZE, PER_NODE, 1)
        again.load_state_dict(json.loads(json.dumps(membership.state_dict())))
        assert again.end == membership.end  # nodes that were away hear of it from another controller, too


def test_memory_is_kept_unless_job_ends_successfully():
    membership, names = running()
    membership.worker_exited(names[0], 0, "", "/dev/shm/moc-0/run")
    assert membership.worker_exited(names[1], 3, "", "/dev/shm/moc-0/run")[0].released_memory is None
    membership, names = running()
    membership.worker_exited(names[0], 0, "", "/dev/shm/moc-0/run")
    starts = [order for order in membership.worker_exited(names[1], -9) if isinstance(order, StartWorker)]
    membership.node_lost(1)
    assert starts and membership.end_if_nodes_missing("late")[0] == membership.end
    assert membership.end.code == SAVED and membership.end.released_memory is None


def test_node_absent_at_end_receives_end_order_on_return():
    membership, names = running()
    membership.node_lost(1)
    (end,) = membership.worker_exited(names[0], 1)
    assert membership.node_joined(1) == [end]
    assert restarted(membership).node_joined(1) == [end]


def restarted(membership):
    """A controller that takes up what another has left on disk."""
    other = Membership(membership.size, membership.workers_per_node, membership.max_restarts)
    other.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    return other


def test_restarted_controller_keeps_restart_counts():
    membership, names = running(max_restarts=2)
    membership.worker_blocked(names[0], 0)
    membership.worker_exited(names[0], -9)
    membership.worker_blocked(names[1], 2)
    membership = restarted(membership)
    assert (membership.generation, membership.restarts, membership.failures_without_loss) == (3, 1, 1)
    membership.stop_requested(15)
    told = [
        WorkerRecord(f"3.{rank}", rank // PER_NODE, rank, True, True, reported_generation=3, connected_generation=3)
        for rank in range(SIZE)
    ]
    membership = restarted(membership)
    assert membership.node_joined(0, told[:2], 3) == [] == membership.node_joined(1, told[2:], 3)
    assert membership.worker_exited("3.0", -15)[0].code == 143


def lost_with(orders):
    """Ranks or nodes of the losses that an order to abort describes, oldest first."""
    abort = next(order for order in orders if isinstance(order, Abort))
    return [loss.get("rank", loss.get("node")) for loss in (*abort.lost.get("earlier", ()), abort.lost)]


def test_losses_are_kept_until_the_first_worker_records_them():
    membership, names = running()
    assert lost_with(membership.worker_exited(names[3], -9)) == [3]
    assert lost_with(membership.node_lost(1)) == [3, 1]
    membership = restarted(membership)
    for node in range(2):
        records = [WorkerRecord(f"2.{rank}", node, rank, False, True) for rank in (2 * node, 2 * node + 1)]
        membership.node_joined(node, records, 2)
    assert lost_with(membership.worker_exited("2.1", -9)) == [3, 1, 1]
    for name in list(membership.workers):
        membership.worker_reported(name, membership.generation)
        membership.worker_connected(name, membership.generation)
    first = next(one.name for one in membership.workers.values() if one.rank == 0)
    other = next(one.name for one in membership.workers.values() if one.rank == 2)
    assert lost_with(membership.worker_exited(other, -9)) == [2]  # rank 0 has written what was before
    (end,) = membership.worker_exited(first, 3)
    assert [loss["rank"] for loss in end.losses] == [2, 0]


def test_losses_recorded_by_a_lost_first_worker_are_left_out():
    membership, names = running()
    membership.worker_exited(names[1], -9)
    for name in list(membership.workers):
        membership.worker_reported(name, 1)
        membership.worker_connected(name, 1)
    abort = membership.worker_exited(names[0], -9)[0]
    assert [loss["generation"] for loss in abort.lost["earlier"]] == [1]
    for newest, left in (({"generation": 1, "job": "a"}, []), ({"generation": 7, "job": "b"}, [1]), ({}, [1])):
        assert [loss["generation"] for loss in unwritten(abort.lost["earlier"], newest, "a")] == left


def test_restarted_controller_does_not_wait_for_joining_nodes():
    membership, names = running()
    membership.node_joined(2)
    membership = restarted(membership)
    assert membership.node_joined(2) == [] == membership.missing_nodes()
    first = membership.node_lost(1)[0]
    assert first == Abort(1, Cause.NODE_LOST) and "node 2" in first.reason
    assert membership.node_lost(1) == []


def test_abort_missed_by_node_starts_generation_after_restart():
    membership, names = running()
    told = [
        WorkerRecord(name, rank // PER_NODE, rank, True, True, reported_generation=0) for rank, name in enumerate(names)
    ]
    membership.worker_blocked(names[0], 0)  # and dies before node 0 has heard of it
    for last in (0, 1):
        again = restarted(membership)
        assert again.node_joined(1 - last, told[2 - 2 * last : 4 - 2 * last], 1 - last) == []
        assert again.node_joined(last, told[2 * last : 2 * last + 2], last)[0].generation == 2


def test_restarted_controller_restores_job_state():
    membership = Membership(SIZE, PER_NODE, 1)
    told = [
        WorkerRecord(f"5.{rank}", rank // PER_NODE, rank, True, True, reported_generation=5, connected_generation=5)
        for rank in range(SIZE)
    ]
    assert membership.node_joined(1, told[2:], 5) == [] == membership.node_joined(0, told[:2], 5)
    assert membership.running and membership.generation == 5
    assert [type(order) for order in membership.worker_exited("5.3", -9)] == [Abort, StartWorker]


def test_uncertain_departure_starts_generation():
    membership, names = begun()
    told = [
        WorkerRecord(name, rank // PER_NODE, rank, True, True, reported_generation=0) for rank, name in enumerate(names)
    ]
    membership = restarted(membership)
    assert membership.node_joined(0, told[:2], 0) == []
    assert membership.node_joined(1, told[2:], 0)[0].generation == 1


def test_repeated_report_repeats_connect_order():
    membership, names = running()
    assert membership.worker_reported(names[1], 0) == [Connect(0)] and membership.generation == 0


def test_new_controller_replaces_worker_missing_from_records():
    membership = Membership(SIZE, PER_NODE, 1)
    told = [
        WorkerRecord(f"5.{rank}", rank // PER_NODE, rank, True, True, reported_generation=5) for rank in range(SIZE)
    ]
    membership.node_joined(1, told[2:3], 5)
    orders = membership.node_joined(0, told[:2], 5)
    assert orders[0].generation == 6 and orders[1].rank == 3 and not orders[1].starts_together


@each_row(
    "code, restarts, job, errors",
    [
        (-9, 0, 137, ["restarts-exhausted"]),
        (1, 9, 1, []),
        (75, 9, 75, []),
    ],
)
def test_worker_exit_without_restart_ends_job(code, restarts, job, errors):
    membership, names = running(max_restarts=restarts)
    (end,) = membership.worker_exited(names[0], code)
    assert end.code == job and codes_in(end.reason) == errors and "worker 0" in end.reason
    assert membership.worker_exited(names[1], -9) == []


def test_job_succeeds_when_all_workers_exit_with_0():
    membership, names = running()
    assert [membership.worker_exited(name, 0) for name in names] == [[], [], [], [End(0, "", True)]]


def test_loss_restarts_finished_workers_too():
    membership, names = running()
    membership.worker_exited(names[0], 0)
    orders = membership.worker_exited(names[1], -9)
    assert [order.rank for order in orders if isinstance(order, StartWorker)] == [0, 1]


def test_repeated_connection_failures_end_job():
    membership, names = running()
    for generation in range(MAX_FAILURES_WITHOUT_LOSS):
        assert membership.worker_blocked(names[0], generation) == [Abort(generation + 1, Cause.CONNECTIONS_LOST)]
    assert membership.worker_blocked(names[0], 0) == []  # of a generation that is over
    assert membership.worker_blocked(names[0], MAX_FAILURES_WITHOUT_LOSS)[0].code == 1


def test_worker_loss_resets_connection_failure_count():
    membership, names = running()
    for generation in range(MAX_FAILURES_WITHOUT_LOSS):
        membership.worker_blocked(names[0], generation)
    membership.worker_exited(names[1], -9)
    assert isinstance(membership.worker_blocked(names[0], MAX_FAILURES_WITHOUT_LOSS + 1)[0], Abort)


def test_forgotten_connection_failures_do_not_end_job():
    membership, names = running()
    for generation in range(MAX_FAILURES_WITHOUT_LOSS):
        membership.worker_blocked(names[0], generation)
    membership.forget_failures()
    assert isinstance(membership.worker_blocked(names[0], MAX_FAILURES_WITHOUT_LOSS)[0], Abort)


def test_abort_reason_names_cause_of_worker_kill():
    membership, names = running()
    (abort, _) = membership.worker_exited(names[1], -9, "was in its step for 70 s")
    assert abort.cause is Cause.WORKER_LOST and "worker 1" in abort.reason and "70 s" in abort.reason


def test_program_ended_by_stop_signal_ends_job():
    membership, names = running()
    membership.stop_requested(15)
    (end,) = membership.worker_exited(names[0], -15)
    assert end == End(143, end.reason, False, stop_signal=15) and "worker 0" in end.reason and "signal 15" in end.reason


def test_worker_lost_before_save_is_replaced():
    membership, names = running()
    membership.stop_requested(15)
    _, start = membership.worker_exited(names[0], -9)
    _, start = membership.worker_exited(start.worker, -15)  # of the signal, before it could know what that means
    assert start.rank == 0 and not start.starts_together
    for name in (start.worker, *names[1:]):
        orders = membership.worker_reported(name, 2)
    assert orders == [Connect(2)]
    membership.worker_ready(start.worker)
    assert membership.worker_exited(names[1], SAVED)[0].workers_exiting


def test_no_survivor_to_save_reports_resume_point():
    membership, names = running()
    _, start = membership.worker_exited(names[0], -9)
    membership.stop_requested(15)
    for name in names[1:-1]:
        membership.worker_exited(name, -9)
    (end,) = membership.worker_exited(names[-1], -9)
    assert end.code == 137
    membership, names = begun()
    _, *starts = membership.worker_exited(names[0], -9)[-SIZE - 1 :]  # all build anew
    membership.stop_requested(15)
    (end,) = membership.worker_exited(starts[0].worker, -15)
    assert (end.code, end.workers_exiting) == (SAVED, False) and codes_in(end.reason) == ["state-partly-lost"]


def test_stopping_job_does_not_start_over():
    membership, names = running()
    membership.stop_requested(15)
    (end,) = membership.worker_exited(names[0], START_OVER)
    assert end.code == SAVED and codes_in(end.reason) == ["state-partly-lost"]


def test_job_stopped_before_start_ends():
    membership = Membership(SIZE, PER_NODE, 1000)
    membership.node_joined(0)
    (end,) = membership.stop_requested(2)
    assert end == End(130, end.reason, False, stop_signal=2) and "signal 2" in end.reason

    membership = Membership(SIZE, PER_NODE, 1000)
    assert membership.node_joined(0, stop_signal=15)[0].code == 143


def test_stopping_job_ends_if_lost_node_stays_absent():
    membership, _ = running()
    membership.node_lost(1)
    assert membership.stop_requested(15) == []
    (end,) = membership.end_if_nodes_missing("no node has connected for 30 s (--silence-timeout)")
    assert end == End(SAVED, end.reason, False) and codes_in(end.reason) == ["nodes-missing"]
    assert "node 1" in end.reason and "--silence-timeout" in end.reason


def test_stopping_job_readmits_returning_node():
    membership, names = running()
    assert membership.stop_requested(15) == []
    left = membership.node_lost(0)
    has = [trains(name, rank) for rank, name in enumerate(names[:PER_NODE])]
    assert left[0].generation == 1 and membership.node_joined(0, has, 0, stop_signal=15)[0].generation == 2
    assert membership.end is None and membership.stop_signal == 15


def test_restarted_controller_does_not_end_the_job():
    membership, names = running()
    membership = restarted(membership)
    has = [trains(name, rank) for rank, name in enumerate(names[:PER_NODE])]
    assert membership.node_joined(0, has, 0, stop_signal=15) == []


def trains(name, rank):
    return WorkerRecord(name, rank // PER_NODE, rank, True, True, reported_generation=0)
