"""Workers where what a program imports has touched CUDA, in which no fork can compute."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, sys
import torch
def warm_up():
    os.spawnlp(os.P_NOWAIT, "true", "true")  # as some libraries do
    torch.cuda.is_initialized = lambda: CUDA
if __name__ == "__main__":
    print("worker", os.environ["NUMBER"], torch.cuda.is_initialized.__name__, sys.argv[1:])
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.exit(7)
"""


USUAL = 1024  # descriptors, which a crowd of strangers would take


@pytest.mark.parametrize(("cuda", "function"), [(True, "is_initialized"), (False, "<lambda>")])
def test_worker_has_descriptors_and_no_inherited_cuda_context(cuda, function, tmp_path):
    script, output = tmp_path / "program.py", tmp_path / "output"
    script.write_text(PROGRAM.replace("CUDA", str(cuda)))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moc.runtime.forkserver", script, "--flag", "value"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL, most)),
        text=True,
    )
    told = [json.loads(process.stdout.readline())]
    for number, log in enumerate((output, planted_link(tmp_path))):
        order = {"start": f"0.{number}", "output": str(log), "environment": {"NUMBER": "5"}}
        print(json.dumps(order), file=process.stdin, flush=True)
        told += [json.loads(process.stdout.readline()) for _ in range(2)]
    said = process.communicate()[1]
    assert told[0] == {"ready": True} and told[2] == {"ended": "0.0", "code": 7} and told[4]["code"] == 7
    descriptors = 65_536 if most == resource.RLIM_INFINITY else min(65_536, most)
    assert output.read_text() == f"worker 5 {function} ['--flag', 'value']\n{descriptors}\n"
    assert ("workers import it again instead of being forked" in said) == cuda
    assert (tmp_path / "precious").read_text() == "precious" and "link cannot be written" in said


def planted_link(directory: Path) -> Path:
    """A link to a file, where a worker is told to write its output."""
    (directory / "precious").write_text("precious")
    (directory / "link").symlink_to(directory / "precious")
    return directory / "link"
