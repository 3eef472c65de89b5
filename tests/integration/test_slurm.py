"""The Slurm template under a real Slurm, on hosts of a virtual cluster (benchmarks/cluster)."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster.hosts import Cluster
from benchmarks.cluster.slurm import Slurm, unusable

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.skipif(bool(unusable()), reason=unusable() or "there"),
]

TRAINING = """#!/usr/bin/env bash
trap 'touch "told.$NODE_RANK"; exit 75' TERM USR1 # as the launcher has it; Slurm signals all processes of a task
touch "started.${SLURM_RESTART_COUNT:-0}.$NODE_RANK"
while [ ! -e stop ]; do sleep 0.1; done
exit "$(cat stop)"
"""


WORKER = """
import os, pathlib, time
if __name__ == "__main__":
    here = pathlib.Path("started.0." + os.environ["MOC_NODE"])
    here.write_text(os.environ["RANK"])
    while not pathlib.Path("stop").exists():
        time.sleep(0.1)
"""


class Submitted:
    """A job of three hosts of five, in a directory; by default it runs a shell script until it is told to end."""

    def __init__(self, slurm: Slurm, directory: Path, *flags: str, command=("it", "a", "b", "c"), **variables):
        self._slurm, self._directory = slurm, directory
        shutil.copytree(ROOT / "scripts" / "slurm", directory / "scripts" / "slurm")
        (directory / "scripts" / "recipes").mkdir()
        (directory / "scripts" / "recipes" / "it.yaml").touch()
        script = directory / "scripts" / "train.sh"
        script.write_text(TRAINING)
        script.chmod(0o755)
        flags = ["--parsable", "--nodes=3", "--gpus-per-node=0", "--time=30", *flags]
        said = slurm.call(
            *("sbatch", *flags, "scripts/slurm/mocrun.sbatch", *command),
            cwd=directory,
            **{"GPUS_PER_NODE": "1", "BEAT_S": "1", "LOST_S": "10", **variables},
        )
        self.number = said.strip()

    def is_like(self, **expected: str) -> bool:
        told = self._slurm.job(self.number)
        return all(told.get(name) == value for name, value in expected.items())

    def started(self, life: int, tasks: int = 3) -> bool:
        return len(list(self._directory.glob(f"started.{life}.*"))) == tasks

    def said(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(self._directory.glob("*.log")))

    def wait(self, ready, what: str, seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"{what}: {self._slurm.job(self.number)}\n{self.said()}"
            time.sleep(0.2)


@pytest.fixture
def hosts():
    with Cluster(5) as cluster, Slurm(cluster, timeout_s=10) as slurm:
        yield cluster, slurm


@pytest.mark.parametrize("code, then", [("75", {"Restarts": "1"}), ("0", {"JobState": "CANCELLED", "Restarts": "0"})])
def test_job_survives_loss_of_batch_node(hosts, tmp_path, code, then):
    cluster, slurm = hosts
    job = Submitted(slurm, tmp_path)
    job.wait(lambda: job.started(0), "the job does not start")
    cluster.hosts[0].power_off()
    job.wait(lambda: slurm.job(job.number)["NodeList"] == "h[1-2]", "Slurm does not notice the loss")
    assert job.is_like(JobState="RUNNING")  # as before: nobody is hurt by the loss
    (tmp_path / "stop").write_text(code)
    job.wait(lambda: job.is_like(**then), "nobody ends the job")
    job.wait(lambda: not list(tmp_path.glob(".mocrun-*-*")), "files are left")


def test_job_survives_loss_of_batch_script_and_controller(hosts, tmp_path):
    cluster, slurm = hosts
    (tmp_path / "work.py").write_text(WORKER)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"SPARES": "1", "PYTHONPATH": str(ROOT), "PATH": path, "VIRTUAL_ENV": sys.prefix}
    command = "--silence-timeout", "10", "work.py"
    job = Submitted(slurm, tmp_path, command=command, **own)
    said = tmp_path / f"mocrun-{job.number}-node0.log"
    job.wait(lambda: job.started(0, 2) and "waits as a spare" in said.read_text(), "the launchers do not meet")
    cluster.hosts[0].power_off()
    taken = tmp_path / "started.0.2"
    job.wait(lambda: taken.exists() and taken.read_text() == "0", "the spare does not take the first node's place")
    (tmp_path / "stop").touch()
    job.wait(lambda: job.is_like(JobState="CANCELLED", Restarts="0"), "nobody ends the job")
    job.wait(lambda: "training ended with 0" in job.said(), "it has ended otherwise")


def test_time_limit_signal_survives_lost_batch_node(hosts, tmp_path):
    cluster, slurm = hosts
    job = Submitted(slurm, tmp_path, "--time=2", "--signal=USR1@60")
    job.wait(lambda: job.started(0), "the job does not start")
    cluster.hosts[0].power_off()
    job.wait(lambda: job.is_like(Restarts="1"), "it is not requeued")
    assert {path.name for path in tmp_path.glob("told.*")} == {"told.1", "told.2"}


def test_node_where_nothing_starts_is_excluded(hosts, tmp_path):
    cluster, slurm = hosts
    for process in cluster.hosts[2].processes():
        process.kill()  # Slurm's daemon; the controller does not know it yet
    job = Submitted(slurm, tmp_path)
    job.wait(lambda: job.is_like(Restarts="1", ExcNodeList="h2"), "it is not requeued elsewhere")
    job.wait(lambda: job.started(1), "it does not start elsewhere")
