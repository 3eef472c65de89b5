"""The controller as agents see it: who was away hears of the end, and what was counted outlives the process."""

import asyncio
import contextlib
import json
import socket

import pytest

from moc.runtime import async_connections as wire
from moc.runtime.controller import Controller, waiting_for
from moc.runtime.membership import LOST, SAVED, Membership
from moc.runtime.message import Message
from moc.runtime.wire import PeerGoneError
from tests.unit.runtime.peers import TOKEN


class Job:
    """A job of two nodes with a worker each, on real sockets."""

    def __init__(self, directory, silence_s=30.0, max_wait_s=30.0):
        self.state, self.limits = directory / "controller.json", (silence_s, max_wait_s)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def controller(self):
        """A controller that serves, as a task; it is killed at the end of the block."""
        controller = Controller(Membership(2, 1, 1000), *self.limits, self.state)
        task = asyncio.create_task(controller.run(self.address, TOKEN, beyond_loopback=False))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def agent(self, node, generation=0, workers=(), asked=None):
        """A connection of an agent, which has said who it is."""
        while True:
            try:
                connection = await wire.open(self.address, TOKEN)
                break
            except PeerGoneError:
                await asyncio.sleep(0.01)
        await connection.send(
            Message(dict(kind="hello", node=node, generation=generation, workers=list(workers), asked=asked))
        )
        return connection

    def known(self):
        """What is on disk."""
        return json.loads(self.state.read_text())


async def hears(connection, kind):
    """The next message of a kind; others are passed over."""
    while (message := await asyncio.wait_for(connection.recv(), 60)).kind != kind:
        pass
    return message.header


async def begun(job):
    """Both agents, and the names of their workers."""
    agents = [await job.agent(0), await job.agent(1)]
    return agents, [(await hears(agent, "start"))["worker"] for agent in agents]


async def ends(agent, worker, code):
    await agent.send(Message({"kind": "ended", "worker": worker, "code": code, "why": ""}))


async def tell(agent, kind, **what):
    await agent.send(Message({"kind": kind} | what))


async def says_alive(agent):
    while True:
        await tell(agent, "alive")
        await asyncio.sleep(0.05)


def test_an_agent_that_was_away_at_the_end_hears_of_it(tmp_path):
    async def main():
        job = Job(tmp_path)
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


def test_a_controller_that_dies_at_the_end_tells_of_it_when_it_is_started_again(tmp_path):
    async def main():
        job = Job(tmp_path)
        async with job.controller():
            (first, _), workers = await begun(job)
            await ends(first, workers[0], 3)
            await hears(first, "end")
        async with job.controller() as serving:
            for node in (1, 0):
                agent = await job.agent(node)
                assert (await hears(agent, "end"))["code"] == 3
                await tell(agent, "heard")
            await asyncio.wait_for(serving, 60)

    asyncio.run(main())


def test_what_was_counted_is_on_disk_before_anybody_hears_of_it(tmp_path):
    async def main():
        job = Job(tmp_path)
        async with job.controller():
            (first, second), workers = await begun(job)
            await ends(second, workers[1], -9)
            await hears(first, "abort")
            assert job.known()["restarts"] == 1 and job.known()["generation"] == 1
            await tell(first, "stopping", signal=15)
            while job.known()["asked"] is None:
                await asyncio.sleep(0.01)
        async with job.controller():
            again = [await job.agent(node, generation=1) for node in (0, 1)]
            worker = (await hears(again[0], "start"))["worker"]
            await ends(again[0], worker, -15)
            assert (await hears(again[1], "end"))["code"] == 143
            assert job.known()["restarts"] == 1

    asyncio.run(main())


def test_a_node_that_does_not_come_to_a_controller_that_was_started_again_is_lost(tmp_path):
    async def main():
        job = Job(tmp_path, silence_s=1.0)
        async with job.controller():
            await begun(job)
        async with job.controller():
            first, spare = await job.agent(0), await job.agent(2)
            alive = [asyncio.create_task(says_alive(agent)) for agent in (first, spare)]
            assert (await hears(spare, "start"))["rank"] == 1
            for task in alive:
                task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("started, code", [(True, SAVED), (False, LOST)])
def test_who_is_missing_is_not_waited_for_without_end(started, code, tmp_path, monkeypatch):
    monkeypatch.setattr("moc.runtime.controller.BEGIN_S", 600.0 if started else 0.0)

    async def main():
        job = Job(tmp_path, max_wait_s=0.0 if started else 0.5)
        async with job.controller():
            if started:
                (first, second), _ = await begun(job)
                second.abort()
            else:
                first = await job.agent(0)
            end = await hears(first, "end")
            assert end["code"] == code and not end["leaving"]

    asyncio.run(main())


def test_a_node_that_was_asked_to_stop_before_it_came_ends_a_job_that_waits(tmp_path):
    async def main():
        job = Job(tmp_path)
        async with job.controller():
            first, second = await job.agent(0), await job.agent(1, asked=2)
            for agent in (first, second):
                assert (await hears(agent, "end"))["code"] == 130

    asyncio.run(main())


def test_who_is_lost_after_a_signal_is_waited_for_no_longer_than_one_that_is_silent(tmp_path):
    async def main():
        job = Job(tmp_path, silence_s=1.0, max_wait_s=3600.0)
        async with job.controller():
            (first, second), _ = await begun(job)
            await tell(first, "stopping", signal=15)
            while job.known()["asked"] is None:
                await asyncio.sleep(0.01)
            second.abort()
            alive = asyncio.create_task(says_alive(first))
            assert (await hears(first, "end"))["code"] == SAVED
            alive.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    "hello",
    [
        dict(),
        dict(node=0),
        dict(node=0, generation=1, asked=None, workers=[dict(no="worker")]),
        dict(node=0, generation=1, asked=None),
        dict(node=0, generation=1, workers=[]),
    ],
)
def test_a_hello_that_cannot_be_understood_costs_a_line(hello, tmp_path, caplog):
    async def scenario():
        job = Job(tmp_path)
        async with job.controller():
            agents = [await job.agent(node) for node in (0, 1)]
            started = await hears(agents[0], "start")
            stranger = await wire.open(job.address, TOKEN)
            await stranger.send(Message({"kind": "hello"} | hello))
            with pytest.raises(PeerGoneError):
                await stranger.recv()
            ended = {"kind": "ended", "worker": started["worker"], "code": -9, "why": ""}
            await agents[0].send(Message(ended))
            await hears(agents[0], "abort")  # the node that it spoke for is still there

    asyncio.run(scenario())
    assert len([record for record in caplog.records if "hello" in record.message]) == 1


def test_what_to_do_about_a_missing_node_is_said():
    assert waiting_for([1, 4], 90.2, "--max-wait") == (
        "nodes 1, 4 are missing: waiting for a spare, or for `mocrun ... --node-rank 1`, `mocrun ... --node-rank 4`; "
        "giving up in 90 s (--max-wait)"
    )
