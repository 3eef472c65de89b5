"""A run with somebody else's policy, from a package that is installed outside of the tree."""

import signal
import subprocess
import sys

from benchmarks.live.job import free_ports
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name
from tests.own_policy import ROOT, install

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --num-experts 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def train(env, directory, iterations, *more, code=0):
    """One worker, as torchrun would start it; what it has said."""
    flags = f"{MODEL} --train-iters 20 --exit-interval {iterations} --ckpt-dir {directory} --ckpt-keep 9"
    policy = "--ckpt-policy busier --busier-experts 1 --snapshot-interval 2"
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(*free_ports(1)))
    command = [sys.executable, "pretrain_gpt_moe.py", *flags.split(), *policy.split(), *more]
    done = subprocess.run(command, cwd=ROOT, env=env | alone, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_run_with_installed_policy_is_killed_and_resumes(tmp_path):
    (tmp_path / "site").mkdir()
    env, directory = install(tmp_path / "site"), tmp_path / "snapshots"
    kill = "--max-snapshot-lag", "1", "--log-dir", str(tmp_path / "log"), "--inject", "kill rank=0 iteration=7"
    assert "loading snapshot" not in train(env, directory, 20, *kill, code=-signal.SIGKILL)
    store = Store(LocalStorage(str(directory)))
    assert store.read_manifest(4).policy == "busier"
    published = store.iterations()
    said = train(env, directory, 8)
    newest = 6 if 6 in published else 4  # the kill may precede the publication of the snapshot just begun
    assert f"loading snapshot {directory}/{checkpoint_name(newest)}" in said
    assert store.iterations()[-1] == 8
    experts = [name.split(".")[1] for name in store.read_manifest(4).operators if ".expert." in name]
    assert sorted(experts) == ["0", "1"]  # one of each layer
