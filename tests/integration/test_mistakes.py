"""Mistakes of users at the real command line: each ends with its code, a remedy and a non-zero exit code, no traceback.

Most are parsed in this process; one of each kind is sent through the launcher.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from megatron.pretraining.arguments import parse_config
from megatron.pretraining.config import Workers
from moc.errors import codes_in
from tests.worlds import REPOSITORY

PROGRAM = str(REPOSITORY / "pretrain_gpt_moe.py")
BASE = (
    "--model micro --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --train-iters 2 "
    "--micro-batch-size 1 --eval-iters 0 --transformer-impl local"
)
WORKERS = Workers(1, 1, 4)
OF_FLAGS = {  # flags in place of or beside the others: codes
    # misspelled and missing
    "--hiden-size 64": "flag-unknown",
    "--wandb-project x": "flag-unknown",
    "--lr-warmup-step 5": "flag-unknown",
    "--bf16 true": "value-without-flag",
    "--bf16=true": "value-not-taken",
    "--train-iters": "value-missing",
    "--train-iters ten": "value-unreadable",
    "--train-iters 0": "value-out-of-range",
    "--optimizer lamb": "value-not-a-choice",
    "--model gpt-5": "preset-unknown",
    "--tokenizer-type SentencePieceTokenizer": "tokenizer-incomplete",
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model": "tokenizer-missing",
    # paths
    "--config /no/such.yaml": "config-file-unreadable",
    "--deepspeed --deepspeed-config /no/such.json": "ds-config-unreadable",
    "--data-path /no/such": "flags-exclude-each-other data-file-missing",
    "--split 9,x": "split-malformed",
    # layouts and numbers of workers
    "--pipeline-model-parallel-size 3": "flag-not-a-multiple workers-not-divisible",
    "--expert-model-parallel-size 3": "flag-not-a-multiple workers-not-divisible",
    "--tensor-model-parallel-size 8 --sequence-parallel --disable-bias-linear": (
        "flag-not-a-multiple flag-not-a-multiple workers-not-divisible"
    ),
    "--global-batch-size 6": "batch-not-divisible",
    "--context-parallel-size 2": "flag-unsupported",
    # combinations
    "--fp16 --bf16": "flags-exclude-each-other",
    "--save-interval 5": "flag-needs-another",
    "--elastic-slots 4": "flag-has-no-effect",
    "--ckpt-policy full": "snapshot-directory-missing",
    "--ckpt-policy full --ckpt-dir x --persist-interval 2": "tier-lacks-flag",
    "--ckpt-policy full --ckpt-dir x --pec-k 2": "policy-lacks-flag",
    "--ckpt-policy auto --ckpt-dir x --pec-k 2": "flag-chosen-by-auto",
    "--lr-warmup-iters 5": "warmup-too-long",
    "--train-samples 9": "flags-exclude-each-other",
    "--min-lr 1": "flag-exceeds-another",
    "--moe-layer-freq [0,0]": "layer-pattern-mismatch",
    "--max-position-embeddings 8": "sequence-too-long",
    "--fp8-format e4m3": "precision-needs-flag",
    "--moe-router-topk 1": "router-without-gradient",
    "--weight-decay-incr-style linear": "weight-decay-style-conflict",
    "--recompute-granularity full": "recompute-flags-incomplete",
    '--inject "kill rank=1 iteration=2"': "flag-needs-another",
    # several at once
    "--hiden-size 64 --lr ten --micro-batch-size 0 --save-interval 5 --pipeline-model-parallel-size 3": (
        "flag-unknown value-unreadable value-out-of-range flag-needs-another flag-not-a-multiple workers-not-divisible"
    ),
}


@pytest.mark.parametrize("flags", OF_FLAGS)
def test_flags(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(shlex.split(f"{BASE} {flags}"), WORKERS)
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert sorted(codes_in(output)) == sorted(OF_FLAGS[flags].split()), output
    assert all(" Fix: " in line for line in output.splitlines()[1:])


def launched(*words, program=PROGRAM, flags=BASE, **environment):
    """Runs the launcher to its end: exit code, codes in its output, and the output."""
    command = [sys.executable, "-W", "ignore", "-m", "moc.launch", *words, program, *shlex.split(flags)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    ended = subprocess.run(command, env=variables, cwd=REPOSITORY, capture_output=True, text=True)
    output = ended.stdout + ended.stderr
    assert "Traceback" not in output, output
    return ended.returncode, codes_in(output), output


def test_flags_are_checked_before_torch_is_imported(tmp_path):
    """No worker and no process that forks workers exists by then: only the launcher imports anything."""
    imports = tmp_path / "torch"
    imports.mkdir()
    (imports / "__init__.py").write_text("raise AssertionError('torch was imported')")
    code, codes, output = launched(
        "--nproc-per-node", "3", flags=f"{BASE} --hiden-size 64 --pipeline-model-parallel-size 2",
        PYTHONPATH=f"{tmp_path}:{REPOSITORY}",
    )  # fmt: skip
    assert code == 2 and codes == ["flag-unknown", "workers-not-divisible"], output
    assert "--hidden-size" in output


def test_a_worker_without_our_launcher_checks_by_itself():
    command = [sys.executable, "-W", "ignore", PROGRAM, *shlex.split(BASE), "--hiden-size", "64"]
    variables = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "PYTHONPATH": str(REPOSITORY)}
    flags = ["--pipeline-model-parallel-size", "2"]
    ended = subprocess.run([*command, *flags], env=variables, capture_output=True, text=True)
    assert ended.returncode == 2 and codes_in(ended.stderr) == ["flag-unknown", "workers-not-divisible"]


@pytest.mark.parametrize("flag", ["--save", "--log-dir", "--tensorboard-dir"])
def test_a_directory_that_cannot_be_made(flag, tmp_path):
    (tmp_path / "file").touch()
    code, codes, output = launched(flags=f"{BASE} {flag} {tmp_path}/file/directory")
    assert code == 2 and codes == ["output-not-writable"] and flag in output


def test_a_full_directory():
    device = "/dev/full"  # stands for a full disk: what is written fails with the same error
    code, codes, output = launched(flags=f"{BASE} --log-dir {device}")
    assert code == 2 and codes == ["output-not-writable"] and device in output


def test_a_full_disk(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with open(tmp_path / "filling", "wb", buffering=0) as file:
            written = 1
            while written:
                try:
                    written = file.write(bytes(1 << 12))
                except OSError:
                    written = 0
        code, codes, output = launched(flags=f"{BASE} --log-dir {tmp_path}")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert code == 2 and codes == ["output-not-writable"] and str(tmp_path) in output


@pytest.mark.parametrize("words", ["--rdzv-endpoint 127.0.0.1:{}", "--master-addr 127.0.0.1 --master-port {}"])
def test_a_port_in_use(words):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, codes, output = launched(*words.format(port).split())
    assert code == 70 and codes == ["port-in-use"], output
    assert str(port) in output and "127.0.0.1" in output and words.split()[-2] in output


OF_LAUNCHER = {
    "--nproc-per-node 0": "value-out-of-range",
    "--nproc-per-node two": "flag-invalid",
    "--nnodes 3:2": "flag-invalid",
    "--nnodes 2": "rendezvous-missing",
    "--node-rank 1 --rdzv-endpoint a:1": "node-rank-out-of-range",
    "--network-interface nosuch0": "network-interface-missing",
    "--rdzv-endpoint a:99999": "address-malformed",
}


@pytest.mark.parametrize("words", OF_LAUNCHER)
def test_flags_of_the_launcher(words):
    code, codes, output = launched(*words.split())
    assert code == 2 and codes == [OF_LAUNCHER[words]], output


def test_programs_that_are_none(tmp_path):
    code, codes, output = launched(program=str(tmp_path / "missing.py"))
    assert code == 2 and codes == ["program-missing"] and "missing.py" in output


def test_arguments_of_other_programs_are_not_parsed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import json, sys\nopen({str(tmp_path / 'words')!r}, 'w').write(json.dumps(sys.argv[1:]))\n")
    code, codes, output = launched(program=str(program), flags="--hiden-size 64 --mock-data")
    assert code == 0 and not codes, output
    assert json.loads((tmp_path / "words").read_text()) == ["--hiden-size", "64", "--mock-data"]


@pytest.mark.parametrize("after_s", [0.0, 0.4, 2.0])
def test_control_c_at_any_moment(after_s, tmp_path):
    """From the first line of the launcher on: Python itself prints a traceback while it starts."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "moc.launch",
        PROGRAM,
        *shlex.split(BASE),
        *("--train-iters", "1000000"),
        *("--log-dir", str(tmp_path)),
    ]
    job = subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert job.stdout is not None and job.stdout.readline()
    time.sleep(after_s)
    os.killpg(job.pid, signal.SIGINT)
    output = job.communicate()[0]
    assert job.returncode in (-signal.SIGINT, 128 + signal.SIGINT), output
    assert "Traceback" not in output, output
