"""Starts a job that replaces lost workers while the others keep running.

    python -m moc.launch --nproc-per-node 4 pretrain_gpt_moe.py ...

It accepts torchrun's flags and runs scripts for torchrun unchanged.  docs/explanation/recovery.md describes recovery,
docs/reference/exit-codes.md the exit codes.
"""

from __future__ import annotations

import os
import sys

from moc.runtime.termination import end_on_signals, exit_for_signal, stop_message

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "mocrun":  # before imports that take a second
    end_on_signals(lambda number: f"mocrun: {stop_message(number, 128 + number, None)}", exit_for_signal)

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import moc
from moc.cli_output import Parser, counted, escapes_output, log_to_stderr, print_lines
from moc.errors import UserError, warning, with_code
from moc.files.event_log import EVENTS_FILE, append_event, newest_event
from moc.runtime import child_processes, import_hook, progress, protocol
from moc.runtime.agent import Agent, ProgramRefusedError
from moc.runtime.child_processes import Signals, StoppedError
from moc.runtime.connections import InterfaceError, interface_address, is_loopback
from moc.runtime.controller_link import DepartureError, DependencyLostError, NoControllerError, NodeRemovedError
from moc.runtime.controller_process import ControllerProcess
from moc.runtime.flags import LauncherFlags, MonitorFlags, parse_node_range
from moc.runtime.loss_record import unwritten
from moc.runtime.monitor_process import MonitorProcess
from moc.runtime.program import MODULE_VARIABLE, REFUSED_EXIT_CODE, ProgramError, check_arguments, find_program
from moc.runtime.protocol import WireError
from moc.runtime.standstill import MAX_STANDSTILL
from moc.runtime.termination import DEPARTED, LOST, STOP_SIGNALS
from moc.store.errors import TakenError

_log = logging.getLogger("moc")


_NOT_OF_SPARES = ("--", "--standalone", "-m", "--module")
"""Flags that the launcher does not pass on to spares that it starts."""


_WORKER_LOGS = "workers"
"""Name of the directory in a run's log directory with a file for the output of each worker."""


class LaunchError(UserError):
    """Unusable value of a launcher flag."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all flags."""
    parser = Parser(
        "mocrun",
        usage="mocrun [flags] {SCRIPT | -m MODULE} [arguments]",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )

    def add(name: str, default, text: str, **how) -> None:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        parser.add_argument(*sorted(spellings), default=default, help=f"{text} (default: {default})", **how)

    text = "nodes of the job; with MIN, it continues with the others when one is lost, on down to MIN nodes"
    add("nnodes", "1", text, type=parse_node_range, metavar="[MIN:]MAX")
    add("nproc-per-node", 1, "workers on each node", type=int)
    add("spares", 0, "nodes beyond --nnodes, which wait until one is lost and then take its place", type=int)
    add("node-rank", 0, "number of this node; spares are numbered from --nnodes", type=int)
    add(
        "rdzv-endpoint", None, "address of the controller: the first node; or the first nodes, in order:\n"
        "another one takes over if one is lost; the same on all nodes", metavar="HOST[:PORT][,HOST[:PORT]...]",
    )  # fmt: skip
    parser.add_argument(
        "--no-controller", action="store_true",
        help="controllers are not on the nodes: they were started with python -m moc.runtime.controller",
    )  # fmt: skip
    add("master-addr", None, "the same, in two flags")
    add("master-port", 29400, "its port", type=int)
    parser.add_argument("--standalone", action="store_true", help="one node, on any free port, which is the default")
    add("max-restarts", 1000, "workers lost by a signal that are replaced before the job gives up", type=int)
    text = "generations in a row that may lose a worker at one iteration before the job gives up"
    add("max-standstill", MAX_STANDSTILL, text, type=int)
    text = (
        "directory for the output of each worker, which is on the console, too; by default workers/ in the program's\n"
    )
    names = "--worker-log-dir", "--worker_log_dir", "--log-dir", "--log_dir"  # the last ones are torchrun's
    parser.add_argument(*names, type=Path, help=f"{text}--log-dir, if it has one")
    add("silence-timeout", 30.0, "seconds without a heartbeat after which a worker or a node is lost", type=float)
    caps = ",".join(f"{section}={seconds:g}" for section, seconds in progress.HANG_CAPS.items())
    add("hang-timeout", caps, "most seconds that a worker may be in a section before it is replaced; less is learned")
    add("max-wait", 1800.0, "seconds to wait for a lost node or a spare before the job ends with code 75", type=float)
    add("grow-wait", 120.0, "with MIN: seconds to wait for more nodes at the start, and when a node joins", type=float)
    text = "with MIN: seconds for a node to move its state to the others after SIGTERM; 0 to stop the job instead"
    add("drain-seconds", 25.0, text, type=float)
    add("patience", 60.0, "seconds to wait for a lost controller, and for workers to leave at the end", type=float)
    add("network-interface", None, "interface for traffic between workers and for copies of snapshots, such as eth0;\n"
        "by default the one towards the controller, which is lo if the controller is on 127.0.0.1")  # fmt: skip
    add("metrics-port", None, "port of Prometheus metrics: job and node; 0 for any", type=int)
    add("dashboard-port", None, "port of a page about the job; 0 for any", type=int)
    add("monitor-address", "127.0.0.1", "address of both; readers need a token unless it is on loopback")
    add("on-event", None, "shell command to run with each event that does not occur in every iteration; it reads the\n"
        "event from its standard input", metavar="CMD")  # fmt: skip
    parser.add_argument(
        "--no-megatron", action="store_true",
        help="run a script of Megatron-LM with its own loop, without snapshots and recovery",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"mocrun {moc.__version__}")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("script", help="program of the workers: a file, or an installed command such as moc-pretrain")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    return parser


def parse(arguments: list[str]) -> LauncherFlags:
    """Parses the command line; exits with a line for each mistake if it is invalid."""
    parser = build_parser()
    own = parser.parse_args(arguments)
    if own.no_megatron:
        os.environ[import_hook.DISABLE_VARIABLE] = "1"
    address = None if own.standalone else own.rdzv_endpoint or own.master_addr
    endpoints = [_split(endpoint) for endpoint in (address or "127.0.0.1:0").split(",")]
    program = find_program(own.script, own.module)
    mistakes = [with_code(mistake) for mistake in _mistakes(own, program, address, len(endpoints))]
    if mistakes:
        parser.print_usage(sys.stderr)
        print_lines(*(f"mocrun: error: {mistake}" for mistake in mistakes), error=True)
        parser.exit(2)
    assert program is not None  # refused above
    command = [program, *own.arguments]
    own_arguments = arguments[: len(arguments) - len(command)]
    return LauncherFlags(
        nnodes=own.nnodes[1],
        min_nodes=own.nnodes[0],
        nproc_per_node=own.nproc_per_node,
        spares=own.spares,
        node_rank=own.node_rank,
        endpoints=tuple(f"{host}:{port or own.master_port}" for host, port in endpoints),
        runs_controllers=not own.no_controller,
        is_single_machine=address is None,
        max_restarts=own.max_restarts,
        max_standstill=own.max_standstill,
        log_dir=own.worker_log_dir,
        silence_timeout_s=own.silence_timeout,
        hang_caps=progress.parse_hang_caps(own.hang_timeout),
        max_wait_s=own.max_wait,
        grow_wait_s=own.grow_wait,
        drain_s=own.drain_seconds,
        patience_s=own.patience,
        network_interface=own.network_interface,
        launcher_arguments=[flag for flag in own_arguments if flag not in _NOT_OF_SPARES]
        + ["-m"] * (MODULE_VARIABLE in os.environ),
        command=command,
        monitor=MonitorFlags(own.metrics_port, own.dashboard_port, own.monitor_address, own.on_event),
    )


def _mistakes(
    own: argparse.Namespace, program: str | None, address: str | None, candidates: int
) -> Iterator[UserError]:
    """Yields the mistakes of the command line."""
    max_nodes = own.nnodes[1]
    nodes = max_nodes + own.spares
    for name, minimum in (("nproc_per_node", 1), ("spares", 0), ("max_standstill", 0)):
        if getattr(own, name) < minimum:
            yield _out_of_range(name, getattr(own, name), f"at least {minimum}")
    for name in ("metrics_port", "dashboard_port"):
        if not 0 <= (getattr(own, name) or 0) <= 65535:
            yield _out_of_range(name, getattr(own, name), "a port, from 0 to 65535")
    if own.spares >= 0 and not 0 <= own.node_rank < nodes:
        yield UserError(
            f"--node-rank {own.node_rank} is no node of this job. Fix: give a number from 0 to {nodes - 1}: first "
            f"--nnodes {max_nodes}, then the spares",
            code="node-rank-out-of-range",
        )
    if own.metrics_port and own.metrics_port == own.dashboard_port:
        yield UserError(
            f"--metrics-port and --dashboard-port are both {own.metrics_port}. Fix: change one of them",
            code="flags-exclude-each-other",
        )
    if program is None:
        problem = "is a directory" if os.path.isdir(own.script) else "does not exist"
        yield UserError(
            f"{own.script} {problem}. Fix: name the program of the workers behind the flags of mocrun",
            code="program-missing",
        )
    seconds = dict(silence_timeout=1, patience=1, max_wait=0, grow_wait=0, drain_seconds=0)
    for name, minimum in seconds.items():
        if not getattr(own, name) >= minimum:  # also if it is NaN
            yield _out_of_range(name, getattr(own, name), f"at least {minimum}, in seconds")
    if (max_nodes > 1 or own.node_rank > 0) and address is None:
        yield UserError(
            "several nodes need the address of the first one. Fix: add --rdzv-endpoint HOST:PORT, the same on all "
            "nodes",
            code="rendezvous-missing",
        )
    if candidates > nodes > 0 and not own.no_controller:
        yield UserError(
            f"--rdzv-endpoint names {counted(candidates, 'node')}, and the job has {nodes}. Fix: name at most {nodes}",
            code="rendezvous-exceeds-nodes",
        )
    for endpoint in address.split(",") if address is not None else ():
        host, port = _split(endpoint)
        if not host or not (port or str(own.master_port)).isdecimal() or int(port or own.master_port) > 65535:
            yield UserError(
                f"--rdzv-endpoint {endpoint}, or --master-addr with --master-port {own.master_port}, is no address. "
                "Fix: write HOST:PORT with a port up to 65535",
                code="address-malformed",
            )
    if own.network_interface is not None:
        try:
            interface_address(own.network_interface)
        except InterfaceError as error:
            yield UserError(f"--network-interface {own.network_interface} cannot be used: {error}", code=error.code)
    if own.no_controller and address is None:
        yield UserError(
            "--no-controller needs the address of the controllers. Fix: add --rdzv-endpoint HOST:PORT",
            code="rendezvous-missing",
        )
    try:
        progress.parse_hang_caps(own.hang_timeout)
    except progress.HangCapError as error:
        yield UserError(f"--hang-timeout {own.hang_timeout} is not understood: {error}", code=error.code)


def _out_of_range(name: str, value: float, requirement: str) -> UserError:
    flag = f"--{name.replace('_', '-')}"
    return UserError(f"{flag} is {value:g}. Fix: give a number that is {requirement}", code="value-out-of-range")


def _split(address: str) -> tuple[str, str]:
    """Splits an address into host and port, which may be empty; an IPv6 host with a port needs brackets."""
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]", ""
    host, bracket, port_part = address.rpartition("]")
    name, _, port = port_part.partition(":")
    return host + bracket + name, port


def warning_of_one_endpoint(flags: LauncherFlags) -> str | None:
    """Returns the first node's warning if its loss would end the job; otherwise None."""
    nodes = flags.nnodes + flags.spares
    if (
        flags.is_single_machine
        or not flags.runs_controllers
        or flags.node_rank > 0
        or nodes == 1
        or len(flags.endpoints) > 1
    ):
        return None
    three = "--rdzv-endpoint HOST0,HOST1,HOST2"
    remedy = f"name three nodes, {three}" if nodes > 2 else f"add --spares 1 and name three nodes, {three}"
    return (
        f"WARNING: if node 0 is lost, the job ends after {flags.patience_s:g} s (--patience), since --rdzv-endpoint "
        f"names one node: {remedy}; or start the controller on another machine (--no-controller)"
    )


def warning_of_loopback(flags: LauncherFlags, bound_address: str) -> str | None:
    """Returns the warning of a node whose host name is a loopback address there, as in Debian's ``/etc/hosts``."""
    endpoint, bound_host = flags.endpoints[flags.node_rank], bound_address.rpartition(":")[0]
    if flags.is_single_machine or not flags.has_other_nodes or is_loopback(endpoint.rpartition(":")[0]):
        return None
    if not is_loopback(bound_host):
        return None
    return warning(
        f"other machines cannot connect to {endpoint} of --rdzv-endpoint, which is {bound_host} on this machine. Fix: "
        "name its address in the network, or correct /etc/hosts",
        code="address-not-of-machine",
    )


def launch(flags: LauncherFlags, reports: bool = True) -> int:
    """Runs this node's part of a job to its end; returns the exit code.

    Args:
        flags: flags of the launcher.
        reports: whether to print the effect of a signal that stops the job; a spare leaves this to its launcher.
    """
    log_to_stderr(logging.INFO)
    if (problem := warning_of_one_endpoint(flags)) is not None:
        _log.warning(problem)
    try:
        return asyncio.run(_run(flags, _token(flags), reports))
    except StoppedError as error:
        if reports:
            _log.error("%s", error)
        return 128 + error.number
    except ProgramRefusedError as error:
        print_lines(*error.lines, error=True)
        return error.exit_code
    except (LaunchError, DependencyLostError, WireError, protocol.TokenError, OSError) as error:
        print_lines(f"mocrun: error: {with_code(error)}", error=True)
        return LOST


def _token(flags: LauncherFlags) -> bytes:
    has_token = protocol.TOKEN_FILE_VARIABLE in os.environ or protocol.TOKEN_VARIABLE in os.environ
    if (flags.is_single_machine or not flags.has_other_nodes) and not has_token:
        os.environ[protocol.TOKEN_VARIABLE] = protocol.make_token().hex()  # not in a file, which might be cleaned up
    return protocol.token_from_environment()


async def _run(flags: LauncherFlags, token: bytes, reports: bool) -> int:
    signals = Signals()
    if flags.log_dir is not None:
        _make_log_dir(flags.log_dir)
    elif flags.run_log_dir is not None:
        flags = dataclasses.replace(flags, log_dir=flags.run_log_dir / _WORKER_LOGS)  # made by the first worker
    try:
        async with MonitorProcess(flags.monitor) as monitor:
            return await _run_node(flags, token, signals, reports, monitor)
    finally:  # the job has its exit code, which a signal does not change
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


async def _run_node(
    flags: LauncherFlags, token: bytes, signals: Signals, reports: bool, monitor: MonitorProcess
) -> int:
    if not flags.runs_controllers or flags.node_rank >= len(flags.endpoints):
        return (await _run_agent(flags, list(flags.endpoints), token, signals, reports, monitor))[0]
    async with ControllerProcess(flags, token) as controller:
        try:
            await signals.cancel_on_signal(controller.start())
        except OSError as error:
            raise _unusable(flags.endpoints[flags.node_rank], error) from None
        if (problem := warning_of_loopback(flags, controller.bound_address)) is not None:
            _log.warning("%s", problem)
        endpoints = controller.endpoints
        keeping = asyncio.create_task(controller.run())
        local_spares = range(1, flags.spares + 1) if flags.is_single_machine else ()
        spares = [asyncio.create_task(_run_spare(flags, endpoints, node, signals)) for node in local_spares]
        try:
            code, led = await _run_agent(flags, endpoints, token, signals, reports, monitor, rejoins=flags.spares)
            if led == flags.node_rank and code != DEPARTED:
                await asyncio.wait([keeping], timeout=flags.patience_s)  # until all agents have received the end
            if spares and keeping.done():
                await asyncio.wait(spares, timeout=flags.patience_s)
            return code
        except NodeRemovedError as error:
            if not isinstance(error, DepartureError) and _others_need_controller(flags):
                _log.error("this launcher ends after the job, since it runs the only controller: %s", error)
                with contextlib.suppress(StoppedError):
                    await signals.cancel_on_signal(asyncio.wait([keeping]))
            raise
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


def _others_need_controller(flags: LauncherFlags) -> bool:
    """Returns whether the other nodes continue without this one, but not without its controller."""
    can_continue = flags.spares > 0 or flags.min_nodes < flags.nnodes
    return can_continue and len(flags.endpoints) == 1 and not flags.is_single_machine


def _make_log_dir(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--worker-log-dir {directory} cannot be made: {error.strerror}. Fix: correct the path or its permissions",
            code="output-not-writable",
        ) from None


def _unusable(address: str, error: OSError) -> LaunchError:
    """Returns the error for an address that the controller cannot listen on."""
    host, _, port = address.rpartition(":")
    if error.errno == errno.EADDRINUSE:
        return LaunchError(
            f"another process listens on port {port} of {host}, which --rdzv-endpoint or --master-port names. Fix: "
            "choose another port, the same on all nodes, or end the other process",
            code="port-in-use",
        )
    return LaunchError(
        f"the controller cannot listen at {address} of --rdzv-endpoint: {error.strerror or error}. Fix: name an "
        "address of this machine there, the same on all nodes",
        code="address-not-of-machine",
    )


async def _run_agent(
    flags: LauncherFlags,
    endpoints: list[str],
    token: bytes,
    signals: Signals,
    reports: bool,
    monitor: MonitorProcess,
    rejoins: int = 0,
) -> tuple[int, int]:
    """Runs this node's agent, again up to ``rejoins`` times if the node is lost; returns as :meth:`Agent.run`."""
    while True:
        agent = Agent(flags, endpoints, token)
        monitor.describe = agent.describe
        try:
            with signals.deliver_to(agent.signal):
                code, led = await agent.run()
            if agent.loss_at_end is not None:
                _record_end(agent.loss_at_end, code, flags.run_log_dir, monitor)
            if reports and agent.stopped_by is not None:
                _log.error("%s", stop_message(agent.stopped_by, code, agent.iteration))
            return code, led
        except DependencyLostError as error:
            if not rejoins or isinstance(error, (NodeRemovedError, NoControllerError)):
                raise
            rejoins -= 1
            _log.error("node %d was lost, and joins again: %s", flags.node_rank, error)


def _record_end(end: dict, code: int, logs: Path | None, monitor: MonitorProcess) -> None:
    """Appends the losses that have ended the job to the events of the run, which has no worker left to do this."""
    path = monitor.events_file or (None if logs is None else logs / EVENTS_FILE)
    if path is not None:
        with contextlib.suppress(OSError):  # not written yet, or storage is away
            losses = unwritten(end["losses"], newest_event(path, "generation"), end["job"])
            append_event(path, "end", reason=end["reason"], code=code, **({"earlier": losses} if losses else {}))


async def _run_spare(flags: LauncherFlags, endpoints: list[str], node: int, signals: Signals) -> None:
    """Runs the launcher of a spare on this machine; it ends when this process dies."""
    location = ["--node-rank", str(node), "--rdzv-endpoint", ",".join(endpoints)]
    location += [] if flags.log_dir is None else ["--worker-log-dir", str(flags.log_dir)]
    spare = await child_processes.start("moc.launch", *flags.launcher_arguments, *location, *flags.command)

    def pass_on(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            spare.send_signal(number)

    with signals.deliver_to(pass_on):
        await spare.wait()


@escapes_output
def main() -> int:
    """Runs the console script ``mocrun``; returns the exit code."""
    is_spare = child_processes.PARENT in os.environ
    if is_spare:
        child_processes.attach_to_parent()
    flags = parse(sys.argv[1:])
    if is_spare:  # the launcher that has started it serves the machine
        flags = dataclasses.replace(flags, monitor=MonitorFlags())
    else:
        try:
            flags = dataclasses.replace(flags, run_log_dir=check_arguments(flags))
        except (TakenError, ProgramError) as error:
            print_lines(f"mocrun: error: {with_code(error)}", error=True)
            return REFUSED_EXIT_CODE
    code = launch(flags, reports=not is_spare)
    end_on_signals(lambda _: None, lambda _: os._exit(code))  # while the interpreter ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return code


if __name__ == "__main__":
    sys.exit(main())
