"""The controller as agents see it: who was away hears of the end, and what was counted outlives the process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from moc.errors import codes_in
from moc.runtime import async_connections, protocol
from moc.runtime.controller import AgentPeer, Controller, missing_nodes_message
from moc.runtime.election import Election, SilenceLimits
from moc.runtime.membership import Membership
from moc.runtime.protocol import Message, PeerGoneError
from moc.runtime.termination import LOST, SAVED
from tests.cases import each_row
from tests.unit.runtime.peers import TOKEN


class Job:
    """A job of two nodes with a worker each, on real sockets."""

    def __init__(self, silence_s=30.0, max_wait_s=30.0):
        self.limits = silence_s, max_wait_s
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def controller(self):
        """A controller that serves, as a task; it is killed at the end of the block."""
        silence_s, max_wait_s = self.limits
        controller = Controller(Membership(2, 1, 1000), Election(0, 1, 2, SilenceLimits(silence_s)), max_wait_s)
        task = asyncio.create_task(controller.run(self.address, TOKEN, beyond_loopback=False))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def agent(self, node, generation=0, workers=(), asked=None, state=None, instance="", door=None, thinks_s=0):
        """An agent that has said who it is, and is one of the job; it promises to follow after so many seconds."""
        while True:
            try:
                connection = await async_connections.open_connection(self.address, TOKEN)
                break
            except PeerGoneError:
                await asyncio.sleep(0.01)
        agent = FakeAgent(connection, thinks_s)
        hello = dict(node=node, generation=generation, workers=list(workers), asked=asked, state=state, epoch=-1)
        hello["departs"] = False
        who = dict(instance=instance or f"the one of node {node}", called="process 1", door=door)
        await agent.send(Message(dict(kind="hello", free_in=0.0, silent=0.0, at=0.0) | hello | who))
        return agent


class FakeAgent:
    """Promises whatever it is asked for, and keeps what it is to keep."""

    def __init__(self, connection, thinks_s):
        self.connection, self.thinks_s, self.state, self.known = connection, thinks_s, None, {}
        self.send, self.abort = connection.send, connection.abort
        self._orders = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._saying = asyncio.create_task(self._say_alive())

    async def _say_alive(self):
        with contextlib.suppress(PeerGoneError):
            while True:
                await self.send(Message({"kind": "alive", "at": 0.0, "echo": None}))
                await asyncio.sleep(0.05)

    def falls_silent(self):
        self._saying.cancel()

    async def _read(self):
        with contextlib.suppress(PeerGoneError):
            while True:
                message = await self.connection.recv()
                if message.kind == "elect":
                    await asyncio.sleep(self.thinks_s)
                    await self.send(Message({"kind": "promise", "epoch": message.header["epoch"], "free_in": 0.0}))
                elif message.kind == "state":
                    self.state = {name: value for name, value in message.header.items() if name != "kind"}
                    self.known = self.state["membership"]
                elif message.kind not in ("beat", "noted"):
                    self._orders.put_nowait(message)
        self._orders.put_nowait(None)

    async def recv(self):
        message = await self._orders.get()
        if message is None:
            raise PeerGoneError("the controller is gone")
        return message


async def hears(connection, kind):
    """The next message of a kind; others are passed over."""
    while (message := await asyncio.wait_for(connection.recv(), 60)).kind != kind:
        pass
    return message.header


async def begun(job):
    """Both agents, and the names of their workers."""
    agents = [await job.agent(0), await job.agent(1)]
    return agents, [(await hears(agent, "start"))["worker"] for agent in agents]


async def ends(agent, worker, code, gives_back=None):
    told = {"worker": worker, "code": code, "why": "", "gives_back": gives_back, "broken": False} | {"iteration": None}
    await agent.send(Message({"kind": "ended"} | told))


async def tell(agent, kind, **what):
    await agent.send(Message({"kind": kind} | what))


def test_absent_agent_receives_job_end_on_return():
    async def main():
        job = Job()
        async with job.controller() as serving:
            (first, second), workers = await begun(job)
            second.abort()
            await ends(first, workers[0], 3)
            assert (await hears(first, "end"))["code"] == 3
            await tell(first, "heard")
            await asyncio.sleep(0.5)  # in which a controller that waits for nobody would have left
            assert not serving.done()
            second = await job.agent(1)
            assert (await hears(second, "end"))["code"] == 3
            await tell(second, "heard")
            await asyncio.wait_for(serving, 60)

    asyncio.run(main())


def test_node_joining_at_end_receives_release_order():
    async def main():
        job = Job()
        async with job.controller() as serving:
            agents, workers = await begun(job)
            for agent, worker in zip(agents, workers, strict=True):
                await ends(agent, worker, 0, "/dev/shm/moc-0/run")
            for agent in [*agents, await job.agent(2)]:
                assert (await hears(agent, "end"))["gives_back"] == "/dev/shm/moc-0/run"
                await tell(agent, "heard")
            await asyncio.wait_for(serving, 60)

    asyncio.run(main())


def test_controller_restarted_after_job_end_reports_end():
    async def main():
        job = Job()
        async with job.controller():
            (first, _), workers = await begun(job)
            await ends(first, workers[0], 3)
            await hears(first, "end")
        async with job.controller() as serving:
            for node in (1, 0):
                agent = await job.agent(node, state=first.state)
                assert (await hears(agent, "end"))["code"] == 3
                await tell(agent, "heard")
            await asyncio.wait_for(serving, 60)

    asyncio.run(main())


def test_agents_receive_counts_before_next_order():
    async def main():
        job = Job()
        async with job.controller():
            (first, second), workers = await begun(job)
            await ends(second, workers[1], -9)
            await hears(first, "abort")
            assert first.known["restarts"] == 1 and first.known["generation"] == 1
            await tell(first, "stopping", signal=15)
            while second.known["asked"] is None:
                await asyncio.sleep(0.01)
        async with job.controller():  # of which only one node knows the newest
            knows = dict(state=second.state, thinks_s=0.5)
            again = [await job.agent(node, generation=1, **what) for node, what in ((0, {}), (1, knows))]
            worker = (await hears(again[0], "start"))["worker"]
            await ends(again[0], worker, -15)
            assert (await hears(again[1], "end"))["code"] == SAVED
            assert again[0].known["restarts"] == 1

    asyncio.run(main())


def test_node_absent_after_controller_restart_is_lost():
    async def main():
        job = Job(silence_s=2.0)
        async with job.controller():
            (first, second), _ = await begun(job)
        async with job.controller():
            first, spare = await job.agent(0, state=first.state), await job.agent(2, state=first.state)
            assert (await hears(spare, "start"))["rank"] == 1

    asyncio.run(main())


async def ends_before_admission(job, state, spare):
    """Node 1 connects once more, and is gone before it has promised to follow."""
    second = await job.agent(1, state=state, thinks_s=3600.0)
    await asyncio.sleep(0.2)
    second.abort()
    assert (await hears(spare, "start"))["rank"] == 1


def test_node_that_ends_before_its_admission_is_lost():
    async def main():
        job = Job(silence_s=2.0)
        async with job.controller():
            (first, _), _ = await begun(job)
            await ends_before_admission(job, first.state, await job.agent(2))
        job = Job(silence_s=2.0)
        async with job.controller():
            (first, _), _ = await begun(job)
        async with job.controller():
            first, spare = await job.agent(0, state=first.state), await job.agent(2, state=first.state)
            while spare.state is None:
                await asyncio.sleep(0.01)
            await ends_before_admission(job, first.state, spare)

    asyncio.run(main())


def told(node, worker, here=0, built=True, met=-1):
    return dict(name=worker, node=node, rank=node, together=True, built=built, here=here, met=met)


def test_rendezvous_ends_when_the_controller_dies():
    async def main():
        job = Job()
        async with job.controller():
            (first, second), workers = await begun(job)
            for agent, worker in zip((first, second), workers, strict=True):
                await tell(agent, "here", worker=worker, generation=0, parts=1, iteration=None)
            await hears(first, "go")
        async with job.controller():  # nobody knows whether all have heard of it, and where they were to meet is gone
            there = [await job.agent(n, workers=[told(n, w)], state=first.state) for n, w in enumerate(workers)]
            assert [(await hears(agent, "abort"))["generation"] for agent in there] == [1, 1]
        async with job.controller():  # they train
            there = [await job.agent(n, 1, [told(n, w, 1, met=1)], state=there[0].state) for n, w in enumerate(workers)]
            await tell(
                there[0], "here", worker=workers[0], generation=1, parts=1, iteration=None
            )  # and one has not heard that they may go on
            assert (await hears(there[0], "go"))["generation"] == 1

    asyncio.run(main())


def test_next_controller_receives_unreported_ends():
    async def main():
        job = Job()
        async with job.controller():
            (first, second), workers = await begun(job)
        async with job.controller() as serving:
            there = [await job.agent(n, workers=[told(n, w, met=0)], state=first.state) for n, w in enumerate(workers)]
            for agent, worker in zip(there, workers, strict=True):
                await ends(agent, worker, 0)
            for agent in there:
                assert (await hears(agent, "end"))["code"] == 0
                await tell(agent, "heard")
            assert await asyncio.wait_for(serving, 60) == 0

    asyncio.run(main())


def test_lost_connection_alone_starts_no_generation():
    async def main():
        job = Job()
        async with job.controller():
            (first, second), workers = await begun(job)
            second.abort()
            second = await job.agent(1, workers=[told(1, workers[1], here=-1, built=False)], state=first.state)
            await ends(first, workers[0], -9)
            assert (await hears(first, "abort"))["generation"] == 1

    asyncio.run(main())


def closed_port():
    """The address of a port of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_takeover_does_not_wait_for_a_dead_process(monkeypatch):
    monkeypatch.setattr("moc.runtime.controller.TAKEOVER_WAIT_S", 3600.0)

    async def main():
        job = Job(silence_s=3600.0)
        async with job.controller():
            first, second = await job.agent(0), await job.agent(1, door=closed_port())
            await hears(second, "start")
            while first.state is None or "1" not in first.state["doors"]:
                await asyncio.sleep(0.01)
        async with job.controller():
            await job.agent(0, state=first.state)
            spare = await job.agent(2, state=first.state)
            assert (await hears(spare, "start"))["rank"] == 1

    asyncio.run(main())


def test_node_with_dead_agent_process_is_lost_at_once():
    async def main():
        job = Job(silence_s=3600.0)
        async with job.controller():
            _, second, spare = await job.agent(0), await job.agent(1, door=closed_port()), await job.agent(2)
            await hears(second, "start")
            second.abort()
            assert (await hears(spare, "start"))["rank"] == 1

    asyncio.run(main())


def test_second_launcher_of_a_node_waits_for_loss_of_first():
    async def main():
        job = Job(silence_s=2.0)
        async with job.controller():
            (first, second), _ = await begun(job)
            other = await job.agent(1, instance="another")
            why = (await hears(other, "refused"))["why"]
            assert codes_in(why) == ["node-rank-taken"] and "node 1" in why and "--node-rank" in why
            second.abort()
            other = await job.agent(1, instance="another")
            assert (await hears(other, "start"))["rank"] == 1

    asyncio.run(main())


def test_resumed_controller_does_not_time_out_its_agents(tmp_path):
    """The process is stopped for longer than anybody may be silent; it can hear nobody meanwhile."""

    async def main():
        job = Job(silence_s=6.0)  # longer than a busy machine leaves this process without a processor
        flags = ["--listen", job.address, "--nnodes", "2", "--nproc-per-node", "1", "--silence-timeout", "6"]
        environment = os.environ | {protocol.TOKEN_VARIABLE: TOKEN.hex()}
        with subprocess.Popen([sys.executable, "-m", "moc.runtime.controller", *flags], env=environment) as controller:
            try:
                (first, second), _ = await begun(job)
                controller.send_signal(signal.SIGSTOP)
                await asyncio.sleep(9.0)
                controller.send_signal(signal.SIGCONT)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(first.recv(), 1.0)  # no generation begins
            finally:
                controller.kill()

    asyncio.run(main())


def test_standalone_controller_stands_for_election_again():
    """No launcher starts it again when another controller leads."""

    async def main():
        job = Job()
        flags = ["--listen", job.address, "--nnodes", "1", "--nproc-per-node", "1", "--candidate", "0/2"]
        environment = os.environ | {protocol.TOKEN_VARIABLE: TOKEN.hex()}
        command = [sys.executable, "-m", "moc.runtime.controller", *flags]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as controller:
            try:
                first = await job.agent(0)
                await hears(first, "start")
                await tell(first, "promise", epoch=1, free_in=0.0)  # of the other candidate
                with pytest.raises(PeerGoneError):
                    await hears(first, "end")
                await hears(await job.agent(0, state=first.state), "start")
                assert controller.poll() is None
            finally:
                controller.kill()

    asyncio.run(main())


@each_row("started, code", [(True, SAVED), (False, LOST)])
def test_missing_node_ends_job_after_timeout(started, code, monkeypatch):
    monkeypatch.setattr("moc.runtime.controller.MIN_JOIN_TIMEOUT_S", 600.0 if started else 0.0)

    async def main():
        job = Job(silence_s=2.0, max_wait_s=0.0 if started else 0.5)
        async with job.controller():
            if started:
                (first, second), _ = await begun(job)
                second.abort()
            else:
                first = await job.agent(0)
            end = await hears(first, "end")
            assert end["code"] == code and not end["leaving"]

    asyncio.run(main())


def test_node_stopped_before_joining_ends_waiting_job():
    async def main():
        job = Job()
        async with job.controller():
            first, second = await job.agent(0), await job.agent(1, asked=2)
            for agent in (first, second):
                assert (await hears(agent, "end"))["code"] == 130

    asyncio.run(main())


def test_wait_after_signal_is_bounded_by_heartbeat_limit():
    async def main():
        job = Job(silence_s=1.0, max_wait_s=3600.0)
        async with job.controller():
            (first, second), _ = await begun(job)
            await tell(first, "stopping", signal=15)
            while first.known["asked"] is None:
                await asyncio.sleep(0.01)
            second.abort()
            assert (await hears(first, "end"))["code"] == SAVED

    asyncio.run(main())


@each_row(
    "hello",
    [
        dict(),
        dict(node=0),
        dict(node=0, generation=1, asked=None, workers=[dict(no="worker")]),
        dict(node=0, generation=1, asked=None),
        dict(node=0, generation=1, workers=[]),
    ],
)
def test_malformed_hello_is_refused_with_one_log_line(hello, caplog):
    async def scenario():
        job = Job()
        async with job.controller():
            agents = [await job.agent(node) for node in (0, 1)]
            started = await hears(agents[0], "start")
            stranger = await async_connections.open_connection(job.address, TOKEN)
            await stranger.send(Message({"kind": "hello"} | hello))
            with pytest.raises(PeerGoneError):
                await stranger.recv()
            ended = {"kind": "ended", "worker": started["worker"], "code": -9, "why": ""}
            ended |= {"gives_back": None, "broken": False, "iteration": None}
            await agents[0].send(Message(ended))
            await hears(agents[0], "abort")  # the node that it spoke for is still there

    asyncio.run(scenario())
    assert len([record for record in caplog.records if "hello" in record.message]) == 1


def test_missing_nodes_message_names_remedy():
    said = missing_nodes_message([1, 4], 90.2, "--max-wait")
    assert all(part in said for part in ("1, 4", "`mocrun ... --node-rank 1`", "--node-rank 4`", "90 s", "--max-wait"))


class Posts(list):
    """The messages that a controller has posted to an agent."""

    def post(self, message):
        self.append(message.kind)


def test_state_is_not_broadcast_for_each_worker():
    """Neither when the nodes join nor when the workers end; an exit is acknowledged when successors know it."""
    nodes, per_node = 16, 4
    election = Election(0, 1, nodes, SilenceLimits(30.0))
    controller, posts = Controller(Membership(nodes * per_node, per_node, 1000), election, 60.0), []
    hello = dict(generation=0, asked=None, departs=False, called="", door=None, free_in=0.0, silent=0.0, at=0.0)
    for node in range(nodes):
        posts.append(Posts())
        own = dict(node=node, instance=str(node), workers=[], state=None, epoch=-1)
        controller._add_agent(AgentPeer.from_hello(hello | own, posts[-1], 0.0))
    controller._tick(0.0)
    for peer in controller._agents.values():
        controller._receive(peer, Message({"kind": "promise", "epoch": election.epoch, "free_in": 0.0}))
    controller._tick(1.0)
    assert all(post.count("start") == per_node and post.count("state") <= 4 for post in posts)
    workers = list(controller._membership.workers.values())
    assert len(workers) == nodes * per_node
    told = {"kind": "ended", "code": 0, "why": "", "gives_back": None, "broken": "", "iteration": None}
    for worker in workers[1:]:
        controller._receive(controller._agents[worker.node], Message(told | {"worker": worker.name}))
    assert all(post.count("state") <= 4 and not post.count("noted") for post in posts)
    controller._tick(1.0)
    assert all(post.count("state") <= 5 and post[-1] == "noted" for post in posts)
    assert sum(post.count("noted") for post in posts) == len(workers) - 1
