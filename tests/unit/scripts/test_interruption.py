"""What happens between a signal and the queue: scripts/torchrun.py and the Slurm template, on stand-ins."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
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


def wait_until(ready, what, seconds=240):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_until_exist(process, *paths, seconds=240):
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{paths} did not appear in time"
        time.sleep(0.02)


def test_torchrun_lets_workers_save_and_returns_their_code(tmp_path):
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


ENDS = """
import os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[2])
from megatron.pretraining.pretrain_gpt_moe import end_at_once
from moc.runtime.progress import PROGRESS
end_at_once("worker.py")
PROGRESS.completed(7)
pathlib.Path(sys.argv[1], os.environ.get("RANK", "0")).touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_signal_ending_workers_is_reported_in_one_line(tmp_path, launcher, number):
    (tmp_path / "worker.py").write_text(ENDS)
    torchrun = [ROOT / "scripts" / "torchrun.py", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if launcher == "torchrun" else []), tmp_path / "worker.py", tmp_path, ROOT],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_exist(process, *(tmp_path / str(rank) for rank in range(2 if launcher == "torchrun" else 1)))
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == (128 + number if launcher == "torchrun" else -number)
    (line,) = [
        line for line in said.splitlines() if f"exit code {128 + number}" in line
    ]  # torch may name the signal, too
    assert "iteration 7 " in line and number.name in line and "Traceback" not in said


@pytest.mark.parametrize("program", ["scripts/torchrun.py", "moc/launch.py"])
def test_signal_during_launcher_import_is_one_line(tmp_path, program):
    """A module that the launcher imports early waits, as on a slow file system."""
    name = "psutil" if program.startswith("scripts") else "asyncio"
    slow = "import pathlib, time\npathlib.Path(__file__).with_name('imports').touch()\ntime.sleep(1000)\n"
    (tmp_path / f"{name}.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, ROOT / program, "--standalone", "worker.py"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_exist(process, tmp_path / "imports")
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and len(said.splitlines()) == 1 and "SIGINT" in said and "exit code 130" in said


ONE_TASK = """
echo $$ >pids
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
TWO_TASKS = """
echo "$*" >flags
while [ "$1" != scripts/slurm/node.sh ]; do shift; done
SLURM_NODEID=0 setsid "$@" & echo $! >>pids
SLURM_NODEID=1 setsid "$@" & echo $! >>pids
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
            "squeue": "cat state 2>/dev/null || echo RUNNING",
            "sinfo": "seq 9",
            "scripts/train.sh": f"shift # the recipe\n{training}",
        }
        for name, text in commands.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/usr/bin/env bash\n{text}\n")
            path.chmod(0o755)
        (directory / "scripts" / "recipes").mkdir(exist_ok=True)
        (directory / "scripts" / "recipes" / "it.yaml").touch()
        if not (directory / "scripts" / "slurm").exists():
            (directory / "scripts" / "slurm").symlink_to(ROOT / "scripts" / "slurm")

    def submit(self, *command: object, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", ROOT / "scripts" / "slurm" / self._template, *(command or ("it", "a b", "c"))],
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{self.directory}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[0-1]",
                "SLURM_GPUS_ON_NODE": "4",
                "SLURM_JOB_PARTITION": "main",
                "LOST_S": "10",
                "BEAT_S": "1",
                "LOOK_S": "0.2",
                **environment,
            },
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "stderr").open("w"),
        )

    @property
    def calls(self) -> str:
        """What scontrol and scancel were asked."""
        return (self.directory / "calls").read_text()

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls


@pytest.mark.parametrize("code, requeued", [(0, False), (1, False), (75, True)])
def test_slurm_requeues_job_that_saved_itself(tmp_path, code, requeued):
    slurm = Slurm(tmp_path, f"exit {code}")
    assert slurm.submit().wait(120) == (0 if requeued else code)
    assert slurm.requeued == requeued


@pytest.mark.parametrize("code, requeued", [(75, True), (143, True), (0, False)])
def test_slurm_forwards_time_limit_warning(tmp_path, code, requeued):
    slurm = Slurm(tmp_path, f"trap 'sleep 0.3; exit {code}' TERM\ntouch running\nwhile true; do sleep 0.02; done")
    job = slurm.submit()
    wait_until_exist(job, tmp_path / "running")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    assert "scancel --signal=TERM 7" in slurm.calls
    assert slurm.requeued == requeued


def test_slurm_gives_each_node_its_rank(tmp_path):
    slurm = Slurm(tmp_path, 'echo "$NNODES $NODE_RANK $GPUS_PER_NODE $MASTER_ADDR $MASTER_PORT|$1|$2" >seen')
    assert slurm.submit().wait(120) == 0
    assert (tmp_path / "seen").read_text() == "2 1 4 127.0.0.1 20007|a b|c\n"


def with_mocrun(directory: Path, training: str) -> Slurm:
    return Slurm(directory, training, "mocrun.sbatch", TWO_TASKS)


@pytest.mark.parametrize(
    "codes, requeued",
    [((0, 0), False), ((75, 0), False), ((0, 75), False), ((1, 1), False), ((75, 1), False), ((75, 75), True),
     ((137, 75), True), ((75, 70), True), ((70, 70), False), ((0, 79), False), ((79, 1), False), ((79, 75), True)],
)  # fmt: skip
def test_mocrun_minority_does_not_decide(tmp_path, codes, requeued):
    slurm = with_mocrun(tmp_path, f"codes=({codes[0]} {codes[1]}); exit ${{codes[NODE_RANK]}}")
    decisive = [code for code in codes if code not in (70, 75, 79, 137)] or [70]
    assert slurm.submit().wait(120) == (0 if requeued else decisive[0])
    assert slurm.requeued == requeued
    assert "--no-kill --kill-on-bad-exit=0 --wait=0" in (tmp_path / "flags").read_text()


def rows(directory: Path, cases: Iterable) -> dict:
    """A directory for each of several cases, which wait at the same time."""
    directories = {case: directory / str(number) for number, case in enumerate(cases)}
    for one in directories.values():
        one.mkdir()
    return directories


@pytest.mark.slow
def test_mocrun_does_not_wait_for_lost_node(tmp_path):
    jobs = {}
    for code, directory in rows(tmp_path, (75, 0)).items():
        slurm = with_mocrun(directory, f"[ $NODE_RANK = 0 ] && kill -KILL -$PPID $PPID\nsleep 1; exit {code}")
        jobs[code] = slurm, slurm.submit()
    for code, (slurm, job) in jobs.items():
        assert job.wait(120) == 0
        assert slurm.requeued == (code == 75)
        excluded = "scontrol update JobId=7 ExcNodeList=127.0.0.1"  # as the stand-in calls the first node
        assert (excluded in slurm.calls) == slurm.requeued


def test_mocrun_requeues_after_loss_of_all_nodes(tmp_path):
    slurm = with_mocrun(tmp_path, "kill -KILL -$PPID $PPID")
    assert slurm.submit().wait(120) == 0
    assert slurm.requeued


@pytest.mark.slow
def test_mocrun_survivors_end_job_without_batch_script(tmp_path):
    cases = rows(tmp_path, ((75, "scontrol requeue 7"), (0, "scancel 7"), (1, "scancel 7")))
    jobs = {}
    for (code, asked), directory in cases.items():
        slurm = with_mocrun(directory, f"touch $NODE_RANK\nwhile [ ! -e gone ]; do sleep 0.05; done; exit {code}")
        jobs[code, asked] = slurm, slurm.submit()
    for slurm, job in jobs.values():
        wait_until_exist(job, slurm.directory / "0", slurm.directory / "1")
        job.kill()
        job.wait()
        (slurm.directory / "gone").touch()
    for (code, asked), (slurm, _) in jobs.items():
        wait_until(lambda slurm=slurm, asked=asked: asked in slurm.calls, f"nobody ends the job of {code}")
        tasks = [Path("/proc", pid) for pid in (slurm.directory / "pids").read_text().split()]
        wait_until(lambda tasks=tasks: not any(task.exists() for task in tasks), f"tasks are left of {code}")
        assert slurm.calls.count(asked) == 1
        assert not list(slurm.directory.glob(".mocrun-7-*"))


def test_mocrun_does_not_requeue_canceled_job(tmp_path):
    (tmp_path / "state").write_text("COMPLETING\n")
    slurm = with_mocrun(tmp_path, "exit 75")
    assert slurm.submit().wait(120) == 75
    assert not slurm.requeued


def test_mocrun_limits_requeues_without_checkpoint(tmp_path):
    slurm = with_mocrun(tmp_path, "exit 75")
    codes = [slurm.submit(SLURM_RESTART_COUNT=str(life), MAX_REQUEUES="2").wait(120) for life in range(3)]
    assert codes == [0, 0, 75]
    assert slurm.calls.count("scontrol requeue 7") == 2


@pytest.mark.parametrize("saved", ["c/latest_checkpointed_iteration.txt", "snapshots/iter_0000002/manifest.json"])
def test_mocrun_counts_checkpoint_as_progress(tmp_path, saved):
    slurm = with_mocrun(tmp_path, f"sleep 0.1; mkdir -p $(dirname {saved}); echo 2 >{saved}; exit 75")
    command = "it", "--launcher=mocrun", "a", "b", "c", "--ckpt-dir", "snapshots"
    for life in range(4):
        assert slurm.submit(*command, SLURM_RESTART_COUNT=str(life), MAX_REQUEUES="2").wait(120) == 0
    assert slurm.calls.count("scontrol requeue 7") == 4


def test_mocrun_limits_restarts_of_failing_step(tmp_path):
    failing = 'echo "srun: error: Task launch for StepId=7.0 failed on node node1: Connection refused" >&2; exit 1'
    slurm = Slurm(tmp_path, "exit 0", "mocrun.sbatch", failing)
    codes = [slurm.submit(SLURM_RESTART_COUNT=str(life), MAX_REQUEUES="2").wait(120) for life in range(3)]
    assert codes == [0, 0, 70]
    assert "scontrol update JobId=7 ExcNodeList=node1" in slurm.calls


@pytest.mark.parametrize("code, requeued", [(75, True), (0, False)])
def test_mocrun_launchers_receive_time_limit_warning(tmp_path, code, requeued):
    slurm = with_mocrun(tmp_path, f"trap 'exit {code}' USR1\ntouch $NODE_RANK\nwhile true; do sleep 0.02; done")
    job = slurm.submit()
    wait_until_exist(job, tmp_path / "0", tmp_path / "1")
    for pid in (tmp_path / "pids").read_text().split():  # --signal=USR1 goes to the tasks
        os.kill(int(pid), signal.SIGUSR1)
    assert job.wait(120) == 0
    assert slurm.requeued == requeued


def test_mocrun_passes_nodes_to_own_command_line(tmp_path):
    (tmp_path / "python").write_text('#!/usr/bin/env bash\necho "$*" >"seen$NODE_RANK"\n')
    (tmp_path / "python").chmod(0o755)
    job = with_mocrun(tmp_path, "").submit("--silence-timeout", "9", "my own.py", "--lr", "1", SPARES="1", CONTAINER="")
    assert job.wait(120) == 0
    where = "--nnodes 1 --spares 1 --nproc-per-node 4 --node-rank 1 --rdzv-endpoint 127.0.0.1:20007,node1:20007"
    assert (tmp_path / "seen1").read_text() == f"-m moc.launch {where} --silence-timeout 9 my own.py --lr 1\n"


@pytest.mark.parametrize(
    "container, flags",
    [("apptainer:a.sif", "apptainer exec --nv --bind"), ("pyxis:a.sqsh", "srun --overlap --nodes=1 --ntasks=1")],
)
def test_mocrun_launchers_run_in_container(tmp_path, container, flags):
    enter = (
        'echo "$(basename "$0") $*" >"entered$NODE_RANK"\nwhile [ "$1" != ./scripts/train.sh ]; do shift; done; "$@"'
    )
    slurm = Slurm(
        tmp_path, 'echo "$1" >seen', "mocrun.sbatch", f"case $* in *overlap*) {enter};; *) {TWO_TASKS};; esac"
    )
    (tmp_path / "apptainer").write_text(f"#!/usr/bin/env bash\n{enter}\n")
    (tmp_path / "apptainer").chmod(0o755)
    job = slurm.submit(CONTAINER=container, CONTAINER_FLAGS="--with this", SLURMD_NODENAME="node1")
    assert job.wait(120) == 0
    entered = (tmp_path / "entered0").read_text()
    assert entered.startswith(flags) and container.partition(":")[2] in entered and "--with this" in entered
    assert (tmp_path / "seen").read_text() == "a b\n"


RECIPE = "it", "a", "b", "c d"
CLEAN = "import sys, pathlib; pathlib.Path('cleaned').write_text('|'.join(sys.argv[1:]))"


@pytest.mark.parametrize("code, keep, cleaned", [(0, "yes", True), (75, "yes", False), (75, "no", True)])
def test_mocrun_cleans_nodes_after_job(tmp_path, code, keep, cleaned):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "clean_memory.py").write_text(CLEAN)
    (tmp_path / "temporary").mkdir()
    training = f"touch $TMPDIR/there; exit {code}"
    job = with_mocrun(tmp_path, training).submit(*RECIPE, TMPDIR=str(tmp_path / "temporary"), KEEP_MEMORY=keep)
    assert job.wait(120) == 0
    assert not list((tmp_path / "temporary").iterdir())
    assert (tmp_path / "cleaned").exists() == cleaned


@pytest.mark.parametrize(
    "command, memory, directory",
    [
        (RECIPE, "/dev/shm", "c d/snapshots"),
        ((*RECIPE, "--save", "e"), "/dev/shm", "e/snapshots"),
        ((*RECIPE, "--save=e", "--ckpt-dir=f g"), "/dev/shm", "f g"),
        ((*RECIPE, "--ckpt-memory-dir", "/m", "--ckpt-dir", "f", "--ckpt-dir", "g"), "/m", "g"),
        (("own.py", "--save", "e"), "/dev/shm", "e/snapshots"),
        (("own.py",), "/dev/shm", None),
    ],
)
def test_mocrun_removes_only_memory_of_its_job(tmp_path, command, memory, directory):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "clean_memory.py").write_text(CLEAN)
    (tmp_path / "own.py").touch()
    python = f'#!/usr/bin/env bash\n[ "$1" = -m ] || exec {sys.executable} "$@"\n'  # the launcher does nothing
    (tmp_path / "python").write_text(python)
    (tmp_path / "python").chmod(0o755)
    assert with_mocrun(tmp_path, "exit 0").submit(*command).wait(120) == 0
    cleaned = tmp_path / "cleaned"
    removed = f"--memory-dir|{memory}|--remove|--ended|--ckpt-dir|{directory}"
    assert (cleaned.read_text() if cleaned.exists() else None) == (removed if directory else None)


def test_unsupported_container_is_refused(tmp_path):
    assert with_mocrun(tmp_path, "exit 0").submit(CONTAINER="docker:x").wait(120) == 1


def test_mocrun_nodes_have_token_and_spares_come_last(tmp_path):
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


def test_launchers_connect_under_slurm_and_spare_takes_over(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    training = (
        'exec python -m moc.launch --nnodes "$NNODES" --spares "$SPARES" --node-rank "$NODE_RANK" --nproc-per-node 1 '
        '--rdzv-endpoint "127.0.0.1:$MASTER_PORT" work.py 2>"console$NODE_RANK"'
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
