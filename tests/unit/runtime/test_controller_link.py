"""Agents find the controller that leads, wherever it is; real controllers and sockets, without workers."""

import asyncio
import contextlib
import math
import socket
import time

import pytest

from moc.runtime import async_connections
from moc.runtime.controller import Controller
from moc.runtime.controller_link import ControllerLink
from moc.runtime.election import Election, SilenceLimits
from moc.runtime.membership import Membership
from moc.runtime.orders import WorkerRecord
from moc.runtime.progress import Lease
from moc.runtime.protocol import WireError
from tests.cases import each_row
from tests.errors import raises
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN

NODES, SPARES = 2, 1
SILENCE_S = 4.0


class Job:
    """Candidates on three nodes, and what there is of their agents."""

    def __init__(self, candidates=3, silence_s=SILENCE_S, nodes=NODES, minimum=0):
        with contextlib.ExitStack() as all_at_once:
            probes = [all_at_once.enter_context(socket.socket()) for _ in range(candidates)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            self.addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
        self.controllers, self.agents, self.times = {}, {}, SilenceLimits(silence_s)
        self.nodes, self.minimum = nodes, minimum
        self.listeners = {}  # of the first node's launcher, which keeps the port of its controller

    def start_controller(self, index):
        host, port = self.addresses[index].split(":")
        if index == 0 and 0 not in self.listeners:
            self.listeners[0] = socket.create_server((host, int(port)))
        listener = self.listeners[0].dup() if index == 0 else None
        nodes = self.nodes if self.minimum else self.nodes + SPARES
        election = Election(index, len(self.addresses), nodes, self.times, min_voters=2)
        controller = Controller(Membership(self.nodes, 1, 1000, self.minimum), election, max_wait_s=60.0)
        serving = controller.run(self.addresses[index], TOKEN, False, listener)
        self.controllers[index] = controller, asyncio.create_task(serving)

    def start_agent(self, node, patience_s=60.0, begin_s=600.0, kind=None):
        self.agents[node] = (kind or Agent)(node, self.addresses, self.times, patience_s, begin_s)

    async def lose(self, node):
        """Its agent and its controller die, and its workers with them."""
        agent = self.agents.pop(node)
        agent.link.is_closed = True
        tasks = [agent.following]
        if node in self.controllers:
            tasks.append(self.controllers.pop(node)[1])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.launcher_ends(node)

    def launcher_ends(self, node):
        if node in self.listeners:
            self.listeners.pop(node).close()

    def leaders(self):
        return [index for index, (controller, _) in self.controllers.items() if controller._election.is_leader]

    async def end(self):
        for node in list(self.agents):
            await self.lose(node)
        for _, task in self.controllers.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self.controllers.values()), return_exceptions=True)


class Agent:
    """A link, with what an agent would do with orders."""

    def __init__(self, node, addresses, times, patience_s, begin_s):
        self.node, self.orders, self.generation, self.workers = node, [], 0, {}
        self.lease = Lease.create()
        self.link = ControllerLink(addresses, TOKEN, times, patience_s, begin_s, self.lease, self.hello, self.obey)
        self.following = asyncio.create_task(self.link.run())

    def hello(self):
        workers = [dict(name=name, node=self.node, rank=rank, together=True, built=True, here=self.generation,
                        met=self.generation) for name, rank in self.workers.items()]  # fmt: skip
        return dict(node=self.node, generation=self.generation, workers=workers, asked=None, departs=False), []

    def obey(self, order):
        self.orders.append(order)
        if order["kind"] == "start":
            self.workers[order["worker"]] = order["rank"]
            self.generation = order["generation"]
        elif order["kind"] == "abort":
            self.generation = order["generation"]


async def becomes(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def begun(candidates=3, patience_s=60.0, silence_s=SILENCE_S):
    job = Job(candidates, silence_s)
    for index in range(candidates):
        job.start_controller(index)
    for node in range(NODES + SPARES):
        job.start_agent(node, patience_s)
    try:
        await becomes(lambda: all(job.agents[node].workers for node in range(NODES)))
        yield job
    finally:
        await job.end()


class Elastic(Agent):
    """An agent whose worker continues with other members, and has moved its state at once."""

    worker = None

    def hello(self):
        workers = [] if self.worker is None else [self.worker.to_message()]
        return dict(node=self.node, generation=self.generation, workers=workers, asked=None, departs=False), []

    def obey(self, order):
        super().obey(order)
        worker, generation = self.worker, order.get("generation")
        if order["kind"] == "start":
            self.worker = WorkerRecord(order["worker"], self.node, order["rank"], order["together"], is_ready=True)
            self.worker.survives_resize, self.worker.size = True, order["size"]
            self.tell("built", stays=True)
            self.tell("here", generation=generation, parts=1, iteration=None)
        elif order["kind"] == "seat":
            worker.rank, worker.rank_generation, worker.size = order["rank"], generation, order["size"]
        elif order["kind"] == "abort":
            worker.reported_generation = generation
            self.tell("here", generation=generation, parts=1, iteration=1)
        elif order["kind"] == "go":
            worker.connected_generation = generation
            self.tell("met", generation=generation)
        elif order["kind"] == "welcome":
            self.tell("parted", generation=generation, handed_over=worker.rank in order["departing"])

    def tell(self, kind, **fields):
        self.link.send(kind, **fields, worker=self.worker.name)


@pytest.mark.slow
@pytest.mark.parametrize("departs", [True, False])
def test_two_of_four_nodes_remain_after_two_losses(departs):
    """The second candidate departs or is lost, and then the first one, the leader."""

    async def main():
        job = Job(nodes=4, minimum=1, silence_s=8.0)
        try:
            for index in range(3):
                job.start_controller(index)
            for node in range(4):
                job.start_agent(node, kind=Elastic)
            await becomes(lambda: all(a.worker and a.worker.connected_generation == 0 for a in job.agents.values()))
            if departs:
                job.agents[1].link.send("departs")
                await becomes(lambda: {"kind": "depart"} in job.agents[1].orders)
            await job.lose(1)
            await becomes(lambda: job.agents[2].link.state["voters"]["nodes"] == [0, 2, 3])
            await job.lose(0)
            await becomes(lambda: job.leaders() == [2])
            await becomes(lambda: all(job.agents[node].generation >= 2 for node in (2, 3)))
        finally:
            await job.end()

    asyncio.run(main())


def test_departing_node_is_released_when_others_know_the_voters():
    async def main():
        async with begun(silence_s=2.0) as job:
            others = [job.agents[node].link for node in range(NODES)]

            def voters():
                return [link.state["voters"]["nodes"] for link in others]

            await becomes(lambda: job.agents[2].link.is_admitted)
            job.agents[2].link.send("departs")
            await becomes(lambda: {"kind": "depart"} in job.agents[2].orders)
            assert voters() == [[0, 1]] * 2
            await job.lose(2)
            job.start_agent(2)
            await becomes(lambda: voters() == [[0, 1, 2]] * 2)

    asyncio.run(main())


@pytest.mark.slow
def test_next_candidate_takes_over_before_leases_end():
    async def main():
        async with begun(silence_s=10.0) as job:  # so long that a busy machine lets no lease end
            assert job.leaders() == [0]
            names = dict(job.agents[1].workers)
            await job.lose(0)
            await becomes(lambda: job.leaders() == [1])
            await becomes(lambda: job.agents[2].workers)  # the spare has the place of the node that is lost
            assert job.agents[1].workers == names and job.agents[1].lease.remaining_s > 0
            job.start_controller(0)
            job.start_agent(0)
            await becomes(lambda: job.agents[0].link.is_admitted)
            assert job.leaders() == [1]
            await job.lose(1)
            end = job.agents[2].lease.end
            await becomes(lambda: job.leaders() and job.agents[2].link.leader in job.leaders())
            assert job.agents[2].lease.end > end and time.monotonic() < end
            await becomes(lambda: job.agents[0].workers)

    asyncio.run(main())


def test_agents_leave_dead_controller_when_port_refuses():
    """They have connected to the next candidate meanwhile; the silence limits are far longer than this test."""

    async def main():
        async with begun(silence_s=600.0) as job:
            await becomes(lambda: all(agent.link.is_admitted for agent in job.agents.values()))
            listener, job.listeners = job.listeners, {}
            await job.lose(0)
            await becomes(lambda: len(job.controllers[1][0]._agents) == 2)
            assert job.leaders() == []
            listener[0].close()
            await becomes(lambda: job.leaders() == [1])

    asyncio.run(main())


@pytest.mark.slow
def test_leader_asks_busy_node_again_for_its_promise():
    """It has just started, and whoever ran there before may have promised another candidate something."""

    async def main():
        async with begun(silence_s=10.0) as job:
            await job.lose(2)
            job.start_agent(2)
            await becomes(lambda: job.agents[2].link.is_admitted)
            await becomes(lambda: job.agents[2].lease.end < math.inf)
            job.agents[2].link._follower.started_at = time.monotonic()  # as long as it was not admitted
            _, serving = job.controllers.pop(0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            end = job.agents[2].lease.end
            await becomes(lambda: job.agents[2].link._is_led and job.agents[2].link.leader in job.leaders())
            assert time.monotonic() < end  # or its workers would have ended

    asyncio.run(main())


def test_controller_restarted_at_same_address_continues():
    async def main():
        async with begun(candidates=1) as job:
            _, serving = job.controllers[0]
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            job.start_controller(0)
            await becomes(lambda: job.leaders() == [0])
            await becomes(lambda: all(agent.link._is_led for agent in job.agents.values()))
            assert not any(order["kind"] == "abort" for agent in job.agents.values() for order in agent.orders)

    asyncio.run(main())


def test_unresponsive_candidate_is_skipped():
    async def main():
        job = Job()
        silent = await async_connections.serve(job.addresses[0], TOKEN, lambda connection: asyncio.sleep(3600))
        job.start_controller(1)
        for node in range(NODES + SPARES):
            job.start_agent(node)
        await becomes(lambda: job.leaders() == [1] and all(job.agents[node].workers for node in range(NODES)))
        await job.end()
        await silent.close()

    asyncio.run(main())


@each_row("left", [1, 2])
def test_candidate_without_followers_ends_the_wait(left):
    async def main():
        async with begun(patience_s=2.0) as job:
            await becomes(lambda: all(agent.link.is_admitted for agent in job.agents.values()))
            for other in {0, 1, 2} - {left}:
                await job.lose(other)
            with raises("controller-without-majority", "2 s", "cut off"):
                await asyncio.wait_for(job.agents[left].following, 60)
            assert job.agents[left].lease.remaining_s <= 0  # its workers had ended before

    asyncio.run(main())


def test_job_without_initial_majority_ends():
    async def main():
        job = Job()
        job.start_controller(0)
        job.start_agent(0, patience_s=1.0, begin_s=3.0)
        with raises("controller-without-majority", "3 s"):
            await asyncio.wait_for(job.agents[0].following, 60)
        assert not job.agents[0].link.is_admitted
        await job.end()

    asyncio.run(main())


def test_nodes_still_joining_are_awaited():
    async def main():
        job = Job()
        job.start_controller(0)
        job.start_agent(0, patience_s=1.0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(job.agents[0].following), 4.0)
        for node in (1, 2):
            job.start_agent(node)
        await becomes(lambda: all(job.agents[node].workers for node in range(NODES)))
        await job.end()

    asyncio.run(main())


def test_lease_ends_without_heartbeats_before_patience():
    async def main():
        job = Job(candidates=1)
        job.start_controller(0)
        for node in range(NODES):
            job.start_agent(node, patience_s=2.0)
        await becomes(lambda: job.agents[1].workers and not math.isinf(job.agents[1].lease.end))
        _, serving = job.controllers.pop(0)
        serving.cancel()
        with raises("controller-missing", "2 s"):
            await asyncio.wait_for(job.agents[1].following, 60)
        await becomes(lambda: job.agents[1].lease.remaining_s < 0)
        await job.end()

    asyncio.run(main())


def test_admitted_agent_survives_foreign_bytes():
    """In the stream of its controller, and at its port, which another program may have taken meanwhile."""

    async def main():
        async with begun(candidates=1) as job:
            agent, (controller, serving) = job.agents[1], job.controllers[0]
            await becomes(lambda: agent.link.is_admitted)
            peer = controller._agents[1]
            peer.connection._writer.write(bytes(64))
            await becomes(lambda: controller._agents.get(1) not in (None, peer))
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            strangers = []
            refuse = lambda *peer: strangers.append(peer)  # noqa: E731
            listener = job.listeners[0].dup()
            async with await async_connections.serve("", OTHER_TOKEN, None, on_refused=refuse, listener=listener):
                await becomes(lambda: len(strangers) > 2 * NODES)
            job.start_controller(0)
            await becomes(lambda: all(agent.link._is_led for agent in job.agents.values()))

    asyncio.run(main())


def test_agent_whose_hello_is_refused_ends_after_patience():
    async def main():
        hellos = []

        async def refuse(connection):
            hellos.append((await connection.recv()).header)
            raise WireError("another release")

        async with await async_connections.serve("127.0.0.1:0", TOKEN, refuse, on_refused=lambda *_: None) as server:
            agent = Agent(0, [server.address], SilenceLimits(SILENCE_S), patience_s=1.0, begin_s=600.0)
            with raises("controller-missing", "1 s"):
                await asyncio.wait_for(agent.following, 60)
        assert len(hellos) < 100

    asyncio.run(main())


def test_node_stays_connected_if_admitted_while_it_searches(monkeypatch):
    """An answer of another candidate from before the admission does not end the connection to the leader."""
    ask, may_answer, asked, answered = async_connections.check_health, asyncio.Event(), [], []

    async def slow(address, *arguments):
        asked.append(address)
        await may_answer.wait()
        try:
            return await ask(address, *arguments)
        finally:
            answered.append(address)

    async def main():
        monkeypatch.setattr(async_connections, "check_health", slow)
        job = Job(silence_s=60.0)
        for index in range(3):
            job.start_controller(index)
        try:
            for node in range(NODES):
                job.start_agent(node)
            await becomes(lambda: len(asked) == NODES)
            job.start_agent(NODES)
            await becomes(lambda: all(job.agents[node].workers for node in range(NODES)))
            connections = [agent.link._connection for agent in job.agents.values()]
            may_answer.set()
            await becomes(lambda: len(answered) >= 2 * NODES)
            await asyncio.sleep(0.1)
            assert [agent.link._connection for agent in job.agents.values()] == connections
            assert {agent.generation for agent in job.agents.values()} == {0}
        finally:
            await job.end()

    asyncio.run(main())
