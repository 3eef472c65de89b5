"""A library whose private functions have other names ends a job with one sentence, before it has workers."""

import os
import subprocess
import sys

import pytest

from tests.overlay import edited
from tests.shared import ALL
from tests.worlds import REPOSITORY

FLAGS = (
    "--model tiny --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --train-iters 1 "
    "--lr 1e-3 --micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --num-workers 0"
)
TRAIN = ["pretrain_gpt_moe.py", *FLAGS.split()]
SNAPSHOTS = ["--pipeline-model-parallel-size", "2", "--ckpt-policy", "full", "--ckpt-tier", "memory"]
COMMUNICATE = "megatron.core.pipeline_parallel.p2p_communication", ("def _communicate(", "def _communicate_now(")


def launched(overlay, *command, launcher="moc.launch"):
    environment = os.environ | {"PYTHONPATH": f"{overlay}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", launcher, "--nproc-per-node", "2", *command]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("module", "edit", "command", "named"),
    [
        (
            "torch.distributed.distributed_c10d",
            ("_object_to_tensor", "_object_as_tensor"),
            ["examples/pure_torch.py"],
            "_object_to_tensor is missing, and moc/runtime/groups.py",
        ),
        (
            "megatron.core.distributed.param_and_grad_buffer",
            ("per_param_grad_ready_counts", "ready_counts"),
            TRAIN,
            "has no attribute per_param_grad_ready_counts, and megatron/pretraining/engine/schedule.py",
        ),
        (*COMMUNICATE, [*TRAIN, *SNAPSHOTS, "--ckpt-dir", "/nowhere"], "P2PCommunicator._communicate is missing"),
        *ALL
        * [
            (
                "megatron.core.transformer.moe.moe_utils",
                ("def maybe_move_tensor_to_cpu(", "def move_tensor_to_cpu("),
                TRAIN,
                "cannot import name 'maybe_move_tensor_to_cpu'",
            )
        ],
    ],
)
def test_renamed_library_function_ends_job_with_one_error(module, edit, command, named, tmp_path):
    ended = launched(edited(tmp_path, module, edit), *command)
    (sentence,) = [line for line in ended.stderr.splitlines() if named in line]
    assert ended.returncode == 1, ended.stderr
    library = "torch" if module.startswith("torch") else "megatron-core"
    assert f"pip install '{library}>=" in sentence
    assert "Traceback" not in ended.stdout + ended.stderr


def test_renamed_unused_function_is_not_required(tmp_path):
    ended = launched(edited(tmp_path, *COMMUNICATE), *TRAIN)
    assert ended.returncode == 0, ended.stderr


def test_renamed_function_is_reported_once_under_torchrun(tmp_path):
    module, edit = "megatron.core.distributed.param_and_grad_buffer", ("grad_reduce_handle", "reduce_handle")
    ended = launched(edited(tmp_path, module, edit), *TRAIN, launcher="torch.distributed.run")
    assert ended.returncode == 1
    assert ended.stderr.count("has no attribute grad_reduce_handle") == 1, ended.stderr
