"""Starts a job whose workers are replaced when they are lost, while the others live on.

    python -m moc.launch --nproc-per-node 4 pretrain_gpt_moe.py ...

It takes torchrun's flags, and a script that runs under torchrun runs under it unchanged.  docs/runtime.md says what
happens when something is lost, and what the exit codes mean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from moc.runtime import children, hangs, job_token
from moc.runtime.agent import Agent, LostError, Node
from moc.runtime.membership import LOST
from moc.runtime.signals import Signals, StoppedError
from moc.runtime.wire import WireError

_log = logging.getLogger("moc")


@dataclass(frozen=True)
class Flags:
    """What the command line says.

    Attributes:
        nnodes: nodes of the job.
        nproc_per_node: workers of each.
        spares: nodes beyond these, which wait until one is lost.
        node_rank: number of this node; spares come last.
        endpoint: ``host:port`` of the controller, on the first node; port 0 for any.
        alone: there is only this machine, and spares are processes of this launcher.
        max_restarts: lost workers that are replaced.
        log_dir: directory for the output of workers; None to let them write to this process's.
        silence_s: a worker or a node that has said nothing for so long is lost.
        hang_caps: seconds that a worker may be in a section, by section.
        max_wait_s: how long nodes that are missing are waited for.
        patience_s: how long to wait for a controller that is gone, and for workers to leave.
        own: the flags themselves.
        command: script and arguments.
    """

    nnodes: int
    nproc_per_node: int
    spares: int
    node_rank: int
    endpoint: str
    alone: bool
    max_restarts: int
    log_dir: Path | None
    silence_s: float
    hang_caps: dict[str, float]
    max_wait_s: float
    patience_s: float
    own: list[str]
    command: list[str]


def parse(arguments: list[str]) -> Flags:
    """The command line; ends the process with a sentence where it cannot work."""
    parser = argparse.ArgumentParser("mocrun", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)

    def add(name: str, default, text: str, **how) -> None:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        parser.add_argument(*sorted(spellings), default=default, help=f"{text} (default: {default})", **how)

    add("nnodes", 1, "nodes of the job", type=int)
    add("nproc-per-node", 1, "workers on each node", type=int)
    add("spares", 0, "nodes beyond --nnodes, which wait until one is lost and then take its place", type=int)
    add("node-rank", 0, "number of this node; those of spares begin at --nnodes", type=int)
    add("rdzv-endpoint", None, "HOST[:PORT] of the first node, the same on all nodes", metavar="HOST[:PORT]")
    add("master-addr", None, "the same, in two flags")
    add("master-port", 29400, "its port", type=int)
    parser.add_argument("--standalone", action="store_true", help="one node, on any free port, which is the default")
    add("max-restarts", 1000, "workers lost by a signal that are replaced before the job gives up", type=int)
    add("log-dir", None, "directory for the output of each worker", type=Path)
    add("silence-timeout", 30.0, "seconds after which a worker or a node that says nothing is lost", type=float)
    caps = ",".join(f"{section}={seconds:g}" for section, seconds in hangs.CAPS.items())
    add("hang-timeout", caps, "most seconds that a worker may be in a section before it is replaced; less is learned")
    add("max-wait", 1800.0, "seconds to wait for a lost node or a spare before the job ends with code 75", type=float)
    add("patience", 60.0, "seconds to wait for a lost controller, and for workers to leave at the end", type=float)
    parser.add_argument("script", help="program of the workers")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    own = parser.parse_args(arguments)
    if own.nnodes < 1 or own.nproc_per_node < 1 or own.spares < 0:
        parser.error("--nnodes and --nproc-per-node must be at least 1, and --spares at least 0")
    if not 0 <= own.node_rank < own.nnodes + own.spares:
        parser.error(f"--node-rank must be from 0 to {own.nnodes + own.spares - 1}: --nnodes {own.nnodes}, then spares")
    if not Path(own.script).is_file():
        parser.error(f"{own.script} is not there: name the workers' program")
    for name in ("silence_timeout", "patience", "max_wait"):
        if getattr(own, name) < (0 if name == "max_wait" else 1):
            parser.error(f"--{name.replace('_', '-')} {getattr(own, name):g} leaves no time: give more seconds")
    address = None if own.standalone else own.rdzv_endpoint or own.master_addr
    if (own.nnodes > 1 or own.node_rank > 0) and (own.standalone or address is None):
        parser.error("several nodes need --rdzv-endpoint HOST:PORT of the first one, the same everywhere")
    try:
        hang_caps = hangs.parse_caps(own.hang_timeout)
    except ValueError as error:
        parser.error(f"--hang-timeout: {error}")
    host, port = _split(address or "127.0.0.1:0")
    command = [own.script, *own.arguments]
    return Flags(
        nnodes=own.nnodes,
        nproc_per_node=own.nproc_per_node,
        spares=own.spares,
        node_rank=own.node_rank,
        endpoint=f"{host}:{port or own.master_port}",
        alone=address is None,
        max_restarts=own.max_restarts,
        log_dir=own.log_dir,
        silence_s=own.silence_timeout,
        hang_caps=hang_caps,
        max_wait_s=own.max_wait,
        patience_s=own.patience,
        own=[flag for flag in arguments[: len(arguments) - len(command)] if flag not in ("--", "--standalone")],
        command=command,
    )


def _split(address: str) -> tuple[str, str]:
    """Host and port, which is empty where none is named; an IPv6 address is in brackets, if a port follows."""
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]", ""
    host, bracket, rest = address.rpartition("]")
    name, _, port = rest.partition(":")
    return host + bracket + name, port


def launch(flags: Flags) -> int:
    """Runs this node's part of a job to its end; the exit code."""
    logging.basicConfig(format="mocrun: %(message)s", stream=sys.stderr, level=logging.INFO)
    with tempfile.TemporaryDirectory(prefix="mocrun-") as directory:
        try:
            token = _token(flags, Path(directory))
            return asyncio.run(_run(flags, token, Path(directory)))
        except StoppedError as error:
            print(f"mocrun: {error}", file=sys.stderr)
            return 128 + error.number
        except (LostError, WireError, job_token.TokenError, OSError) as error:
            print(f"mocrun: error: {error}", file=sys.stderr)
            return LOST


def _token(flags: Flags, directory: Path) -> bytes:
    given = job_token.FILE_VARIABLE in os.environ or job_token.VARIABLE in os.environ
    if (flags.alone or flags.nnodes + flags.spares == 1) and not given:
        os.environ[job_token.FILE_VARIABLE] = str(directory / "token")
        return job_token.make_token_file(directory / "token")
    return job_token.token_from_environment()


async def _run(flags: Flags, token: bytes, directory: Path) -> int:
    signals = Signals()
    if flags.log_dir is not None:
        flags.log_dir.mkdir(parents=True, exist_ok=True)
    if flags.node_rank > 0:
        return await _run_agent(flags, flags.endpoint, token, directory, signals)
    state = directory / "controller.json"
    controller, endpoint = await signals.unless_stopped(_start_controller(flags, flags.endpoint, state))
    keeping = asyncio.create_task(_keep_controller(flags, controller, endpoint, state))
    spares = [asyncio.create_task(_run_spare(flags, endpoint, node, signals)) for node in _spares_here(flags)]
    try:
        code = await _run_first(flags, lambda: _run_agent(flags, endpoint, token, directory, signals))
        await asyncio.wait([keeping], timeout=flags.patience_s)  # until all agents have heard
        if spares and keeping.done():
            await asyncio.wait(spares, timeout=flags.patience_s)
        return code
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _run_first(flags: Flags, run: Callable[[], Awaitable[int]]) -> int:
    """The first node's part; where there are spares, the node may be lost and come back, while the controller lives."""
    for _ in range(flags.spares):
        try:
            return await run()
        except LostError as error:
            _log.error("node 0 is lost, and comes back: %s", error)
    return await run()


async def _run_agent(flags: Flags, endpoint: str, token: bytes, directory: Path, signals: Signals) -> int:
    """The agent of this node."""
    node = Node(
        number=flags.node_rank,
        per_node=flags.nproc_per_node,
        size=flags.nnodes * flags.nproc_per_node,
        controller=endpoint,
        token=token,
        directory=directory,
        logs=flags.log_dir,
        silence_s=flags.silence_s,
        hang_caps=flags.hang_caps,
        patience_s=flags.patience_s,
    )
    agent = Agent(node, flags.command)
    with signals.heard_by(agent.signal):
        return await agent.run()


def _spares_here(flags: Flags) -> range:
    """Numbers of the spares that this launcher starts itself: all of them, where there is only this machine."""
    return range(1, flags.spares + 1) if flags.alone else range(0)


async def _run_spare(flags: Flags, endpoint: str, node: int, signals: Signals) -> None:
    """Another launcher on this machine, which dies with this one."""
    place = ["--node-rank", str(node), "--rdzv-endpoint", endpoint]
    spare = await children.start("moc.launch", *flags.own, *place, *flags.command)

    def pass_on(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            spare.send_signal(number)

    with signals.heard_by(pass_on):
        await spare.wait()


async def _start_controller(flags: Flags, endpoint: str, state: Path) -> tuple[asyncio.subprocess.Process, str]:
    """The controller as a process of its own, which dies with this one, and where it listens."""
    host = endpoint.rpartition(":")[0]
    process = await children.start(
        *("moc.runtime.controller", "--listen", endpoint, "--state", str(state)),
        *("--size", str(flags.nnodes * flags.nproc_per_node), "--per-node", str(flags.nproc_per_node)),
        *("--max-restarts", str(flags.max_restarts), "--silence", str(flags.silence_s)),
        *("--max-wait", str(flags.max_wait_s)),
        *(["--beyond-loopback"] if host not in ("127.0.0.1", "localhost", "[::1]") else []),
        stdout=subprocess.PIPE,
    )
    address = (await process.stdout.readline()).decode().strip()
    if not address:
        raise LostError(f"the controller does not start at {endpoint}: see what it wrote above")
    return process, address


async def _keep_controller(flags: Flags, process: asyncio.subprocess.Process, endpoint: str, state: Path) -> None:
    """Starts the controller again when it dies; the agents find it where it was, and tell it what it must know."""
    try:
        while await process.wait() != 0:
            _log.warning("the controller has died: started again")
            process, _ = await _start_controller(flags, endpoint, state)
    finally:  # the directory that it writes to is about to go
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """The console script ``mocrun``."""
    if children.PARENT in os.environ:  # this is a spare
        children.belong()
    sys.exit(launch(parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
