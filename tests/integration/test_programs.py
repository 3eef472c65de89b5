"""Programs of the launcher that are no files: modules, and installed commands."""

import os
import subprocess
import sys

import pytest

from moc.errors import codes_in
from tests.worlds import REPOSITORY

PACKAGE = {
    "__init__.py": "",
    "named.py": "NAME = 'of the package'\n",
    "__main__.py": "import sys\nfrom .named import NAME\nprint(__name__, NAME, *sys.argv[1:], flush=True)\n",
}


def run(*words, cwd=REPOSITORY):
    """Runs the launcher; returns exit code and output."""
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "ignore", "-m", "moc.launch", *words]
    ended = subprocess.run(command, cwd=cwd, env=os.environ | ours, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.recovery
def test_lost_worker_of_module_is_replaced():
    code, output = run("--nproc-per-node", "2", "-m", "tests.integration.loses_one")
    assert code == 0 and output.count("sum 2") == 2 and output.count("was killed by signal 9") == 1, output


@pytest.mark.recovery
def test_a_program_that_dies_at_each_start_ends_the_job():
    program = str(REPOSITORY / "tests" / "codes" / "mistaken_loop.py")
    code, output = run("--max-standstill", "1", program, "restarts-exhausted")  # each worker kills itself
    assert code == 137 and codes_in(output) == ["progress-missing"] and "device 0 of node 0" in output, output


def test_package_runs_with_relative_imports(tmp_path):
    (tmp_path / "program").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "program" / name).write_text(text)
    code, output = run("--module", "program", "--lr", "1", cwd=tmp_path)
    assert code == 0 and "__main__ of the package --lr 1\n" in output, output


def test_installed_command_checks_flags_in_launcher(tmp_path):
    code, output = run("--nproc-per-node", "2", "moc-pretrain", "--hiden-size", "8", cwd=tmp_path)
    assert code == 2 and "flag-unknown" in codes_in(output) and "(worker" not in output, output


@pytest.mark.parametrize("words", [["-m", "no_such_module"], ["-m", "json.no"], ["no-such-command"], ["-m", "."]])
def test_missing_program_is_refused(words, tmp_path):
    code, output = run(*words, cwd=tmp_path)
    assert code == 2 and codes_in(output) == ["program-missing"] and words[-1] in output, output
