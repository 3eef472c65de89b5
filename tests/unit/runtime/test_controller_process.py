"""The controller as a launcher has it: started again, where it was."""

import asyncio
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from moc.runtime import async_connections, protocol
from moc.runtime.controller_process import ControllerProcess
from moc.runtime.protocol import Message, WireError
from tests.unit.runtime.peers import TOKEN

FLAGS = dict(
    nnodes=1,
    min_nodes=1,
    grow_wait_s=0.0,
    nproc_per_node=1,
    spares=0,
    node_rank=0,
    endpoints=("127.0.0.1:0",),
    max_restarts=1,
    max_standstill=3,
    silence_timeout_s=8.0,
    max_wait_s=60.0,
)


async def answers(address):
    """The number of the process that is there, when it does."""
    while True:
        try:
            connection = await async_connections.open_connection(address, TOKEN)
            await connection.send(Message({"kind": "ask"}))
            assert (await connection.recv()).header["leads"] is False
            connection.abort()
            return
        except WireError:
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_restarted_controller_keeps_its_port_reserved(number, monkeypatch, caplog):
    monkeypatch.setenv(protocol.TOKEN_VARIABLE, TOKEN.hex())

    async def main():
        async with ControllerProcess(SimpleNamespace(**FLAGS), TOKEN) as controller:
            await controller.start()
            (address,) = controller.endpoints
            keeping = asyncio.create_task(controller.run())
            await asyncio.wait_for(answers(address), 60)
            first = controller._process.pid
            os.kill(first, number)
            with socket.socket() as other, pytest.raises(OSError):
                while controller._process.pid == first:
                    await asyncio.sleep(0)
                    other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            while controller._process.pid == first:
                await asyncio.sleep(0.05)
            await asyncio.wait_for(answers(address), 60)
            keeping.cancel()

    asyncio.run(main())
    why = "has died" if number == signal.SIGKILL else "has not answered for 4 s"
    assert f"the controller {why}: started again" in caplog.text
