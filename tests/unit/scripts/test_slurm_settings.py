"""Settings of the Slurm templates: each is documented, checked, and reaches the nodes whatever Slurm passes on."""

import os
import re
import socket
import subprocess
from pathlib import Path

from tests.cases import each_row
from tests.unit.scripts.test_interruption import ONE_TASK, TWO_TASKS, Slurm

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts" / "slurm"
DOCUMENTED = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
RECIPE = "it", "a", "b", "c"
SRUN = {"mocrun.sbatch": TWO_TASKS, "pretrain.sbatch": 'echo "$*" >flags\n' + ONE_TASK}

both = each_row("template", list(SRUN))


def submitted(directory: Path, template: str, training: str, *words: str, **environment: str):
    """The exit code of a job, and what it wrote to standard error."""
    job = Slurm(directory, training, template, SRUN[template]).submit(*words, **environment)
    return job.wait(), (directory / "stderr").read_text()


def bash(text: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-uc", text], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def names_read() -> set[str]:
    """The variables that the templates read with a default, and so may come from outside."""
    texts = [re.sub(r"(?m)^\s*#.*", "", path.read_text()) for path in SCRIPTS.iterdir()]
    return {name for text in texts for name in re.findall(r"\$\{!?([A-Z][A-Z_]+):?[-?+]", text)}


def settings() -> list[str]:
    return bash('. scripts/slurm/settings.sh; echo "${SETTINGS[@]}"').stdout.split()


OWN = {"TEMPLATE", "CHECKPOINTS", "SNAPSHOTS", "MEMORY"}  # of the templates themselves
OF_SLURM = re.compile("SLURM_|SBATCH_")


def test_every_template_variable_is_documented():
    names = {name for name in names_read() | set(settings()) if not OF_SLURM.match(name)} - OWN
    assert {"SPARES", "TMPDIR", "NODE_SETUP", "LOST_S"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in DOCUMENTED] == []


@each_row(
    "mistake",
    ["SPARES=$(touch ran)", "GPUS_PER_NODE=eight", "MAX_REQUEUES=-1", "MASTER_PORT=80", "MASTER_PORT=70000", "BEAT_S=0"]
    + ["LOST_S=20", "LOOK_S=x", "CONTAINER=docker:x", "KEEP_MEMORY=maybe", "LAUNCHER=mpi", "NODE_SETUP=/no/such/file"]
    + ["SPARE=1"],
)
def test_invalid_setting_is_refused(mistake):
    checks = '. scripts/slurm/settings.sh; settings_of "$MISTAKE"; check_settings'
    done = bash(checks, MISTAKE=mistake)
    assert done.returncode == 1 and mistake.partition("=")[0] in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (ROOT / "ran").exists()


@both
def test_settings_may_be_arguments(template, tmp_path):
    seen = 'echo "$GPUS_PER_NODE ${NCCL_SOCKET_IFNAME:-}|$1" >seen'
    words = "GPUS_PER_NODE=3", "NCCL_SOCKET_IFNAME=ib0 ib1", *RECIPE
    code, said = submitted(tmp_path, template, seen, *words, SLURM_EXPORT_ENV="NONE")
    assert code == 0 and "WARNING" not in said
    assert (tmp_path / "seen").read_text() == "3 ib0 ib1|a\n"


@both
@each_row("passed, warns", [("NONE", True), ("HOME,PATH", True), ("ALL", False), ("ALL,A=1", False)])
def test_dropped_variables_are_announced(template, passed, warns, tmp_path):
    seen = 'echo "$SLURM_EXPORT_ENV" >seen'
    code, said = submitted(tmp_path, template, seen, *RECIPE, SLURM_EXPORT_ENV=passed)
    assert code == 0 and ("SBATCH_EXPORT" in said) == warns
    assert (tmp_path / "seen").read_text() == "ALL\n"  # the script's own variables reach the tasks


@both
@each_row(
    "slurm, flags",
    [
        ({"SLURM_CPUS_ON_NODE": "96"}, "--cpus-per-task=96"),
        ({"SLURM_CPUS_PER_TASK": "8"}, "--cpus-per-task=8"),
        ({}, ""),
    ],
)
def test_task_gets_all_cores_of_node(template, slurm, flags, tmp_path):
    assert submitted(tmp_path, template, "exit 0", *RECIPE, **slurm)[0] == 0
    given = (tmp_path / "flags").read_text()
    assert "--cpu-bind=none" in given and flags in given and ("--cpus-per-task" in given) == bool(flags)


@both
def test_each_node_sources_its_setup_file(template, tmp_path):
    """As files of sites do, it uses a variable that is not set."""
    (tmp_path / "site.sh").write_text('echo "$NOT_SET" >/dev/null\nexport NCCL_SOCKET_IFNAME=ib0\n')
    code, _ = submitted(tmp_path, template, 'echo "$NCCL_SOCKET_IFNAME" >seen', *RECIPE, NODE_SETUP="site.sh")
    assert code == 0 and (tmp_path / "seen").read_text() == "ib0\n"


@both
def test_missing_temporary_directory_is_replaced(template, tmp_path):
    training = '[ -d "$TMPDIR" ] && [ -w "$TMPDIR" ] && touch usable'
    assert submitted(tmp_path, template, training, *RECIPE, TMPDIR="/no/such/directory")[0] == 0
    assert (tmp_path / "usable").exists()


def test_port_in_use_is_not_chosen():
    choose = ". scripts/slurm/settings.sh; choose_port; echo $MASTER_PORT"
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as taken:
            port = next(p for p in range(20100, 29000) if not _refuses(taken, (host, p)))
            taken.listen()
            chosen = int(bash(choose, SLURM_JOB_ID=str(port)).stdout)
            assert chosen != port and 20000 <= chosen < 30000
            refused = bash(choose, SLURM_JOB_ID="7", MASTER_PORT=str(port))
            assert refused.returncode == 1 and "MASTER_PORT" in refused.stderr


def _refuses(one: socket.socket, address) -> bool:
    try:
        one.bind(address)
    except OSError:
        return True
    return False


def test_heartbeats_are_read_from_content_not_mtime(tmp_path):
    """On NFS, the times of a file may be a minute old; its content is that of the last close when it is opened."""
    text = """
        . scripts/slurm/job_end.sh
        echo a >"$PRIVATE/alive.1"; touch -d @1000 "$PRIVATE/alive.1"; look 0
        since[alive.1]=-100
        touch "$PRIVATE/alive.1"; look 0; is_gone 1 && echo gone
        echo b >"$PRIVATE/alive.1"; touch -d @1000 "$PRIVATE/alive.1"; look 0; is_gone 1 || echo alive
    """
    assert bash(text, PRIVATE=str(tmp_path)).stdout == "gone\nalive\n"


@each_row(
    "words, seconds",
    [(("100", "2"), 330), (("100", "2", "30"), 350), (("0.5", "1"), 132)],  # iteration + 4 state / speed + 120
)
def test_signal_time_follows_from_state_and_storage(words, seconds):
    done = subprocess.run([SCRIPTS / "signal_time.sh", *words], capture_output=True, text=True)
    assert done.returncode == 0 and f"USR1@{seconds} " in done.stdout and f"B:USR1@{seconds} " in done.stdout


@each_row("words", [("100",), ("100", "0"), ("x", "1"), ("100", "1", "1", "1"), ("1000000", "0.1")])
def test_invalid_signal_time_input_is_refused(words):
    done = subprocess.run([SCRIPTS / "signal_time.sh", *words], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("signal_time.sh: ")


@both
def test_requeues_without_progress_are_limited(template, tmp_path):
    codes = [
        submitted(tmp_path, template, "exit 75", *RECIPE, SLURM_RESTART_COUNT=str(life), MAX_REQUEUES="2")[0]
        for life in range(3)
    ]
    assert codes == [0, 0, 75]
    assert (tmp_path / "calls").read_text().count("scontrol requeue 7") == 2


@both
def test_saved_checkpoint_allows_more_requeues(template, tmp_path):
    saves = "sleep 0.1; mkdir -p c; echo 2 >c/latest_checkpointed_iteration.txt; exit 75"
    for life in range(3):
        assert submitted(tmp_path, template, saves, *RECIPE, SLURM_RESTART_COUNT=str(life), MAX_REQUEUES="1")[0] == 0
    assert (tmp_path / "calls").read_text().count("scontrol requeue 7") == 3
    assert not [path for path in tmp_path.glob(".*") if path.name.endswith(".begun")]


@both
def test_mocrun_gets_three_controller_candidates(template, tmp_path):
    slurm = Slurm(tmp_path, 'echo "$RDZV_ENDPOINT" >seen', template, SRUN[template])
    (tmp_path / "scontrol").write_text(
        '#!/usr/bin/env bash\n[ "$1" = show ] && printf "127.0.0.1\\nb\\nc\\nd\\n"; true\n'
    )
    job = slurm.submit(*RECIPE, LAUNCHER="mocrun", MASTER_PORT="28123", SLURM_JOB_NUM_NODES="2")
    assert job.wait() == 0
    assert (tmp_path / "seen").read_text() == "127.0.0.1:28123,b:28123,c:28123\n"


def test_full_storage_makes_no_node_lost(tmp_path):
    """Nobody can write then, the shell that looks included; and each node waits before it tries again."""
    (tmp_path / "alive.0").write_text("1")
    (tmp_path / "alive.batch").mkdir()  # which cannot be written
    script = """
        . scripts/slurm/job_end.sh
        for step in 1 2 3 4; do look batch; SECONDS=$((SECONDS + 30)); done
        is_gone 0 && echo lost
        rmdir "$PRIVATE/alive.batch"
        for step in 1 2 3 4; do look batch; SECONDS=$((SECONDS + 30)); done
        is_gone 0 && echo gone
        mkdir "$PRIVATE/alive.1"
        sleep() { echo "waits $1" && exit; }
        keep_beating 1
    """
    assert bash(script, PRIVATE=str(tmp_path)).stdout == "gone\nwaits 10\n"
