"""The controller as a launcher has it: started again, where it was."""

import asyncio
import errno
import functools
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from moc.runtime import async_connections, child_processes, protocol
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


def test_controller_outlives_name_service_and_failed_start(monkeypatch, caplog):
    """Its health is checked without a name, and it is started until that succeeds."""
    monkeypatch.setenv(protocol.TOKEN_VARIABLE, TOKEN.hex())
    start, failures = child_processes.start_reporting, [OSError(errno.EAGAIN, "too many processes")]

    async def start_or_fail(*arguments, **options):
        if failures:
            raise failures.pop()
        return await start(*arguments, **options)

    async def main():
        flags = SimpleNamespace(**FLAGS | {"endpoints": ("localhost:0",), "silence_timeout_s": 1.0})
        async with ControllerProcess(flags, TOKEN) as controller:
            await controller.start()
            keeping, first = asyncio.create_task(controller.run()), controller._process.pid
            checks = []
            monkeypatch.setattr(socket, "getaddrinfo", functools.partial(only_numeric, socket.getaddrinfo))
            monkeypatch.setattr(async_connections, "check_health", counted(async_connections.check_health, checks))
            while len(checks) < 3:
                await asyncio.sleep(0.05)
            assert controller._process.pid == first
            monkeypatch.setattr(child_processes, "start_reporting", start_or_fail)
            os.kill(first, signal.SIGKILL)
            await asyncio.wait_for(answers(controller.bound_address), 60)
            assert controller._process.pid != first and not keeping.done()
            keeping.cancel()

    asyncio.run(main())
    assert "too many processes" in caplog.text


def only_numeric(resolve, host, *arguments, **options):
    """Resolves addresses only, as if no name server answered."""
    if host == "localhost":
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return resolve(host, *arguments, **options)


def counted(check, checks):
    """A health check that appends its answers to a list."""

    async def count(*arguments):
        checks.append(await check(*arguments))
        return checks[-1]

    return count
