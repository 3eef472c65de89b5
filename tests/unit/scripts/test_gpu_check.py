"""scripts/gpu_check.sh where there is no GPU, its steps and their limits; and that no real job shares a GPU by it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import device_training
from megatron.pretraining.config import check_backend, check_world
from megatron.pretraining.entry.offline import config_of_words
from tests.cases import each_row
from tests.gpu import check, test_many_ranks, test_train
from tests.gpu.check import FAILED, LATE, NOT_RUN, PASSED, SKIPPED
from tests.gpu.one_gpu import ASKED, NotHere, one_gpu_environment
from tests.gpu.steps import STEPS, Step
from tests.gpu.test_many_ranks import SPARSE

ROOT = Path(__file__).parents[3]
WORKER = {ASKED: "1", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_check_without_gpu_fails_with_message():
    for command in (["scripts/gpu_check.sh"], [sys.executable, "-m", "tests.gpu.check"]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and not done.stdout
        assert re.fullmatch(r"[^\n]*NVIDIA GPU [^\n]*\n", done.stderr)


def test_gpu_check_steps_are_listed_and_select_tests():
    told = subprocess.run(["scripts/gpu_check.sh", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert [step.name for step in STEPS] == re.search(r"steps alone: ((?:\s*\w+)+)\n", told)[1].split()
    for step in STEPS:
        files = [ROOT / word for word in step.command if word.endswith(".py")]
        assert files and all(file.is_file() for file in files)
        if "-k" in step.command:
            names = re.split(" or ", step.command[step.command.index("-k") + 1])
            text = "".join(file.read_text() for file in files)
            assert all(re.search(rf"def test_\w*{name}", text) or name == "fp8" for name in names), step.name


MANY, ONE, CASES = test_many_ranks.FLAGS, test_train.FLAGS, device_training.CASES
FLAGS = [
    *((workers, [*MANY, *more, "--train-iters", "3"]) for workers, more in ((2, test_many_ranks.FULL), (4, SPARSE))),
    *((1, [*ONE, *precision]) for precision in (*test_train.PRECISIONS, test_train.ASYNC)),
    *((1, [*ONE, *test_train.in_8_bits("local", state)]) for state in test_train.STATES),
    *((1, [*ONE, *test_train.with_attention(backend)]) for backend in ("flash", "fused", "unfused")),
    *((1, device_training.flags_for(case, interval)) for case in CASES for interval in (1, device_training.NEVER)),
]


@each_row("workers, flags", FLAGS)
def test_program_accepts_flags_of_gpu_check_steps(workers, flags):
    places = ["--ckpt-dir", "x"] if "--ckpt-policy" in flags else ["--save", "x"]
    config = config_of_words([*flags, *places], None)
    check_world(config, workers)
    check_backend(config, "nccl")
    if "transformer_engine" not in flags:
        check_backend(config, "gloo")


def test_step_passes_fails_is_skipped_or_times_out(tmp_path, capfd):
    def step(name: str, program: str, limit_s: int = 60) -> Step:
        return Step(name, f"{name} holds", ("-c", program), limit_s)

    child = "import subprocess as s, time; s.Popen(['sleep', '3600']); "
    hanging = f"{child}print('begun', flush=True); time.sleep(3600)"
    begun = time.monotonic()
    outcomes = check.check(
        [
            step("good", "print('1 passed, 2 skipped in 3 s')"),
            step("bad", "raise SystemExit(3)"),
            step("absent", "print('====== 2 skipped in 1 s ======')"),
            step("slow", hanging, limit_s=1),
        ],
        600,
        str(tmp_path),
        tmp_path,
    )
    assert [one.result for one in outcomes] == [PASSED, FAILED, SKIPPED, LATE]
    assert outcomes[2].told == "2 skipped in 1 s" and outcomes[3].told == "begun"
    assert time.monotonic() - begun < 60
    (left,) = check.check([step("last", "")], 0.5, str(tmp_path), tmp_path)
    assert left.result == NOT_RUN and not left.is_bad
    page = check.page([*outcomes, left], {"gpus": ["A", "A"], "torch": "2.11"})
    assert "**1 of 5 " in page and "2 failed**, " in page and "A and A (torch 2.11)" in page
    assert "| bad holds | FAILED | 0 s |  |" in page
    assert json.dumps([vars(one) for one in outcomes])  # as they are written


def test_workers_share_first_gpu_over_sockets():
    found = one_gpu_environment(WORKER)
    assert (found["LOCAL_RANK"], found["NCCL_HOSTID"], found["NCCL_SOCKET_IFNAME"]) == ("0", "r2", "lo")


@each_row(
    "changes",
    [{ASKED: "0"}, {ASKED: None}, {"MOC_PLACES": "2"}, {"SLURM_JOB_NUM_NODES": "2"}, {"WORLD_SIZE": "16"}],
    ids=str,
)
def test_real_job_does_not_share_gpu(changes):
    environment = {name: value for name, value in (WORKER | changes).items() if value is not None}
    with pytest.raises(NotHere):
        one_gpu_environment(environment)


def test_shipped_code_does_not_use_gpu_sharing():
    files = [file for folder in ("moc", "megatron", "tools", "scripts") for file in (ROOT / folder).rglob("*.py")]
    text = "".join(file.read_text() for file in [*files, ROOT / "pretrain_gpt_moe.py"])
    assert ASKED not in text and "NCCL_HOSTID" not in text
