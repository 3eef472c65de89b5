"""Starts a job whose workers are replaced when they are lost, while the others live on.

    python -m moc.launch --nproc-per-node 4 pretrain_gpt_moe.py ...

It takes torchrun's flags, and a script that runs under torchrun runs under it unchanged.  docs/runtime.md says what
happens when something is lost, and what the exit codes mean.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moc.runtime import job_token
from moc.runtime.agent import Agent, LostError, Node
from moc.runtime.wire import WireError

EXIT_LOST = 70  # sysexits' EX_SOFTWARE: the launcher's own processes failed


@dataclass(frozen=True)
class Flags:
    """What the command line says.

    Attributes:
        nnodes: nodes of the job.
        nproc_per_node: workers of each.
        node_rank: number of this node.
        endpoint: ``host:port`` of the controller, on the first node; port 0 for any.
        max_restarts: lost workers that are replaced.
        log_dir: directory for the output of workers; None to let them write to this process's.
        silence_s: a worker or a node that has said nothing for so long is lost.
        patience_s: how long to wait for a controller that is gone, and for workers to leave.
        command: script and arguments.
    """

    nnodes: int
    nproc_per_node: int
    node_rank: int
    endpoint: str
    max_restarts: int
    log_dir: Path | None
    silence_s: float
    patience_s: float
    command: list[str]


def parse(arguments: list[str]) -> Flags:
    """The command line; ends the process with a sentence where it cannot work."""
    parser = argparse.ArgumentParser("mocrun", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)

    def add(name: str, default, text: str, **how) -> None:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        parser.add_argument(*sorted(spellings), default=default, help=f"{text} (default: {default})", **how)

    add("nnodes", 1, "nodes of the job", type=int)
    add("nproc-per-node", 1, "workers on each node", type=int)
    add("node-rank", 0, "number of this node", type=int)
    add("rdzv-endpoint", None, "HOST[:PORT] of the first node, the same on all nodes", metavar="HOST[:PORT]")
    add("master-addr", None, "the same, in two flags")
    add("master-port", 29400, "its port", type=int)
    parser.add_argument("--standalone", action="store_true", help="one node, on any free port, which is the default")
    add("max-restarts", 1000, "workers lost by a signal that are replaced before the job gives up", type=int)
    add("log-dir", None, "directory for the output of each worker", type=Path)
    add("silence-timeout", 30.0, "seconds after which a worker or a node that says nothing is lost", type=float)
    add("patience", 60.0, "seconds to wait for a lost controller, and for workers to leave at the end", type=float)
    parser.add_argument("script", help="program of the workers")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    own = parser.parse_args(arguments)
    if own.nnodes < 1 or own.nproc_per_node < 1 or not 0 <= own.node_rank < own.nnodes:
        parser.error("--nnodes and --nproc-per-node must be at least 1, and --node-rank below --nnodes")
    if not Path(own.script).is_file():
        parser.error(f"{own.script} is not there: name the workers' program")
    address = own.rdzv_endpoint or own.master_addr
    if own.nnodes > 1 and (own.standalone or address is None):
        parser.error("several nodes need --rdzv-endpoint HOST:PORT of the first one, the same everywhere")
    host, _, port = (address or "127.0.0.1:0").partition(":")
    endpoint = f"{host}:{port or own.master_port}"
    limits = own.max_restarts, own.log_dir, own.silence_timeout, own.patience
    return Flags(own.nnodes, own.nproc_per_node, own.node_rank, endpoint, *limits, [own.script, *own.arguments])


def launch(flags: Flags) -> int:
    """Runs this node's part of a job to its end; the exit code."""
    logging.basicConfig(format="mocrun: %(message)s", stream=sys.stderr, level=logging.INFO)
    with tempfile.TemporaryDirectory(prefix="mocrun-") as directory:
        try:
            token = _token(flags, Path(directory))
            return asyncio.run(_run(flags, token, Path(directory)))
        except (LostError, WireError, job_token.TokenError, OSError) as error:
            print(f"mocrun: error: {error}", file=sys.stderr)
            return EXIT_LOST


def _token(flags: Flags, directory: Path) -> bytes:
    given = job_token.FILE_VARIABLE in os.environ or job_token.VARIABLE in os.environ
    if flags.nnodes == 1 and not given:
        os.environ[job_token.FILE_VARIABLE] = str(directory / "token")
        return job_token.make_token_file(directory / "token")
    return job_token.token_from_environment()


async def _run(flags: Flags, token: bytes, directory: Path) -> int:
    if flags.log_dir is not None:
        flags.log_dir.mkdir(parents=True, exist_ok=True)
    controller, endpoint = None, flags.endpoint
    if flags.node_rank == 0:
        controller, endpoint = await _start_controller(flags, endpoint)
    sizes = flags.node_rank, flags.nproc_per_node, flags.nnodes * flags.nproc_per_node
    node = Node(*sizes, endpoint, token, directory, flags.log_dir, flags.silence_s, flags.patience_s)
    agent = Agent(node, flags.command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, agent.signal, number)
    if controller is None:
        return await agent.run()
    keeping = asyncio.create_task(_keep_controller(flags, controller, endpoint))
    try:
        return await agent.run()
    finally:
        keeping.cancel()


async def _start_controller(flags: Flags, endpoint: str) -> tuple[asyncio.subprocess.Process, str]:
    """The controller as a process of its own, which dies with this one, and where it listens."""
    host = endpoint.rpartition(":")[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moc.runtime.controller", "--listen", endpoint),
        *("--size", str(flags.nnodes * flags.nproc_per_node), "--per-node", str(flags.nproc_per_node)),
        *("--max-restarts", str(flags.max_restarts), "--silence", str(flags.silence_s)),
        *(["--beyond-loopback"] if host not in ("127.0.0.1", "localhost", "::1") else []),
        stdout=subprocess.PIPE,
        start_new_session=True,  # what a terminal sends is for the launcher
    )
    address = (await process.stdout.readline()).decode().strip()
    if not address:
        raise LostError(f"the controller does not start at {endpoint}: see what it wrote above")
    return process, address


async def _keep_controller(flags: Flags, process: asyncio.subprocess.Process, endpoint: str) -> None:
    """Starts the controller again when it dies; the agents find it where it was, and tell it what it must know."""
    while True:
        if await process.wait() == 0:
            return
        logging.getLogger("moc").warning("the controller has died: started again")
        process, _ = await _start_controller(flags, endpoint)


def main() -> None:
    """The console script ``mocrun``."""
    sys.exit(launch(parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
