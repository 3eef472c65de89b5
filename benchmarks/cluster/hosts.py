"""Several machines on one, each with its own network, mounts (and ``/dev/shm``), name and process numbers; a storage.

A host is a set of Linux namespaces, held by its first process; a switch, which is a network namespace of its own, joins
them.  Nothing of it can be seen in this machine's own network, and all of it ends with the process that made it.
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
_INIT = "trap : TERM INT; while :; do sleep 86399 & wait; done"  # and it buries whoever has lost his parent
_START_S = 30.0
_DIES_S = 2.0


def unusable() -> str:
    """Why this machine cannot be several; empty if it can."""
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
    """Where a host is."""
    return f"{NETWORK}.{number + 1}"


class Host:
    """One machine, made by :class:`Cluster`, with a number from 0."""

    def __init__(self, number: int, switch: _Namespaces, names: Path):
        self.number, self.name = number, f"h{number}"
        self._switch, self._names = switch, names
        self._self: _Namespaces | None = None

    @property
    def on(self) -> bool:
        return self._self is not None

    def power_on(self) -> None:
        """Boots: nothing runs, and nothing is in its memory."""
        self._self = _Namespaces("--net", "--mount", "--uts", "--pid", "--mount-proc")
        port = f"p{self.number}"
        self._switch.call("ip", "link", "delete", port, check=False)  # of the life before, if the kernel still has it
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
        """Loses its power: nobody hears of the end of any connection."""
        self._switch.call("ip", "link", "set", f"p{self.number}", "down")
        self._running.end()
        self._self = None

    def start(self, command: Sequence[object], **how) -> subprocess.Popen:
        """Starts a command on it; the process given back stands for it, and has it as its only child."""
        return self._running.start(command, **how)

    def processes(self) -> list[psutil.Process]:
        """All that run on it."""
        return self._running.processes() if self.on else []

    def process(self, number: int) -> psutil.Process | None:
        """The process that has a number on this host, if it lives."""
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                status = Path(f"/proc/{process.pid}/status").read_text()
                if f"NSpid:\t{process.pid}\t{number}\n" in status:
                    return process
        return None

    @property
    def memory(self) -> Path:
        """Its ``/dev/shm``, as this machine sees it."""
        return Path(f"/proc/{self._running.pid}/root/dev/shm")

    @property
    def _running(self) -> _Namespaces:
        assert self._self is not None  # it is on
        return self._self


class Cluster:
    """So many hosts on one network, as a context manager; all are on, and hear each other."""

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
        """These hosts hear each other, and nobody else; packets vanish in between, and no connection is reset."""
        self._bridge("apart")
        for number in numbers:
            self.switch.call("ip", "link", "set", f"p{number}", "master", "apart")

    def mend(self) -> None:
        """All hosts that are on hear each other."""
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
    """Namespaces by flags of ``unshare``, which a process of ours holds; they end with it, or with this process."""

    def __init__(self, *kinds: str):
        self._enter = [kind for kind in kinds if kind != "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child", "bash", "-c", _INIT]
        nowhere = subprocess.DEVNULL
        self._holder = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        self.pid = self._first_process()

    def start(self, command: Sequence[object], cwd: Path | None = None, **how) -> subprocess.Popen:
        # other mounts: nsenter ends up at the root
        inside = ["env", f"--chdir={cwd or Path.cwd()}", *map(str, command)]
        return subprocess.Popen(["nsenter", "--target", str(self.pid), *self._enter, *inside], **how)

    def call(self, *command: str, check: bool = True) -> subprocess.CompletedProcess:
        kinds = [kind for kind in self._enter if kind != "--pid"]  # processes are named as this machine names them
        entered = ["nsenter", "--target", str(self.pid), *kinds, *command]
        done = subprocess.run(entered, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done

    def processes(self) -> list[psutil.Process]:
        """All that live in them but the first and what that sleeps with."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            with contextlib.suppress(OSError):
                own = process.pid == self.pid or process.info["cmdline"] == ["sleep", "86399"]
                if not own and os.readlink(f"/proc/{process.pid}/ns/pid") == mine:
                    found.append(process)
        return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        """Kills the first process, with which the kernel ends all others, and their network."""
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
        raise RuntimeError(f"namespaces did not come to be; unshare ended with {self._holder.poll()}")


def _hangs(process: psutil.Process) -> bool:
    """Whether a process that was killed is in the kernel for storage that is frozen: it computes and says no more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DISK_SLEEP)
    return False


class Storage:
    """A file system of 512 MiB that can be frozen: what a storage server that does not answer looks like.

    A context manager; hosts that are made meanwhile see it at ``path``.

    Args:
        directory: for the file that it is in, and the place where it is mounted; made.
    """

    def __init__(self, directory: Path):
        self.path, self._image = directory / "storage", directory / "storage.img"

    def __enter__(self) -> Storage:
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            os.truncate(image.fileno(), 512 << 20)
        _call("mkfs.ext4", "-q", "-F", self._image)
        _call("mount", "-o", "loop,noatime", self._image, self.path)  # reading must not write the time of it
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(RuntimeError):  # it is not frozen
            self.thaw()
        _call("umount", "--lazy", self.path)
        self._image.unlink()

    def freeze(self) -> None:
        """Whoever writes, or waits for what was written, hangs from now on."""
        _call("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """All that was waited for comes to pass."""
        _call("fsfreeze", "--unfreeze", self.path)


def _call(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
