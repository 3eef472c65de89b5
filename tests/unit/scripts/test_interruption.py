"""What happens between a signal and the queue: scripts/torchrun.py and the Slurm template, on stand-ins."""

import contextlib
import os
import random
import signal
import socket
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


ONE_TASK = """
echo $$ >pids
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
TWO_TASKS = """
echo "$*" >flags
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 "$@" & echo $! >>pids
SLURM_NODEID=1 "$@" & echo $! >>pids
wait
exit 137 # of a node that was lost, as it may be
"""


class Slurm:
    """Stand-ins for Slurm's commands, which note what they were asked."""

    def __init__(self, directory: Path, training: str, template: str = "pretrain.sbatch", srun: str = ONE_TASK):
        self.directory, self._template = directory, template
        commands = {
            "srun": srun,
            "scontrol": 'echo "scontrol $*" >>calls\n[ "$1" = show ] && echo 127.0.0.1 && echo node1; true',
            "scancel": 'echo "scancel $*" >>calls\nkill -TERM $(cat pids)',
            "scripts/train_it.sh": training,
        }
        for name, text in commands.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{text}\n")
            path.chmod(0o755)

    def submit(self, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", ROOT / "scripts" / "slurm" / self._template, "train_it.sh", "a b", "c"],
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{self.directory}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[0-1]",
                "SLURM_GPUS_ON_NODE": "4",
                **environment,
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
    assert (tmp_path / "seen").read_text() == "2 1 4 127.0.0.1 20007|a b|c\n"


def with_mocrun(directory: Path, training: str) -> Slurm:
    return Slurm(directory, training, "mocrun.sbatch", TWO_TASKS)


@pytest.mark.parametrize("code, requeued", [(0, False), (1, False), (75, True)])
def test_with_mocrun_the_first_node_decides(tmp_path, code, requeued):
    slurm = with_mocrun(tmp_path, f"exit $((NODE_RANK ? 9 : {code}))")
    assert slurm.submit().wait(120) == (0 if requeued else code)
    assert slurm.requeued == requeued
    assert "--no-kill --kill-on-bad-exit=0 --wait=0" in (tmp_path / "flags").read_text()


def test_with_mocrun_the_loss_of_the_first_node_requeues(tmp_path):
    slurm = with_mocrun(tmp_path, "kill -KILL $((NODE_RANK ? $$ : PPID))")
    assert slurm.submit().wait(120) == 0
    assert slurm.requeued


@pytest.mark.parametrize("code, requeued", [(75, True), (0, False)])
def test_with_mocrun_the_warning_is_forwarded(tmp_path, code, requeued):
    slurm = with_mocrun(tmp_path, f"trap 'exit {code}' TERM\ntouch $NODE_RANK\nwhile true; do sleep 0.02; done")
    job = slurm.submit()
    wait_until_exist(job, tmp_path / "0", tmp_path / "1")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    assert slurm.requeued == requeued


def test_with_mocrun_each_node_has_the_token_and_spares_are_beyond_the_nodes(tmp_path):
    seen = (
        'echo "$LAUNCHER $NNODES $SPARES $(stat -c %a "$MOC_TOKEN_FILE") $(wc -c <"$MOC_TOKEN_FILE")" >seen$NODE_RANK'
    )
    assert with_mocrun(tmp_path, seen).submit(SPARES="1").wait(120) == 0
    assert {(tmp_path / f"seen{node}").read_text() for node in (0, 1)} == {"mocrun 1 1 600 64\n"}
    assert not list(tmp_path.glob(".mocrun*"))
    assert with_mocrun(tmp_path, seen).submit(SPARES="2").wait(120) == 1


WORK = """
import os, pathlib, signal, time
if __name__ == "__main__":
    if os.environ["MOC_NODE"] == "0":
        while "waits as a spare" not in pathlib.Path("console0").read_text():
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGKILL)  # what workers of this node are forked from, and so the node
    pathlib.Path("told").write_text(" ".join(os.environ[name] for name in ("RANK", "GROUP_RANK", "MOC_NODE")))
"""


def test_launchers_meet_under_slurm_and_a_spare_takes_over(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    training = (
        'exec python -m moc.launch --nnodes "$NNODES" --spares "$SPARES" --node-rank "$NODE_RANK" --nproc-per-node 1 '
        '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" work.py 2>"console$NODE_RANK"'
    )
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = dict(SPARES="1", SLURM_JOB_ID=str(free_port() - 20000), PYTHONPATH=str(ROOT), PATH=path)
    assert with_mocrun(tmp_path, training).submit(**environment).wait(120) == 0
    assert (tmp_path / "told").read_text() == "0 0 1"


def free_port() -> int:
    """One of those that the templates choose from."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 30000)))
            return probe.getsockname()[1]
