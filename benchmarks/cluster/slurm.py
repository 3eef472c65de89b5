"""Runs a real Slurm on the hosts of a cluster: the controller on the switch, a daemon on each host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.cluster.hosts import NETWORK, Cluster, address
from benchmarks.cluster.hosts import unusable as no_hosts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "munged")
_CONFIGURATION = """ClusterName=test
SlurmctldHost=switch({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
SlurmdTimeout={timeout}
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
MinJobAge=300
SelectType=select/linear
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
_START_S = 60.0


def unusable() -> str:
    """Returns the reason why Slurm cannot run here; empty if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"a real Slurm needs {', '.join(missing)} (packages slurm-wlm and munge)"
    return no_hosts()


class Slurm:
    """Slurm on a cluster whose hosts are on, as a context manager; ``timeout_s`` is its ``SlurmdTimeout``."""

    def __init__(self, cluster: Cluster, timeout_s: int = 20):
        self._cluster, self._timeout_s = cluster, timeout_s

    def __enter__(self) -> Slurm:
        with contextlib.ExitStack() as undo:
            self._directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="moc-slurm-")))
            self._directory.chmod(0o755)
            self._configure()
            undo.callback(self._end)
            self._munged = self._start_munged()
            self._controller = self._cluster.switch.start(["slurmctld", "-D"], **self._how("controller"))
            for host in self._cluster.hosts:
                self.start_daemon(host.number)
            self._wait_until_idle()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()

    def start_daemon(self, number: int) -> None:
        """Starts the Slurm daemon of a host, which ends when the host is powered off."""
        shell = (
            "mount -t tmpfs tmpfs /sys/fs/cgroup && mount -t tmpfs tmpfs /var/spool && "
            f'exec slurmd -D -N "$(hostname)" -f {self._directory}/slurm.conf'
        )
        self._cluster.hosts[number].start(["bash", "-c", shell], **self._how(f"h{number}"))

    def call(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Runs a Slurm command on the controller's host, and returns its output.

        Raises:
            RuntimeError: the command has failed.
        """
        how = dict(env=self._environment() | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = self._cluster.switch.start(list(command), cwd=cwd, **how)
        said, wrong = done.communicate(timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {wrong.strip()}")
        return said

    def job(self, number: str) -> dict[str, str]:
        """Returns the state of a job, by the field names of ``scontrol show job``."""
        said = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def _configure(self) -> None:
        (self._directory / "state").mkdir()
        nodes = []
        for host in self._cluster.hosts:
            (self._directory / host.name).mkdir()
            nodes.append(f"NodeName={host.name} NodeAddr={address(host.number)} CPUs=2 RealMemory=4000 State=UNKNOWN")
        text = _CONFIGURATION.format(
            network=NETWORK, directory=self._directory, timeout=self._timeout_s, nodes="\n".join(nodes)
        )
        (self._directory / "slurm.conf").write_text(text)
        (self._directory / "cgroup.conf").write_text(_CGROUPS)

    def _start_munged(self) -> subprocess.Popen:
        key = self._directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={self._directory}/munge.{name}" for flag, name in files.items()]
        command = ["munged", "--foreground", "--force", f"--key-file={key}", *flags]
        return self._cluster.switch.start(command, **self._how("munge"))

    def _environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": f"{self._directory}/slurm.conf"}

    def _how(self, name: str) -> dict:
        with open(self._directory / f"{name}.out", "a") as output:
            copy = os.dup(output.fileno())
        return {"env": self._environment(), "stdout": copy, "stderr": subprocess.STDOUT, "start_new_session": True}

    def _wait_until_idle(self) -> None:
        deadline, said = time.monotonic() + _START_S, ""
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                said = self.call("sinfo", "--noheader", "--format=%t %D")
                if said.split() == ["idle", str(len(self._cluster.hosts))]:
                    return
            time.sleep(0.3)
        logs = "\n".join(path.read_text(errors="replace")[-800:] for path in self._directory.glob("*.log"))
        raise RuntimeError(f"Slurm does not start: {said}\n{logs}")

    def _end(self) -> None:
        """Kills the processes of the cluster, including the daemons; they would also end with the cluster."""
        everywhere = [self._cluster.switch, *self._cluster.hosts]
        for process in (process for one in everywhere for process in one.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
