"""The agent of a node with real processes as workers; without a forkserver and a controller."""

import asyncio
import json
import signal
import subprocess
from types import SimpleNamespace

import pytest

from moc import launch
from moc.runtime import async_connections
from moc.runtime.agent import Agent
from moc.runtime.protocol import Message
from tests.errors import raises
from tests.unit.runtime.peers import TOKEN


class Node:
    """An agent, and the workers that it was told to start."""

    def __init__(self, program):
        self.agent = Agent(launch.parse([str(program)]), ["127.0.0.1:1"], TOKEN)
        self.events, self.processes = asyncio.StreamReader(), []
        self.agent._forkserver = SimpleNamespace(stdout=self.events, stdin=SimpleNamespace(write=lambda _: None))
        self.handling = asyncio.create_task(self.agent._handle_forkserver_events())

    async def starts(self, name, generation):
        order = {"kind": "start", "worker": name, "rank": 0, "generation": generation, "together": True}
        self.agent._execute(order | {"place": 0, "size": 1, "guest": False, "helpers": []})
        self.processes.append(process := subprocess.Popen(["sleep", "600"]))
        self.says(started=name, pid=process.pid)
        while self.agent._workers[name].pid is None:
            await asyncio.sleep(0.01)
        return process

    async def loses(self, process, name):
        process.kill()
        process.wait()
        self.says(ended=name, code=-signal.SIGKILL)
        while name in self.agent._workers:
            await asyncio.sleep(0.01)

    def says(self, **event):
        self.events.feed_data(json.dumps(event).encode() + b"\n")

    def end(self):
        self.handling.cancel()
        for process in self.processes:
            process.kill()
            process.wait()


def with_node(tmp_path, body):
    (tmp_path / "program.py").touch()

    async def main():
        node = Node(tmp_path / "program.py")
        try:
            await body(node)
        finally:
            node.end()

    asyncio.run(main())


@pytest.mark.parametrize("connects", [False, True])
def test_stop_signal_reaches_replaced_workers(connects, tmp_path):
    """Those of a program that connects wait for it, since others may have state to save."""

    async def body(node):
        address = f"unix:{tmp_path}/agent"

        async def connect(name):
            connection = await async_connections.open_connection(address, TOKEN)
            await connection.send(Message({"kind": "hello", "worker": name}))
            while node.agent._workers[name].connection is None:
                await asyncio.sleep(0.01)

        async with await async_connections.serve(address, TOKEN, node.agent._serve_worker):
            first = await node.starts("0.1", 0)
            if connects:
                await connect("0.1")
            await node.loses(first, "0.1")
            second = await node.starts("1.2", 1)
            node.agent.signal(signal.SIGUSR1)
            if connects:
                await asyncio.sleep(0.2)
                assert second.poll() is None
                await connect("1.2")
            assert await asyncio.to_thread(second.wait) == -signal.SIGUSR1

    with_node(tmp_path, body)


def test_worker_that_ended_before_it_was_killed_ends_no_node(tmp_path):
    async def body(node):
        ended = subprocess.Popen(["true"])
        ended.wait()
        node.says(started="0.7", pid=ended.pid)  # which the controller has ordered to kill meanwhile
        node.events.feed_eof()
        with raises("zygote-lost"):
            await node.handling

    with_node(tmp_path, body)


def test_forkserver_that_hangs_in_its_imports_ends_node(tmp_path):
    async def body(node):
        node.agent._clock.now = 3599.0
        node.agent._check_forkserver()
        node.agent._clock.now = 3601.0
        with raises("zygote-lost", "--hang-timeout setup"):
            node.agent._check_forkserver()

    with_node(tmp_path, body)
