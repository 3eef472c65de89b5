"""The launcher's command line."""

import asyncio
import json.tool
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import moc
from moc import launch
from moc.errors import codes_in
from moc.launch import parse, warning_of_loopback, warning_of_one_endpoint
from moc.runtime.child_processes import Signals
from moc.runtime.controller_link import NoControllerError, NodeRemovedError
from moc.runtime.flags import MonitorFlags
from moc.runtime.monitor_process import MonitorProcess
from moc.runtime.program import MODULE_VARIABLE, ProgramError, check_arguments
from moc.runtime.progress import HANG_CAPS
from tests.cases import each_row
from tests.errors import only_code

ENDPOINT = ("--rdzv-endpoint", "node0:29500")


def parsed(*flags):
    return parse([*flags, __file__, "--nnodes", "9"])


def test_single_machine_needs_no_flags():
    flags = parsed()
    assert (flags.nnodes, flags.nproc_per_node, flags.spares, flags.node_rank) == (1, 1, 0, 0)
    assert flags.is_single_machine and flags.endpoints == ("127.0.0.1:0",) and flags.runs_controllers
    assert flags.command == [__file__, "--nnodes", "9"] and flags.hang_caps == HANG_CAPS


def test_version_flag_prints_version(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"mocrun {moc.__version__}\n"


def test_spares_are_numbered_after_nodes():
    assert parsed("--nnodes", "2", "--spares", "1", "--node-rank", "2", *ENDPOINT).node_rank == 2
    with pytest.raises(SystemExit):
        parsed("--nnodes", "2", "--spares", "1", "--node-rank", "3", *ENDPOINT)


def test_spares_of_same_machine_get_launcher_arguments():
    flags = parsed("--standalone", "--nproc-per-node", "4", "--spares", "1", "--")
    assert flags.is_single_machine and flags.launcher_arguments == ["--nproc-per-node", "4", "--spares", "1"]
    spare = parse([*flags.launcher_arguments, "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:5", *flags.command])
    assert not spare.is_single_machine and (spare.node_rank, spare.nproc_per_node, spare.endpoints) == (
        1,
        4,
        ("127.0.0.1:5",),
    )


@each_row("words", [["moc-pretrain"], ["-m", "json.tool"]])
def test_command_and_module_run_as_modules_on_all_nodes(words, monkeypatch):
    monkeypatch.setenv(MODULE_VARIABLE, "of another job")
    command = EntryPoint("moc-pretrain", "json.tool:main", "console_scripts")
    monkeypatch.setattr("moc.runtime.program.entry_points", lambda group: [command])
    flags = parse(["--spares", "1", *words, "--lr", "1"])
    assert flags.command == [json.tool.__file__, "--lr", "1"] and os.environ[MODULE_VARIABLE] == "json.tool"
    assert flags.launcher_arguments == ["--spares", "1", "-m"]
    spare = parse([*flags.launcher_arguments, "--node-rank", "1", *ENDPOINT, *flags.command])
    assert spare.command == flags.command and os.environ[MODULE_VARIABLE] == "json.tool"
    parsed()
    assert MODULE_VARIABLE not in os.environ


@each_row(
    "given, endpoint",
    [
        ("node0", "node0:29400"),
        ("node0:5", "node0:5"),
        ("[::1]:5", "[::1]:5"),
        ("[fe80::1]", "[fe80::1]:29400"),
        ("fe80::1", "[fe80::1]:29400"),
    ],
)
def test_controller_endpoint_is_parsed(given, endpoint):
    assert parsed("--rdzv-endpoint", given).endpoints == (endpoint,)
    assert parsed("--rdzv-endpoint", given, "--standalone").endpoints == ("127.0.0.1:0",)


def test_several_nodes_may_run_controller():
    flags = parsed("--nnodes", "3", "--rdzv-endpoint", "h0:5,h1,[::1]:6")
    assert flags.endpoints == ("h0:5", "h1:29400", "[::1]:6")
    assert not parsed("--nnodes", "3", "--rdzv-endpoint", "ctl:5", "--no-controller").runs_controllers


THREE = ("--nnodes", "3", "--rdzv-endpoint", "h0,h1,h2")


@each_row(
    "flags, names",
    [
        (("--nnodes", "3", *ENDPOINT), ("--rdzv-endpoint", "--no-controller", "--patience", "60 s")),
        (
            ("--nnodes", "2:4", *ENDPOINT, "--patience", "5"),
            ("--rdzv-endpoint", "--no-controller", "--patience", "5 s"),
        ),
        (("--nnodes", "2", *ENDPOINT), ("--spares 1", "--rdzv-endpoint", "--no-controller")),  # two are no majority
        (("--nnodes", "3", *ENDPOINT, "--node-rank", "1"), None),  # the first node alone prints it
        (("--nnodes", "3", *ENDPOINT, "--no-controller"), None),
        (THREE, None),
        (("--spares", "1"), None),  # all of it is on this machine
        ((), None),
    ],
)
def test_single_controller_candidate_is_announced(flags, names):
    warning = warning_of_one_endpoint(parsed(*flags))
    assert (warning is None) == (names is None)
    assert all(name in (warning or "") for name in names or ())


@each_row(
    "flags, bound, warns",
    [
        (("--nnodes", "2", *ENDPOINT), "127.0.1.1:29500", True),
        (("--nnodes", "2", *ENDPOINT), "192.0.2.1:29500", False),
        (("--nnodes", "2", "--rdzv-endpoint", "localhost:1"), "127.0.0.1:1", False),
        (ENDPOINT, "127.0.1.1:29500", False),
    ],
)
def test_endpoint_that_only_this_machine_reaches_is_announced(flags, bound, warns):
    line = warning_of_loopback(parsed(*flags), bound)
    assert (line is not None) == warns
    assert (
        line is None or codes_in(line) == ["address-not-of-machine"] and "node0:29500" in line and "127.0.1.1" in line
    )


@each_row(
    "flags, code, named",
    [
        (("--nnodes", "2"), "rendezvous-missing", "--rdzv-endpoint"),
        (("--spares", "1", "--node-rank", "1"), "rendezvous-missing", "--rdzv-endpoint"),
        (("--spares", "-1"), "value-out-of-range", "--spares is -1"),
        (("--nnodes", "2", "--rdzv-endpoint", "a,b,c"), "rendezvous-exceeds-nodes", "--rdzv-endpoint"),
        (("--rdzv-endpoint", "a:99999"), "address-malformed", "a:99999"),
        (("--master-addr", "a", "--master-port", "99999"), "address-malformed", "99999"),
        (("--no-controller",), "rendezvous-missing", "--rdzv-endpoint"),
        (("--node-rank", "1", *ENDPOINT), "node-rank-out-of-range", "--node-rank 1"),
        (("--hang-timeout", "stop=3"), "hang-timeout-malformed", "stop"),
        (("--network-interface", "nosuch0"), "network-interface-missing", "nosuch0"),
        (("--silence-timeout", "0"), "value-out-of-range", "--silence-timeout is 0"),
        (("--max-wait", "-1"), "value-out-of-range", "--max-wait is -1"),
        (("--patience", "nan"), "value-out-of-range", "--patience is nan"),
        (("--nproc-per-node", "two"), "flag-invalid", "--nproc-per-node"),
    ],
)
def test_flag_error_is_named(flags, code, named, capsys):
    with pytest.raises(SystemExit) as leaving:
        parsed(*flags)
    output = capsys.readouterr().err
    assert leaving.value.code == 2 and only_code(output) == code and named in output


def test_all_flag_errors_are_reported_together(capsys):
    with pytest.raises(SystemExit):
        parse(["--nproc-per-node", "0", "--max-wait", "-1", "--no-controller", "/no/program.py"])
    out_of_range = "value-out-of-range"
    expected = [out_of_range, "program-missing", out_of_range, "rendezvous-missing"]
    assert codes_in(capsys.readouterr().err) == expected


CHECKING = """
import sys
def check_arguments(arguments, least_nodes, nodes, per_node):
    sys.exit(f"{arguments} {least_nodes}:{nodes} {per_node}" if arguments else None)
if __name__ == "__main__":
    raise AssertionError("it is only loaded")
"""


def test_program_checks_its_arguments_before_workers_start(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(CHECKING)
    words, places = sys.argv, sys.path[:]
    with pytest.raises(SystemExit) as leaving:
        check_arguments(parse(["--nproc-per-node", "3", str(script), "--word"]))
    assert leaving.value.code == "['--word'] 1:1 3"
    assert sys.argv == words and sys.path == places


RETURNING = """
def check_arguments(arguments, least_nodes, nodes, per_node):
    return arguments[0] if arguments else None
if __name__ == "__main__":
    raise AssertionError("it is only loaded")
"""


LOGGING = """
def check_arguments(arguments, *workers):
    from moc.runtime.program import RunDirectories
    return RunDirectories(logs="of-config")
if __name__ == "__main__":
    raise AssertionError("it is only loaded")
"""


@pytest.mark.parametrize(
    ("source", "words", "logs"),
    [
        (LOGGING, [], "of-config"),
        ("print()", ["--log-dir", "a", "--log-dir=b", "--log-dirs", "c"], "b"),
        ("print()", ["--log-dir"], None),
        ("print()", [], None),
    ],
)
def test_log_directory_is_that_of_program(tmp_path, source, words, logs):
    script = tmp_path / "program.py"
    script.write_text(source)
    assert check_arguments(parse([str(script), *words])) == (logs and Path(logs))


def test_directory_of_other_job_is_refused(tmp_path, monkeypatch):
    script, refused = tmp_path / "program.py", []
    script.write_text(RETURNING)
    monkeypatch.setattr("moc.runtime.program.refuse_owned", lambda root, patience_s: refused.append(str(root)))
    check_arguments(parse([str(script), str(tmp_path)]))
    assert refused == [str(tmp_path)]
    for flags, directory in (["--spares", "1"], str(tmp_path)), ([], "s3://bucket/prefix"):
        check_arguments(parse([*flags, str(script), directory]))
    check_arguments(parse([str(script)]))
    assert refused == [str(tmp_path)]


@each_row("text", ["raise AssertionError", "def check_arguments(*_): raise AssertionError"])
def test_arguments_of_other_programs_are_not_parsed(text, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(text)
    check_arguments(parse([str(script), "--word"]))


def test_program_that_is_not_python_is_refused_at_start(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("no python")
    with pytest.raises(ProgramError):
        check_arguments(parse([str(script), "--word"]))


TEARDOWN = """
import atexit, os, sys
from moc import launch

async def end(*_):
    return 75

launch._run_node = end
atexit.register(os.kill, os.getpid(), int(sys.argv.pop()))
if __name__ == "__main__":
    sys.exit(launch.main())
"""


def test_signal_during_teardown_keeps_the_exit_code(tmp_path):
    """Else a batch system would take a job that has saved its state for a failed one."""
    (tmp_path / "launcher.py").write_text(TEARDOWN)
    for number in (signal.SIGTERM, signal.SIGINT):
        command = [sys.executable, tmp_path / "launcher.py", __file__, str(int(number))]
        assert subprocess.run(command, cwd=moc.__path__[0] + "/..", check=False).returncode == 75


def test_node_without_controller_does_not_wait_again(monkeypatch):
    attempts = []

    class Agent:
        def __init__(self, *_):
            self.signal = self.describe = None

        async def run(self):
            attempts.append(self)
            raise NoControllerError("none. Fix: start one")

    monkeypatch.setattr(launch, "Agent", Agent)

    async def run():
        await launch._run_agent(parsed(*ENDPOINT), [], b"", Signals(), False, MonitorProcess(MonitorFlags()), rejoins=2)

    with pytest.raises(NoControllerError):
        asyncio.run(run())
    assert len(attempts) == 1


@each_row("flags, waits", [(("--spares", "1"), True), ((), False)])
def test_removed_node_runs_only_controller_until_job_ends(flags, waits, monkeypatch):
    ended = []

    class Controller:
        def __init__(self, *_):
            self.endpoints, self.bound_address = ["node0:29500"], "192.0.2.1:29500"

        async def start(self):
            pass

        async def run(self):
            await asyncio.sleep(0.2)
            ended.append(self)

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    async def removed(*_, **__):
        raise NodeRemovedError("worker 0 had a broken device. Fix: look at it", code="device-broken")

    monkeypatch.setattr(launch, "ControllerProcess", Controller)
    monkeypatch.setattr(launch, "_run_agent", removed)

    async def run():
        await launch._run_node(parsed(*ENDPOINT, *flags), b"", Signals(), False, MonitorProcess(MonitorFlags()))

    with pytest.raises(NodeRemovedError):
        asyncio.run(run())
    assert bool(ended) == waits
