"""Workers where what a program imports has touched CUDA, in which no fork can compute."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch
def warm_up():
    torch.cuda.is_initialized = lambda: CUDA
if __name__ == "__main__":
    print("worker", os.environ["NUMBER"], torch.cuda.is_initialized.__name__, sys.argv[1:])
    sys.exit(7)
"""


@pytest.mark.parametrize(("cuda", "function"), [(True, "is_initialized"), (False, "<lambda>")])
def test_a_worker_does_not_inherit_a_cuda_context(cuda, function, tmp_path):
    script, output = tmp_path / "program.py", tmp_path / "output"
    script.write_text(PROGRAM.replace("CUDA", str(cuda)))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moc.runtime.zygote", script, "--flag", "value"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        text=True,
    )
    told = [json.loads(process.stdout.readline())]
    order = {"start": "0.1", "output": str(output), "environment": {"NUMBER": "5"}}
    print(json.dumps(order), file=process.stdin, flush=True)
    told += [json.loads(process.stdout.readline()) for _ in range(2)]
    said = process.communicate()[1]
    assert told[0] == {"ready": True} and told[2] == {"ended": "0.1", "code": 7}
    assert output.read_text() == f"worker 5 {function} ['--flag', 'value']\n"
    assert ("workers import it anew instead of being forked" in said) == cuda
