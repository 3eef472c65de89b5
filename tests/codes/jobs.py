"""Codes that only running jobs find: workers, launchers and programs of users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.pretraining.data import preprocess
from tests import own_policy
from tests.codes import mistaken_calls
from tests.codes.case import PROGRAM, Case, fault, writes
from tests.codes.mistaken_loop import MISTAKES
from tests.integration.entry_jobs import BASE as MEGATRON
from tests.worlds import REPOSITORY

PRETRAIN = REPOSITORY / "tests/codes/mistaken_pretrain.py"
LOOP = REPOSITORY / "tests/codes/mistaken_loop.py"
CALLS = REPOSITORY / "tests/codes/mistaken_calls.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --seq-length 16 "
    "--micro-batch-size 1 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --train-iters 2 --eval-iters 0 "
    "--transformer-impl local --num-workers 0"
)
SNAPSHOTS = "--ckpt-dir c --ckpt-memory-dir ."


def job(words: str, status: int, named: str = "", *, workers: int = 1, launcher: str = "", **more) -> Case:
    """Training under the launcher."""
    named = named or next(word for word in words.split() if word.startswith("--"))
    data = "" if "--data-path" in words else "--mock-data"
    words = f"--nproc-per-node {workers} {launcher} {PROGRAM} {MODEL} {data} {words}"
    return Case("mocrun", words, status, named, **more)


def worker(words: str, named: str, size: int = 1, status: int = 2, **more) -> Case:
    """The first worker of training without our launcher."""
    variables = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"} | more.pop("variables", {})
    return Case("pretrain", f"{MODEL} --mock-data {words}", status, named, variables=variables, **more)


OTHER_LAUNCHES = {"progress-missing", "restarts-exhausted", "sharding-rule-broken"}
"""Mistakes of a loop that need flags of the launcher."""


def loop(code: str, status: int = 1, launcher: str = "") -> Case:
    """A program of a user, with a mistake."""
    return Case("mocrun", f"{launcher} {LOOP} {code}", status)


def call(code: str) -> Case:
    """A program of a user that calls a function wrongly."""
    return Case("mocrun", f"{CALLS} {code}", 1)


def script(text: str, status: int, named: str = "script.py", launcher: str = "", **more) -> Case:
    """A program under the launcher."""
    return Case("mocrun", f"{launcher} script.py", status, named, **{"make": writes(script__py=text)} | more)


def user_script(code: str, words: str = "", named: str = "", status: int = 1, workers: int = 1) -> Case:
    """A user's script for ``megatron.training``, with a mistake."""
    words = f"--nproc-per-node {workers} {PRETRAIN} {' '.join(MEGATRON.split())} {words}"
    return Case("mocrun", words, status, named, variables={"MISTAKE": code})


def front(words: str, named: str) -> Case:
    """Training with Megatron-LM's flags."""
    words = f"{PROGRAM} {' '.join(MEGATRON.split())} {words}"
    return Case("mocrun", words, 2, named)


def package(name: str, text: str = "") -> Callable[[Path], None]:
    """Writes an importable package, and an empty script."""

    def make(root: Path) -> None:
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text(text)
        (root / "script.py").touch()

    return make


def old_core(root: Path) -> None:
    package("megatron/core")(root)
    (root / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 1\nPATCH = 0\n")


def dataset(root: Path) -> None:
    (root / "in.txt").write_text("1 2 3 4 5 6 7 8 9\n" * 99)
    made = preprocess.main(
        f"--input {root}/in.txt --output-prefix {root}/out --tokenizer-type NullTokenizer --vocab-size 100 --workers 1 "
        "--append-eod".split()
    )
    assert made == 0


def cut_dataset(root: Path) -> None:
    dataset(root)
    with open(root / "out_text_document.bin", "r+b") as file:
        file.truncate(100)


def tracker(root: Path) -> None:
    (root / "saved").mkdir()
    (root / "saved" / "latest_checkpointed_iteration.txt").write_text("newest")


def failing_policy(root: Path) -> None:
    own_policy.install(root, own_policy.FILE.replace("        chosen = ", "        1 / 0\n        chosen = "))


DIES = """
    import sys
    if "moc.{module}" in sys.orig_argv:
        sys.exit("no licence")
"""
"""A program of ours that ends as it starts."""

GPUS = "import torch; torch.cuda.is_available = lambda: True"
"""PyTorch of a machine with GPUs."""

SOCKETS = """
    import tempfile
    def fail(*_, **__): raise FileNotFoundError(2, "No such file or directory", "/gone")
    tempfile.mkdtemp = fail
"""
"""No directory can be made."""


def broken_policy(root: Path) -> None:
    described = root / "broken-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[moc.policies]\nbroken = broken\n")
    (root / "broken.py").write_text("1 / 0\n")


CASES = {
    # flags that need workers
    "cuda-needed": worker(
        "--moe-token-dispatcher-type flex --expert-model-parallel-size 2", "flex", 2, make=package("deep_ep"), cold=True
    ),
    "gloo-unsupported": worker(
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2 --sequence-parallel --disable-bias-linear",
        "--expert-tensor-parallel-size",
        4,
    ),
    "launcher-missing": worker(f"--ckpt-policy full {SNAPSHOTS} --ckpt-tier peers", "--ckpt-tier"),
    "node-names-invalid": job(f"--node-of-rank 0,1 --ckpt-policy full {SNAPSHOTS} --ckpt-tier memory", 2),
    "too-many-replicas": job(f"--replicas 2 --ckpt-policy full {SNAPSHOTS} --ckpt-tier peers", 2),
    "host-memory-too-small": job(
        f"--host-memory-gb 1e-9 --ckpt-policy auto {SNAPSHOTS} --ckpt-tier memory", 2, "--host-memory-gb"
    ),
    "experts-per-snapshot-invalid": job(f"--ckpt-policy pec {SNAPSHOTS} --pec-k 99", 2, "99"),
    "snapshot-budget-too-small": job(
        f"--selective-local-gb 1e-9 --ckpt-policy selective {SNAPSHOTS} --ckpt-tier memory", 2
    ),
    "log-memory-too-small": job(
        f"--upstream-log-limit 1e-9 --upstream-logging --ckpt-policy sparse {SNAPSHOTS} "
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --global-batch-size 2",
        1,
        workers=2,
    ),
    "tensor-parallel-across-nodes": job(
        f"--ckpt-tier memory --node-of-rank 0,1 --ckpt-policy full {SNAPSHOTS} --tensor-model-parallel-size 2 "
        "--sequence-parallel --disable-bias-linear",
        1,
        workers=2,
    ),
    "split-empty": job("--split 0,1 --data-path out_text_document", 2, make=dataset),
    "environment-malformed": worker("", "WORLD_SIZE", variables={"WORLD_SIZE": "two"}),
    "data-damaged": job("--data-path out_text_document", 1, "out_text_document.bin", make=cut_dataset),
    "release-unknown": script("", 1, "torch", make=package("torch", "set_num_threads = print\n"), cold=True),
    "megatron-core-unusable": worker("--seed 1", "megatron.core", make=old_core, cold=True, status=1),
    "memory-directory-unusable": job("--ckpt-memory-dir /proc --ckpt-policy full --ckpt-dir c --ckpt-tier memory", 1),
    "tracker-invalid": job("--load saved", 2, "latest_checkpointed_iteration.txt", make=tracker),
    "loss-not-finite": job("--lr 1e30 --train-iters 9", 1),
    "policy-flags-conflict": job(
        "--ckpt-tier memory --ckpt-policy busier --ckpt-dir c", 2, make=own_policy.install, cold=True
    ),
    "policy-module-broken": job("--train-iters 2", 1, "broken", make=broken_policy, cold=True),
    "policy-failed": job(
        "--ckpt-policy busier --snapshot-interval 1 --ckpt-dir c", 1, "plan()", make=failing_policy, cold=True
    ),
    "gloo-with-gpus": worker("--distributed-backend gloo", "gloo", make=fault(GPUS)),
    "environment-not-deterministic": worker(
        "--ckpt-policy full --ckpt-dir x",
        "CUBLAS_WORKSPACE_CONFIG=:1:1",
        make=fault(GPUS),
        variables={"CUBLAS_WORKSPACE_CONFIG": ":1:1"},
    ),
    # launchers
    "controller-cannot-start": script(
        "", 70, "", make=fault(DIES.format(module="runtime.controller"), writes(script__py=""))
    ),
    "replica-server-cannot-start": script(
        "", 70, "", make=fault(DIES.format(module="runtime.replica_server"), writes(script__py=""))
    ),
    "socket-directory-missing": script("", 70, "XDG_RUNTIME_DIR", make=fault(SOCKETS, writes(script__py=""))),
    "controller-missing": script(
        "", 70, "--rdzv-endpoint", "--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:1 --patience 1"
    ),
    "worker-cannot-start": script(
        "import sys\n\ndef warm_up():\n    sys.exit('no licence')\n\nif __name__ == '__main__':\n    pass\n",
        1,
        cold=True,
    ),
    # Megatron-LM's flags and scripts for its functions
    "megatron-options-refused": front(
        "--recompute-granularity selective --recompute-modules moe_act --num-experts 4", "moe_act"
    ),
    "data-kind-unsupported": front("--sft", "--sft"),
    "dialect-option-unsupported": front("--enable-hf2mg-convert", "--enable-hf2mg-convert"),
    "config-of-another-program": front("model.num_layers=2 model.hidden_size=64", "--num-layers 2 --hidden-size 64"),
    "dialect-ambiguous": front("--tokenizer-name-or-path x", "--dialect"),
    "device-unsupported": front("--profile", "--use-pytorch-profiler"),
    "model-missing": user_script("model-missing", status=2),
    "process-groups-of-caller": user_script("process-groups-of-caller", named="pg_collection", status=2),
    "datasets-unsupported": user_script("datasets-unsupported", named="Stream", status=2),
    "dataset-provider-unsupported": user_script(
        "dataset-provider-unsupported",
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "vp_stage",
        2,
        2,
    ),
    "loss-report-invalid": user_script("loss-report-invalid", status=2),
    "module-state-too-large": user_script("module-state-too-large", "--ckpt-policy full --ckpt-dir c"),
    # programs of users
    **{code: call(code) for code in mistaken_calls.MISTAKES},
    **{code: loop(code) for code in MISTAKES.keys() - OTHER_LAUNCHES},
    "sharding-rule-broken": loop("sharding-rule-broken", launcher="--nproc-per-node 2"),
    "progress-missing": loop("progress-missing", 137, "--nproc-per-node 2"),
    "restarts-exhausted": loop("restarts-exhausted", 137, "--max-restarts 0"),
}
