"""Simulates several hosts on one machine, with separate network, mounts, ``/dev/shm``, host name and PIDs; and storage.

A host is a set of Linux namespaces, held by its first process.  A switch in a separate network namespace connects the
hosts.  The hosts are invisible in this machine's own network, and end with the process that made them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

NETWORK = "10.77.0"
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount")
_INIT = "trap : TERM INT; while :; do sleep 86399 & wait; done"  # also reaps orphans
_START_S = 30.0
_DIES_S = 2.0


def unusable() -> str:
    """Returns the reason why this machine cannot simulate hosts; empty if it can."""
    if os.geteuid() != 0:
        return "several machines on one need root, for namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"several machines on one need {', '.join(missing)} (packages iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "--net", "true"], capture_output=True)
    if tried.returncode:
        return f"namespaces cannot be made here: {tried.stderr.decode().strip()}"
    return ""


def address(number: int) -> str:
    """Returns the IP address of a host."""
    return f"{NETWORK}.{number + 1}"


class Host:
    """A simulated host, made by :class:`Cluster`, with a number from 0."""

    def __init__(self, number: int, switch: _Namespaces, names: Path):
        self.number, self.name = number, f"h{number}"
        self._switch, self._names = switch, names
        self._self: _Namespaces | None = None

    @property
    def on(self) -> bool:
        return self._self is not None

    def power_on(self) -> None:
        """Boots the host, with no processes and empty memory."""
        self._self = _Namespaces("--net", "--mount", "--uts", "--pid", "--mount-proc")
        port = f"p{self.number}"
        self._switch.call("ip", "link", "delete", port, check=False)  # left from before, if the kernel still has it
        peer = ("peer", "name", "eth0", "netns", str(self._self.pid))
        self._switch.call("ip", "link", "add", port, "type", "veth", *peer)
        self._switch.call("ip", "link", "set", port, "master", "together", "up")
        shell = (
            f"hostname {self.name} && mount -t sysfs sysfs /sys && mount -t tmpfs -o size=2g tmpfs /dev/shm && "
            f"mount --bind {self._names} /etc/hosts && ip address add {address(self.number)}/24 dev eth0 && "
            "ip link set eth0 up && ip link set lo up"
        )
        self._self.call("bash", "-c", shell)

    def power_off(self) -> None:
        """Cuts the power: no peer is notified of the end of a connection."""
        self._switch.call("ip", "link", "set", f"p{self.number}", "down")
        self._running.end()
        self._self = None

    def start(self, command: Sequence[object], **how) -> subprocess.Popen:
        """Starts a command on the host; returns a process that has the command as its only child."""
        return self._running.start(command, **how)

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of the host."""
        return self._running.processes() if self.on else []

    def process(self, number: int) -> psutil.Process | None:
        """Returns the process with a PID of this host, if it is alive."""
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                status = Path(f"/proc/{process.pid}/status").read_text()
                if f"NSpid:\t{process.pid}\t{number}\n" in status:
                    return process
        return None

    @property
    def memory(self) -> Path:
        """Path of the host's ``/dev/shm`` on this machine."""
        return Path(f"/proc/{self._running.pid}/root/dev/shm")

    @property
    def _running(self) -> _Namespaces:
        assert self._self is not None  # the host is on
        return self._self


class Cluster:
    """Context manager of ``size`` hosts on one network; all hosts are on, and connected."""

    def __init__(self, size: int):
        self.hosts: list[Host] = []
        self._size = size

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as undo:
            directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="moc-cluster-")))
            names = directory / "hosts"
            lines = ["127.0.0.1 localhost", *(f"{address(i)} h{i}" for i in range(self._size))]
            names.write_text("\n".join([*lines, f"{NETWORK}.254 switch"]) + "\n")
            self.switch = _Namespaces("--net", "--mount", "--uts", "--pid")
            undo.callback(self.switch.end)
            self.switch.call("bash", "-c", f"hostname switch && mount --bind {names} /etc/hosts && ip link set lo up")
            self._bridge("together")
            self.switch.call("ip", "address", "add", f"{NETWORK}.254/24", "dev", "together")
            self.hosts = [Host(i, self.switch, names) for i in range(self._size)]
            undo.callback(self._all_off)
            for host in self.hosts:
                host.power_on()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()

    def cut(self, numbers: Iterable[int]) -> None:
        """Separates these hosts from all others; packets between them are dropped, and no connection is reset."""
        self._bridge("apart")
        for number in numbers:
            self.switch.call("ip", "link", "set", f"p{number}", "master", "apart")

    def mend(self) -> None:
        """Connects all hosts that are on."""
        for host in filter(lambda host: host.on, self.hosts):
            self.switch.call("ip", "link", "set", f"p{host.number}", "master", "together")

    def _bridge(self, name: str) -> None:
        if self.switch.call("ip", "link", "show", name, check=False).returncode:
            self.switch.call("ip", "link", "add", name, "type", "bridge")
            self.switch.call("ip", "link", "set", name, "up")

    def _all_off(self) -> None:
        for host in filter(lambda host: host.on, self.hosts):
            host.power_off()


class _Namespaces:
    """Linux namespaces, given by flags of ``unshare``; they end with the process that holds them, or with this one."""

    def __init__(self, *kinds: str):
        self._enter = [kind for kind in kinds if kind != "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child", "bash", "-c", _INIT]
        nowhere = subprocess.DEVNULL
        self._holder = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        self.pid = self._first_process()

    def start(self, command: Sequence[object], cwd: Path | None = None, **how) -> subprocess.Popen:
        # the mounts differ, so that nsenter starts in the root directory
        inside = ["env", f"--chdir={cwd or Path.cwd()}", *map(str, command)]
        return subprocess.Popen(["nsenter", "--target", str(self.pid), *self._enter, *inside], **how)

    def call(self, *command: str, check: bool = True) -> subprocess.CompletedProcess:
        kinds = [kind for kind in self._enter if kind != "--pid"]  # keep this machine's PIDs
        entered = ["nsenter", "--target", str(self.pid), *kinds, *command]
        done = subprocess.run(entered, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done

    def processes(self) -> list[psutil.Process]:
        """Returns live processes in the namespaces, except the first one and its ``sleep``."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            with contextlib.suppress(OSError):
                own = process.pid == self.pid or process.info["cmdline"] == ["sleep", "86399"]
                if not own and os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
        return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        """Kills the first process, so that the kernel ends all others and their network."""
        inside = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self._holder.kill()
        self._holder.wait()
        left = psutil.wait_procs(inside, timeout=_DIES_S)[1]
        left = psutil.wait_procs([process for process in left if not _hangs(process)], timeout=_START_S)[1]
        if left:
            raise RuntimeError(f"processes outlive their host: {left}")

    def _first_process(self) -> int:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            for child in psutil.Process(self._holder.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == "bash":
                        return child.pid
            if self._holder.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"namespaces were not created; unshare ended with {self._holder.poll()}")


def _hangs(process: psutil.Process) -> bool:
    """Returns whether a killed process only waits for frozen storage in the kernel, and cannot communicate."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP)
    return False


class Storage:
    """A file system of 512 MiB that can be frozen, to simulate a storage server that does not answer.

    A context manager; hosts that are made inside it see the file system at ``path``.

    Args:
        directory: directory for the image file and the mount point, which is created.
    """

    def __init__(self, directory: Path):
        self.path, self._image = directory / "storage", directory / "storage.img"

    def __enter__(self) -> Storage:
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            os.truncate(image.fileno(), 512 << 20)
        _call("mkfs.ext4", "-q", "-F", self._image)
        _call("mount", "-o", "loop,noatime", self._image, self.path)  # reading must not update access times
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(RuntimeError):  # the file system is not frozen
            self.thaw()
        _call("umount", "--lazy", self.path)
        self._image.unlink()

    def freeze(self) -> None:
        """Freezes the file system: writes, and waits for written data, block until it is thawed."""
        _call("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """Thaws the file system: blocked operations complete."""
        _call("fsfreeze", "--unfreeze", self.path)


def _call(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
