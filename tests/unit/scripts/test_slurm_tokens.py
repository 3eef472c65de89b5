"""A job under Slurm keeps its token to itself, removes those of killed jobs, and runs no name as a command."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "scontrol": "echo node0",
    "srun": 'stat -c %a "$PRIVATE" "$MOC_TOKEN_FILE" >modes; cp "$MOC_TOKEN_FILE" seen; echo 0 >"$PRIVATE/code.0"',
}


def submit(directory: Path, squeue: str, *words: str, template: str = "mocrun", **commands: str) -> None:
    """Runs a batch script, as Slurm does, on one node; ``squeue`` and others are what these commands do."""
    shutil.copytree(ROOT / "scripts", directory / "scripts")
    own = directory / "commands"
    own.mkdir()
    for name, text in (COMMANDS | {"squeue": squeue} | commands).items():
        (own / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (own / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node0",
        "LOOK_S": "0.05",
        "BEAT_S": "1",
    }
    subprocess.run(
        ["bash", f"scripts/slurm/{template}.sbatch", *(words or ["--max-wait", "9", "train.py"])],
        cwd=directory,
        env=os.environ | slurm | {"PATH": f"{own}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        timeout=60,
    )


def leave(directory: Path, *names: str) -> None:
    """What jobs have left, each with a token."""
    for name in names:
        (directory / name).mkdir()
        (directory / name / "token").write_text("secret")


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(".mocrun-*")}


OWN, DEAD, LIVE, OTHER = ".mocrun-7-abcdef", ".mocrun-5-abcdef", ".mocrun-6-abcdef", ".mocrun-x-abcdef"


def test_job_tokens_of_killed_and_earlier_jobs_are_removed(tmp_path):
    leave(tmp_path, OWN, f"{OWN}.over", DEAD, LIVE, OTHER)
    submit(tmp_path, "echo 6; echo 7")
    assert left(tmp_path) == {LIVE, OTHER}
    assert (tmp_path / "modes").read_text().split() == ["700", "600"]
    assert len((tmp_path / "seen").read_text()) == 64


@pytest.mark.parametrize("squeue", ["exit 1", "echo 6"], ids=["no answer", "it does not know this job"])
def test_tokens_stay_if_slurm_cannot_list_jobs(tmp_path, squeue):
    leave(tmp_path, DEAD, LIVE)
    submit(tmp_path, squeue)
    assert left(tmp_path) == {DEAD, LIVE}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_token_of_other_user_is_not_removed(tmp_path):
    leave(tmp_path, DEAD)
    os.chown(tmp_path / DEAD, 65534, 65534)
    submit(tmp_path, "echo 7")
    assert left(tmp_path) == {DEAD}


HOSTILE = ["--data-path", "`touch ran`", "a b; touch ran", "'\"", "*", "-n", "--save", "x\n; touch ran", "$(touch ran)"]
WAYS = {  # template: (words before the hostile ones, of which so many are passed on otherwise; the command of a task)
    "mocrun": (["--max-wait", "9", "train.py"], 0, "node.sh"),
    "pretrain": (["gpt-125m-8e", "$(touch ran) data", "`touch ran`", "; touch ran"], 2, "bash"),
    "smoke_cpu": ([], 0, "bash"),
}


@pytest.mark.parametrize("template", WAYS)
def test_hostile_names_are_not_executed(tmp_path, template):
    """Neither an argument nor the name of the directory that a job is submitted from."""
    directory = tmp_path / "it's $(touch ran) & `touch ran`; touch ran"
    directory.mkdir()
    (directory / "pretrain_gpt_moe.py").touch()
    before, otherwise, task = WAYS[template]
    through = f'while [[ $1 != *{task} ]]; do shift; done; SLURM_NODEID=0 "$@"'
    python = f'printf "%s\\0" "$@" >>{tmp_path}/words'
    submit(directory, "echo 7", *before, *HOSTILE, template=template, srun=through, python=python)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words[-len(HOSTILE) :] == HOSTILE and set(before[otherwise:]) <= set(words)
    assert not list(tmp_path.rglob("ran"))
