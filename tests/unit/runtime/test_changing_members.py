"""A job of MIN to MAX nodes: it continues on those that are left, and takes in those that come."""

import json

import pytest

from moc.runtime.membership import (
    SAVED,
    USAGE,
    Abort,
    End,
    Go,
    Kill,
    Leave,
    Membership,
    Seat,
    StartWorker,
    Welcome,
    Worker,
)

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
        membership.here(name, membership.generation)
        membership.built(name)
        membership.met(name, membership.generation)
    return {node: [Worker(**w.told) for w in workers.values() if w.node == node] for node in range(PLACES + 1)}


def begun(nodes=PLACES):
    """A job that trains on the first nodes, and the names of its workers."""
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    for node in range(nodes):
        assert membership.joined(node) == []
    orders = membership.grow()
    told_of(membership, orders)
    assert membership.running
    return membership, names(orders)


def test_it_begins_with_the_nodes_that_are_there():
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    assert membership.joined(3) == [] and not membership.can_grow and membership.waits_for() == [0, 1, 2]
    assert membership.joined(1) == [] and membership.can_grow and membership.waits_for() == []
    begin = starts(membership.grow())
    assert [(order.node, order.rank, order.size) for order in begin] == [(1, 0, 4), (1, 1, 4), (3, 2, 4), (3, 3, 4)]
    assert not membership.can_grow


def test_a_lost_node_is_not_waited_for():
    membership, workers = begun()
    *kills, abort = (order for order in membership.left(1) if not isinstance(order, StartWorker))
    assert abort == Abort(1, "node 1 is lost: training continues on 3 of 4 nodes")
    assert {order.worker for order in kills} == set(workers[:2] + workers[4:])
    assert [(w.node, w.rank) for w in membership.workers.values()] == [(0, 0), (0, 1), (2, 2), (2, 3), (3, 4), (3, 5)]
    assert membership.size == 6 and all(worker.together for worker in membership.workers.values())


def test_a_lost_worker_of_fewer_nodes_is_replaced_and_the_others_stay():
    membership, _ = begun()
    told_of(membership, membership.left(1))
    lost = next(worker for worker in membership.workers.values() if worker.rank == 2)
    _, start = membership.ended(lost.name, -9)
    assert (start.node, start.rank, start.size, start.together) == (2, 2, 6, False)


def test_a_spare_takes_the_place_of_a_lost_node_and_the_others_stay():
    membership, _ = begun()
    membership.joined(4)
    abort, *start = membership.left(1)
    assert abort.reason == "node 1 is lost, and node 4 takes its place"
    assert [(order.node, order.rank) for order in start] == [(4, 2), (4, 3)]


def test_too_few_nodes_wait_and_go_on_as_they_were_when_the_same_come_back():
    membership, _ = begun(2)
    abort = membership.left(1)
    assert abort == [Abort(1, "node 1 is lost")] and membership.waits_for() == [1, 2, 3]
    assert [(order.node, order.rank) for order in starts(membership.joined(1))] == [(1, 2), (1, 3)]
    assert len(membership.workers) == 4 and membership.size == 4


def test_too_few_nodes_go_on_with_others():
    membership, _ = begun(2)
    membership.left(1)
    assert [(order.node, order.rank) for order in starts(membership.joined(3))] == [(0, 0), (0, 1), (3, 2), (3, 3)]


def test_a_node_that_comes_is_taken_in_once_all_have_saved():
    membership, _ = begun()
    workers = names(membership.left(1))
    assert not membership.can_grow
    for name in workers:
        membership.here(name, 1)
    assert membership.joined(1) == [] and membership.can_grow and membership.need_not_wait
    assert membership.grow() == [Leave()]
    for name in workers[:-1]:
        assert membership.ended(name, SAVED, gives_back="/memory") == []
    orders = membership.ended(workers[-1], SAVED)
    assert orders[0] == Abort(2, "nodes have come: training continues on 4 of 4 nodes")
    assert [order.rank for order in starts(orders)] == list(range(8)) and not membership.is_growing
    assert membership.restarts == 0


def test_workers_that_do_not_leave_are_killed():
    membership, workers = begun(3)
    membership.joined(3)
    assert membership.grow() == [Leave()] and membership.can_grow
    membership.ended(workers[0], SAVED)
    orders = membership.grow()
    assert [order.worker for order in orders if isinstance(order, Kill)] == workers[1:]
    assert len(starts(orders)) == 8


def test_a_loss_while_workers_leave_takes_in_the_nodes_at_once():
    for lost in (lambda m, w: m.ended(w[3], -9), lambda m, w: m.left(1)):
        membership, workers = begun(3)
        membership.joined(3)
        membership.grow()
        membership.ended(workers[0], SAVED)
        assert starts(lost(membership, workers)) and not membership.is_growing


def test_a_job_that_has_finished_takes_in_nobody():
    membership, workers = begun(3)
    membership.joined(3)
    membership.grow()
    orders = [order for name in workers for order in membership.ended(name, 0)]
    assert orders == [End(0, "", leaving=True)]


def test_a_node_that_was_given_up_comes_back_with_workers_that_nobody_wants():
    membership, workers = begun()
    stale = [Worker(**w.told) for w in membership.workers.values() if w.node == 1]
    told_of(membership, membership.left(1))
    assert membership.joined(1, stale) == [Kill(1, workers[2]), Kill(1, workers[3])]


def test_a_new_controller_gives_up_nobody_before_it_is_lost():
    membership, _ = begun()
    there = told_of(membership, membership.left(1))
    kept = json.loads(json.dumps(membership.state_dict()))
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    membership.load_state_dict(kept)
    assert [membership.joined(node, there[node], 1) for node in (2, 0, 3)] == [[], [], []] and membership.running


def test_a_new_controller_continues_without_a_node_that_does_not_come():
    membership, _ = begun()
    there = told_of(membership, membership.left(1))
    kept = json.loads(json.dumps(membership.state_dict()))
    membership = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    membership.load_state_dict(kept)
    assert membership.joined(2, there[2], 1) == membership.joined(0, there[0], 1) == []
    assert [order.rank for order in starts(membership.left(3))] == [0, 1, 2, 3]


def test_a_program_that_refuses_a_number_of_nodes_is_started_on_fewer():
    membership, _ = begun()
    workers = names(membership.left(1))
    orders = membership.ended(workers[0], USAGE)
    assert [order.node for order in starts(orders)] == [0, 0, 2, 2]
    assert "the program refuses to run on 3 nodes: training continues on 2 of 4 nodes" in str(orders)
    told_of(membership, orders)
    assert not membership.can_grow  # on three, that is
    membership.joined(1)
    assert membership.can_grow and membership.grow() == [Leave()]


def test_a_program_that_refuses_any_number_ends_the_job():
    membership, workers = begun()
    assert membership.ended(workers[0], USAGE) == [End(USAGE, "worker 0 failed (exit code 2)", leaving=False)]


def test_who_waits_in_the_same_generation_is_told_to_go():
    membership, _ = begun()
    workers = names(membership.left(1))
    assert [order for name in workers for order in membership.here(name, 1)] == [Go(1)]


def staying(nodes=PLACES):
    """A job whose workers stay, and their names by rank."""
    membership, workers = begun(nodes)
    for name in workers:
        membership.built(name, stays=True)
    return membership, workers


def test_workers_that_stay_get_other_ranks_and_nobody_is_started():
    membership, workers = staying()
    *seats, abort = membership.left(1)
    assert seats == [Seat(n // 2, workers[n], rank, 1, 6) for rank, n in enumerate((0, 1, 4, 5, 6, 7))]
    assert abort == Abort(1, "node 1 is lost: training continues on 3 of 4 nodes")
    assert [order for name in (*workers[:2], *workers[4:]) for order in membership.here(name, 1)] == [Go(1)]


def test_workers_of_a_node_that_comes_build_beside_the_others_and_are_seated_when_all_are_ready():
    membership, workers = staying()
    membership.left(1)
    for name in (*workers[:2], *workers[4:]):
        membership.here(name, 1)
    membership.joined(1)
    guests = membership.grow()
    assert [(order.node, order.rank, order.size, order.guest) for order in guests] == [(1, 2, 8, True), (1, 3, 8, True)]
    assert membership.grow() == [] and membership.is_growing and membership.running
    membership.built(guests[0].worker, stays=True)
    assert not membership.guests_are_ready
    membership.built(guests[1].worker, stays=True)
    assert membership.guests_are_ready
    *seats, abort = meet_guests(membership)
    assert sorted((seat.rank, seat.node) for seat in seats) == [(rank, rank // 2) for rank in range(8)]
    assert abort.reason == "nodes have come: training continues on 4 of 4 nodes" and not membership.guests


def meet_guests(membership):
    """All workers leave at the end of an iteration; the orders that follow when the last one has."""
    generation = membership.generation
    assert membership.grow() == [Welcome(generation)] and membership.welcomes_guests
    *others, last = membership.workers
    assert [order for name in others for order in membership.parted(name, generation)] == []
    assert membership.generation == generation and membership.running
    return membership.parted(last, generation)


def with_guests():
    """A job of three nodes, its workers, and the names of a fourth one's guests, which are ready."""
    membership, workers = staying(3)
    membership.joined(3)
    guests = names(membership.grow())
    for name in guests:
        membership.built(name, stays=True)
    assert membership.guests_are_ready
    return membership, workers, guests


def test_until_all_workers_have_parted_the_generation_goes_on_and_another_controller_knows_who_has():
    membership, workers, _ = with_guests()
    assert membership.grow() == [Welcome(0)] == membership.grow()  # again, for those that have not heard it
    for name in workers[:-1]:
        assert membership.parted(name, 0) == [] == membership.parted(name, 0)
    again = Membership(PLACES * PER_NODE, PER_NODE, 1000, LEAST)
    again.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    for node in range(PLACES):
        there = [*membership.workers.values(), *membership.guests.values()]
        assert again.joined(node, [Worker(**worker.told) for worker in there if worker.node == node], 0) == []
    assert again.running and again.guests_are_ready and not again.welcomes_guests  # it tells so itself
    assert again.parted(workers[-1], 0)[-1].reason == "nodes have come: training continues on 4 of 4 nodes"
    assert again.parted(workers[-1], 0) == [] and again.generation == 1  # of a generation that is over


def test_where_guests_are_lost_before_all_have_parted_the_others_meet_again_and_guests_are_started_again():
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[:-1]:
        membership.parted(name, 0)
    membership.ended(guests[0], -9)
    assert membership.parted(workers[-1], 0) == [Abort(1, "nodes that were ready are gone again")]
    for name in workers:
        membership.here(name, 1)
    assert membership.running and membership.can_grow and membership.need_not_wait and not membership.is_growing
    assert len(names(membership.grow())) == 2


@pytest.mark.parametrize("parted", [0, 3, 5])
def test_a_node_that_is_lost_before_all_have_parted_is_left_behind_and_the_guests_are_seated(parted):
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[:parted]:
        membership.parted(name, 0)
    *seats, abort = membership.left(1)
    assert abort == Abort(1, "node 1 is lost: training continues on 3 of 4 nodes")
    assert {seat.worker for seat in seats} == {*workers[:2], *workers[4:], *guests}
    left = [workers[0], *workers[4:], *guests]
    assert [order for name in [workers[1], *left] for order in membership.here(name, 1)] == [Go(1)]
    assert membership.parted(workers[0], 0) == [] and membership.running and not membership.welcomes_guests


def test_a_worker_that_is_lost_or_hangs_before_it_has_parted_begins_a_generation_and_guests_come_after_it():
    membership, workers, guests = with_guests()
    membership.grow()
    for name in workers[1:]:
        membership.parted(name, 0)
    assert membership.suspected(workers[0], 0, "has been in its step for 60 s") == [
        Abort(1, "worker 0 has been in its step for 60 s")
    ]
    for name in workers[1:]:
        membership.here(name, 1)
    assert not membership.running and not membership.can_grow  # for as long as the other one hangs
    _, start = membership.ended(workers[0], -9)
    for name in [*workers[1:], start.worker]:
        membership.here(name, 2)
        membership.built(name, stays=True)
    assert membership.running and membership.guests_are_ready and not membership.welcomes_guests
    assert meet_guests(membership)[-1].generation == 3 and not membership.guests


def test_a_job_that_is_to_stop_meets_nobody():
    membership, workers, _ = with_guests()
    membership.grow()
    assert membership.stopping(15) == []
    *others, last = workers
    assert [order for name in others for order in membership.parted(name, 0)] == []
    assert membership.parted(last, 0) == [Abort(1, "the job is to stop, and meets no more")]


def test_a_guest_that_dies_disturbs_nobody_and_is_started_again():
    membership, workers = staying(3)
    membership.joined(3)
    first, second = names(membership.grow())
    assert membership.ended(first, 1) == [Kill(3, second)]
    assert membership.running and len(names(membership.grow())) == 2


def test_a_loss_while_guests_build_does_not_wait_for_them():
    membership, workers = staying(3)
    membership.joined(3)
    guests = names(membership.grow())
    *seats, abort = membership.left(1)
    assert {seat.worker for seat in seats} == {*workers[:2], *workers[4:6]} and set(membership.guests) == set(guests)
    assert abort.reason == "node 1 is lost: training continues on 2 of 4 nodes"


def spread(nodes=4, least=2):
    """A job whose model takes two nodes of a worker each, and the names of its workers by node."""
    membership = Membership(nodes, 1, 1000, least)
    for node in range(nodes):
        membership.joined(node)
    orders = membership.grow()
    if nodes % 2:
        orders = membership.here(names(orders)[0], 0, 2)
    workers = train(membership, names(orders))
    return membership, workers


def train(membership, waiting):
    """All workers that wait go on; returns those of the job by node."""
    for name in [*waiting, *membership.workers]:
        membership.here(name, membership.generation, 2)
        membership.built(name, stays=True)
    assert membership.running
    return {worker.node: name for name, worker in membership.workers.items()}


def test_a_node_too_many_for_whole_copies_waits():
    membership, workers = spread(5)
    assert set(workers) == {0, 1, 2, 3} and not membership.can_grow and membership.seating.parts == 2
    assert membership.left(4) == [] and membership.running


def test_where_a_copy_takes_two_nodes_the_partner_of_a_lost_one_helps_until_that_comes_back():
    membership, workers = spread()
    *seats, abort = membership.left(2)
    assert [(order.node, order.rank, order.size, order.helpers) for order in seats] == [
        (0, 0, 3, (1,)),
        (1, 1, 3, (1,)),
        (3, 2, 3, (1,)),
    ]
    assert abort.reason == "node 2 is lost: training continues on 3 of 4 nodes, 1 of which helps"
    train(membership, [])
    assert not membership.can_grow and not membership.need_not_wait
    membership.joined(2)
    guests = starts(membership.grow())
    assert [(order.node, order.rank, order.size, order.guest) for order in guests] == [(2, 2, 4, True)]
    membership.built(guests[0].worker, stays=True)
    assert membership.guests_are_ready
    *seats, abort = meet_guests(membership)
    assert [(order.node, order.rank, order.helpers) for order in seats if order.node != 2] == [
        (0, 0, ()),
        (1, 1, ()),
        (3, 3, ()),
    ]
    assert abort.reason == "nodes have come: training continues on 4 of 4 nodes"
    assert {*workers.values()} - {workers[2]} < {*membership.workers}


def test_a_node_that_helps_takes_the_seat_of_a_lost_one_and_no_worker_is_started():
    membership, workers = spread()
    membership.left(2)
    train(membership, [])
    *seats, abort = membership.left(1)
    assert [(order.node, order.worker, order.rank, order.helpers) for order in seats] == [
        (0, workers[0], 0, ()),
        (3, workers[3], 1, ()),
    ]
    assert abort.reason == "node 1 is lost: training continues on 2 of 4 nodes"


def test_a_node_that_helps_is_lost_and_a_worker_of_it_is_replaced():
    membership, workers = spread()
    membership.left(2)
    train(membership, [])
    abort, start = membership.ended(workers[3], -9)
    assert (start.node, start.rank, start.size, start.together, start.helpers) == (3, 2, 3, False, (1,))
    train(membership, [start.worker])
    *seats, abort = membership.left(3)
    assert [(order.node, order.rank, order.size, order.helpers) for order in seats] == [(0, 0, 2, ()), (1, 1, 2, ())]


def test_where_nobody_is_left_who_has_built_nobody_helps():
    membership, workers = spread()
    membership.left(2)
    for node in (0, 1):
        membership.ended(workers[node], -9)
    orders = membership.ended(workers[3], -9)
    assert [(order.node, order.rank, order.size, order.helpers) for order in starts(orders)] == [
        (0, 0, 2, ()),
        (1, 1, 2, ()),
    ]
    assert all(order.together for order in starts(orders)) and membership.size == 2


def test_a_new_controller_knows_who_helps():
    membership, workers = spread()
    membership.left(2)
    train(membership, [])
    for name in membership.workers:
        membership.met(name, membership.generation)
    there = {w.node: Worker(**json.loads(json.dumps(w.told))) for w in membership.workers.values()}
    again = Membership(4, 1, 1000, 2)
    again.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    assert again.state_dict() == membership.state_dict()
    assert [again.joined(node, [worker], 1) for node, worker in there.items()] == [[], [], []]
    assert again.running and [order.rank for order in again.left(1) if isinstance(order, Seat)] == [0, 1]


def test_a_node_that_waits_builds_for_the_part_of_a_lost_one_without_waiting_for_more():
    membership, _ = spread(5)
    membership.left(1)
    train(membership, [])
    assert membership.places.members == (0, 3, 2) and membership.can_grow and membership.need_not_wait
    guests = starts(membership.grow())
    assert [(order.node, order.rank % 2) for order in guests] == [(4, 1)]
    kept = json.loads(json.dumps(membership.state_dict()))
    again = Membership(5, 1, 1000, 2)
    again.load_state_dict(kept)
    assert again.state_dict() == membership.state_dict()
    for order in guests:
        membership.built(order.worker, stays=True)
    assert "nodes have waited, and are ready: training continues on 4 of 5 nodes" in str(meet_guests(membership))


def test_where_a_part_is_lost_a_node_moves_to_it_and_its_worker_is_started_again():
    membership, workers = spread()
    membership.left(0)
    train(membership, [])
    assert membership.places.members == (2, 1, 3)
    orders = membership.left(2)
    assert membership.places.members == (3, 1)
    assert [order.worker for order in orders if isinstance(order, Seat)] == [workers[1]]
    assert [(order.node, order.rank) for order in starts(orders)] == [(3, 0)]


def test_where_fewer_copies_than_the_least_would_be_left_all_wait_for_those_that_move():
    membership, workers = spread(6, least=4)
    membership.left(0)
    train(membership, [])
    assert membership.places.members == (2, 1, 4, 3, 5)
    orders = membership.left(2)
    assert membership.places.members == (4, 1, 5, 3)
    assert [(order.node, order.rank) for order in starts(orders)] == [(5, 2)]


def test_a_node_too_many_of_a_part_is_built_for_the_other_beside_one_copy_and_another_one_that_helps():
    membership, workers = spread(6)
    membership.left(0)
    train(membership, [])
    *orders, abort = membership.left(2)
    assert membership.places.members == (4, 1, 3) and membership.seating.helpers == (1,)
    assert [order.worker for order in orders if isinstance(order, Kill)] == [workers[5]]
    assert abort.reason == "node 2 is lost: training continues on 3 of 6 nodes, 1 of which helps"
    train(membership, [])
    assert membership.can_grow and membership.need_not_wait
    guests = starts(membership.grow())
    assert [(order.node, order.rank, order.guest) for order in guests] == [(5, 2, True)]
    membership.built(guests[0].worker, stays=True)
    meet_guests(membership)
    assert membership.places.members == (4, 1, 5, 3) and membership.seating.helpers == ()


def test_a_node_that_helps_moves_once_those_are_lost_that_were_to_be_built_in_its_place():
    membership, workers = spread(8)
    for node in (0, 2):
        membership.left(node)
        train(membership, [])
        membership.joined(node)
        membership.grow()
    membership.left(4)
    train(membership, [])
    assert membership.seating.helpers == (1, 1, 1) and len(membership.guests) == 2
    for node in (0, 2):
        membership.left(node)
    orders = meet_guests(membership)
    assert "a node that helps moves to another part of the model" in str(orders)
    assert [order.worker for order in orders if isinstance(order, Kill)] == [workers[5]]
    train(membership, [])
    assert [order.node for order in starts(membership.grow())] == [5]
