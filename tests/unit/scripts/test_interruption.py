"""What happens between a signal and the queue: scripts/torchrun.py and the Slurm template, on stand-ins."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

WORKER = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while not told:
    time.sleep(0.02)
time.sleep(0.5)
pathlib.Path(sys.argv[1], "saved" + os.environ["RANK"]).touch()
sys.exit(75)
"""


def wait_until_exist(process, *paths, seconds=240):
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{paths} did not appear in time"
        time.sleep(0.02)


def test_torchrun_lets_workers_save_and_passes_on_their_code(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "torchrun.py", "--standalone", "--nproc-per-node", "2"]
        + [tmp_path / "worker.py", tmp_path],
    )
    try:
        wait_until_exist(process, tmp_path / "0", tmp_path / "1")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(240)
    assert code == 75
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


class Slurm:
    """Stand-ins for Slurm's commands, which note what they were asked."""

    def __init__(self, directory: Path, training: str):
        self.directory = directory
        commands = {
            "srun": 'echo $$ >step.pid\nwhile [ "$1" != bash ]; do shift; done\nSLURM_NODEID=1 exec "$@"',
            "scontrol": 'echo "scontrol $*" >>calls\n[ "$1" = show ] && echo node0 && echo node1; true',
            "scancel": 'echo "scancel $*" >>calls\nkill -TERM "$(cat step.pid)"',
            "scripts/train_it.sh": training,
        }
        for name, text in commands.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{text}\n")
            path.chmod(0o755)

    def submit(self) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch", "train_it.sh", "a b", "c"],
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{self.directory}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[0-1]",
                "SLURM_GPUS_ON_NODE": "4",
            },
            stdout=subprocess.DEVNULL,
        )

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in (self.directory / "calls").read_text()


@pytest.mark.parametrize("code, requeued", [(0, False), (1, False), (75, True)])
def test_slurm_requeues_what_saved_itself(tmp_path, code, requeued):
    slurm = Slurm(tmp_path, f"exit {code}")
    assert slurm.submit().wait(120) == (0 if requeued else code)
    assert slurm.requeued == requeued


@pytest.mark.parametrize("code, requeued", [(75, True), (143, True), (0, False)])
def test_slurm_forwards_the_warning_before_the_time_limit(tmp_path, code, requeued):
    slurm = Slurm(tmp_path, f"trap 'sleep 0.3; exit {code}' TERM\ntouch running\nwhile true; do sleep 0.02; done")
    job = slurm.submit()
    wait_until_exist(job, tmp_path / "running")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    assert "scancel --signal=TERM 7" in (tmp_path / "calls").read_text()
    assert slurm.requeued == requeued


def test_slurm_tells_each_node_its_place(tmp_path):
    slurm = Slurm(tmp_path, 'echo "$NNODES $NODE_RANK $GPUS_PER_NODE $MASTER_ADDR $MASTER_PORT|$1|$2" >seen')
    assert slurm.submit().wait(120) == 0
    assert (tmp_path / "seen").read_text() == "2 1 4 node0 20007|a b|c\n"
