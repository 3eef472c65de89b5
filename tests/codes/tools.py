"""Codes of the tools: for checkpoints, data, planning and reports."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from unittest import mock

import numpy
import torch
from safetensors.torch import load_file, save_file

from megatron.pretraining.convert.dense import write_dense
from megatron.pretraining.convert.hugging_face.conversions import _MAX_STAGING, _staging_directory
from megatron.pretraining.data.documents import PairWriter
from moc.store.buffers import HostBuffer
from moc.store.host_memory import memory_storage
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import _REMOVAL_MARK as REMOVED
from moc.store.store import Run, Store, record_run
from tests.codes.case import Case, writes
from tests.unit.inspect.checkpoints import publish_again, save
from tests.unit.inspect.test_verify import flip
from tests.unit.pretraining.convert.models import Model, shapes
from tests.unit.pretraining.convert.test_hugging_face import SHAPE, drawn
from tests.unit.pretraining.convert.test_program import Bomb, Nudged, dense, edited, snapshot, without
from tests.unit.pretraining.convert.test_stale import Partial
from tests.unit.pretraining.convert.test_window import WINDOW, Sparse
from tests.unit.store.test_store import saved

HELD = contextlib.ExitStack()
"""Locks that this process holds for a case; the test closes it."""

LOGITS = "megatron.pretraining.convert.hugging_face.conversions"
START = {"type": "start", "time": 1.0, "iteration": 0}
SIMULATED = "--model micro --cluster a100-80gb:16 --ep 4 --hours 3"
PLANNED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --num-experts 4 --disable-bias-linear "
    "--vocab-size 1000"
)
CHOSEN = f"{PLANNED} --explain-selective --iteration-s 2 --forward-backward-s 1 --tier memory --snapshot-gbs 1"
TEXT = "--input in.txt --output-prefix out --tokenizer-type NullTokenizer --vocab-size 100 --append-eod"


def convert(words: str, make, status: int = 1, named: str = "") -> Case:
    """The converter, with the directory ``in``."""
    return Case("convert_checkpoint", f"in out {words}", status, named, lambda root: make(root / "in"))


def reported(*events: dict):
    """Writes a log of events."""
    return writes(events__jsonl="".join(f"{json.dumps(event)}\n" for event in events))


def simulated(words: str, named: str, make=None, failures: str = "--mtbf 1h") -> Case:
    """The simulator."""
    return Case("simulate", f"{SIMULATED} {failures} {words}", 1, named, make)


def planned(words: str, named: str, make=None, flags: str = CHOSEN) -> Case:
    """The planner."""
    return Case("plan_checkpoint", f"{flags} {words}", 1, named, make)


def preprocess(words: str, named: str, make=None, flags: str = TEXT) -> Case:
    """The program that makes datasets."""
    return Case("preprocess_data", f"{flags} {words}", 1, named, make)


def iteration(root: Path) -> Path:
    """The checkpoint in a directory."""
    return next(root.glob("iter_*"))


def renamed(root: Path) -> None:
    snapshot(root).rename(root / "checkpoint")


def foreign(root: Path) -> None:
    directory = dense(root)
    for name in ("manifest.json", "training_state.json"):
        (directory / name).unlink()


def with_code_to_run(root: Path) -> None:
    foreign(root)
    (iteration(root) / ".metadata").write_bytes(pickle.dumps(Bomb("x")))


def older_format(root: Path) -> None:
    path = snapshot(root) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "moc-checkpoint-0"}))


def unreadable(root: Path) -> None:
    foreign(root)
    (iteration(root) / ".metadata").unlink()


def under_way(root: Path) -> None:
    snapshot(root)
    (root.parent / "out" / ".iter_0000009.incomplete").mkdir(parents=True)


def published(root: Path) -> None:
    snapshot(root)
    snapshot(root.parent / "out")


def moved(root: Path) -> None:
    snapshot(root).rename(root / "iter_0000004")


def without_optimizer(root: Path) -> None:
    for path in dense(root).glob("optimizer/rank_00001.*"):
        path.unlink()
    publish_again(iteration(root))


def nudged(root: Path) -> None:
    dense(root)
    other = dense(root.parent / "nudged", Nudged(), dtype=torch.float16)
    for path in [*other.glob("*.distcp"), other / ".metadata"]:
        path.replace(iteration(root) / path.name)
    publish_again(iteration(root))


def of_a_stranger(root: Path) -> None:
    dense(root, Model(shapes() | {"stranger.weight": (4,)}))


def written_by_another(root: Path) -> None:
    exported_to = root.parent / "out"
    exported_to.parent.mkdir(exist_ok=True)
    mixtral(root)
    HELD.enter_context(_staging_directory(exported_to))


def stale(root: Path) -> None:
    from megatron.pretraining.convert.snapshot import write_snapshot
    from moc.policy.token_ledger import TokenLedger
    from tests.unit.pretraining.convert.models import EXPERTS, LAYERS
    from tests.unit.pretraining.convert.test_stale import SAVED

    ledger = TokenLedger.empty(dict.fromkeys(range(LAYERS), EXPERTS))
    for number, experts in SAVED.items():
        ledger = ledger.after_iteration(
            {layer: [10 * layer + one + 1 for one in range(EXPERTS)] for layer in range(LAYERS)}
        )
        saved = {layer: [int(one[2]) for one in experts if int(one[0]) == layer] for layer in range(LAYERS)}
        write_snapshot(Partial(number, ledger.with_snapshot(saved), "pec"), root, 2, lambda count: None)
        ledger = ledger.with_snapshot(saved).with_snapshot_completed(number)


def mixtral(root: Path, forget: tuple[str, ...] = ()) -> None:
    """A dense checkpoint of weights, of a model of transformers."""
    contents, *_ = drawn("mixtral")
    for name in forget:
        del contents.facts.state[name]
    if "model" in forget:
        contents.facts.state["shape"] = SHAPE
    write_dense(contents, root, 1, torch.float32, 10**9, lambda count: None)


def large(root: Path) -> None:
    """A model with a weight that is doubled in the format of transformers."""
    contents, *_ = drawn("qwen2 of shared experts without a gate")
    contents.values["decoder.layers.0.mlp.shared_experts.linear_fc2.weight"][0, 0] = 60_000.0
    write_dense(contents, root, 1, torch.float32, 10**9, lambda count: None)


def exported(change=lambda directory: None):
    """Writes a model of transformers, and changes it."""

    def make(root: Path) -> None:
        from megatron.pretraining.convert import program

        mixtral(root.parent / "ours")
        assert program.main([str(root.parent / "ours"), str(root), "--to", "hf"]) == 0
        (root / "conversion.json").unlink()
        change(root)

    return make


def configured(**changes):
    """Writes a model of transformers with another config.json; a value None removes a key."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return exported(change)


def tensors(change):
    """Writes a model of transformers with other tensors."""

    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    return exported(edit)


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")


def indexed(directory: Path) -> None:
    names = [*load_file(directory / "model.safetensors"), "model.more.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def foreign_record(directory: Path) -> None:
    (directory / "conversion.json").write_text("{}")


def patched(target: str, value, make=lambda root: None):
    """Writes files, and replaces a function while the case runs."""

    def change(root: Path) -> None:
        make(root)
        HELD.enter_context(mock.patch(target, value))

    return change


def some_logits(module: str, *arguments: str) -> None:
    """Writes logits as the processes of both models do: zeros for ours, ones for the other."""
    theirs = module == "transformers_logits"
    numpy.save(
        arguments[-1] if theirs else Path(arguments[0]).parent / "ours.npy", numpy.full((2, 3, 4), float(theirs))
    )


def removed(root: Path) -> None:
    (snapshot(root) / REMOVED).touch()


def part_of_window(root: Path) -> None:
    snapshot(root, Sparse(5, WINDOW[1], WINDOW[2]))


def without_names(root: Path) -> None:
    mixtral(root)
    for number in range(_MAX_STAGING):
        path = root.parent / f".out.incomplete{f'-{number}' * bool(number)}"
        path.mkdir()
        path.chmod(0o777)


def being_written(root: Path) -> None:
    (root / "in.txt").write_text("1 2\n")
    HELD.enter_context(PairWriter(f"{root}/out_text_document", numpy.uint16))


def in_use(root: Path) -> None:
    place = memory_storage(root, "/data/checkpoints", "a" * 16)
    saved(Store(LocalStorage(place.root, claim=Claim("ended"))), 10)
    record_run(place, Run("a" * 16, "/data/checkpoints", 0.0))
    HELD.callback(HostBuffer(4096, place.root / "slots" / "rank_00001.0").close)


def not_whole(root: Path) -> None:
    (save(root / "in") / "common.pt").unlink()


def routing(**arrays):
    """Writes a recording of loads."""

    def make(root: Path) -> None:
        numpy.savez(root / "loads.npz", **arrays)

    return make


CASES = {
    # checkpoints
    "not-a-directory": Case("inspect_checkpoint", "in", 2, "in"),
    "manifest-missing": convert("", foreign, named="manifest.json"),
    "checkpoint-not-whole": Case("verify_checkpoint", "in", 1, "in", not_whole),
    "directory-is-one-checkpoint": Case(
        "convert_checkpoint", "in/iter_0000003 out --iteration 3", 2, "--iteration", lambda root: snapshot(root / "in")
    ),
    "checkpoint-missing": convert("", lambda root: root.mkdir(), named="in"),
    "checkpoint-renamed": Case(
        "convert_checkpoint", "in/checkpoint out", 1, "checkpoint", lambda root: renamed(root / "in")
    ),
    "checkpoint-damaged": convert(
        "", lambda root: flip(snapshot(root) / "rank_00001.safetensors", 800), named="rank_00001"
    ),
    "checkpoint-format-unknown": convert("", older_format, named="moc-checkpoint-0"),
    "checkpoint-incomplete": convert("", lambda root: snapshot(root, Model(without(r"layers\.1.*linear_proj")))),
    "checkpoint-moved": convert("", moved, named="iter_"),
    "checkpoint-of-another-program": convert("", of_a_stranger, named="stranger"),
    "checkpoint-unreadable": convert("--trust", unreadable, named=".metadata"),
    "metadata-refused": convert("--trust", with_code_to_run, named=".metadata"),
    "model-description-invalid": convert("", lambda root: snapshot(root, Model(shape=None))),
    "operator-missing": convert("", lambda root: snapshot(root, Model(without(r"experts\.1\."))), named="expert.1"),
    "optimizer-state-missing": convert("", without_optimizer, named="exp_avg"),
    "experts-stale": convert("", stale, named="--allow-stale"),
    "snapshot-parts-missing": convert("", lambda root: edited(snapshot(root), writers=3)),
    "save-in-progress": convert("", under_way, named=".iter_0000009.incomplete"),
    "output-exists": convert("--to snapshot", published, named="out"),
    "update-counts-differ": convert("", lambda root: snapshot(root, Model(steps={"output": 3})), named="--no-optim"),
    "weight-differs-from-master": convert("", nudged, named="--no-optim"),
    "dtype-conflict": convert("--dtype fp16", dense, named="--dtype"),
    "dtype-too-narrow": convert("--to hf --family qwen2_moe --dtype fp16", large, named="--dtype"),
    "dtype-missing": convert("", lambda root: snapshot(root, Model(params_dtype=None)), named="--dtype"),
    "checkpoint-removed": convert("--iteration 3", removed, named="iter_0000003"),
    "window-incomplete": convert("-- --train-iters 1", part_of_window, named="window"),
    # models of transformers
    "written-bits-differ": convert("--to hf --verify", patched("torch.equal", lambda *_: False, mixtral)),
    "logits-differ": convert("--to hf --check-logits", patched(f"{LOGITS}._run", some_logits, mixtral)),
    "logits-not-computed": convert(
        "--to hf --check-logits",
        patched(f"{LOGITS}.child_processes.module_command", lambda *_: ["sh", "-c", "exit 3"], mixtral),
        named="--check-logits",
    ),
    "output-unusable": convert("--to hf", without_names),
    "model-not-recorded": convert("--to hf", lambda root: mixtral(root, ("model", "tokenizer")), named="--"),
    "checkpoint-of-another-model": convert(
        "--to hf -- --config run.json",
        lambda root: (mixtral(root, ("model", "tokenizer")), other_model(root.parent)),
        named="--ffn-hidden-size",
    ),
    "directory-in-use": convert("--to hf", written_by_another, named="out"),
    "family-cannot-express": convert("--to hf --family qwen3_moe", mixtral, named="--family"),
    "family-unknown": convert("--to hf --family deepseek_v3", mixtral, named="deepseek_v3"),
    "target-unsupported": convert("--to snapshot", exported(), named="--to torch_dist"),
    "config-key-missing": convert("", configured(model_type=None), named="model_type"),
    "config-value-unsupported": convert("", configured(hidden_act="gelu"), named="hidden_act"),
    "config-contradictory": convert("", configured(num_experts=7), named="num_"),
    "model-without-experts": planned("", "--explain-selective", flags=CHOSEN.replace("--num-experts 4", "")),
    "weights-missing": convert("", exported(lambda root: (root / "model.safetensors").unlink()), named="in"),
    "weights-pickled": convert("", exported(pickled), named="pytorch_model.bin"),
    "weights-index-wrong": convert("", exported(indexed), named="model.more.weight"),
    "conversion-record-foreign": convert("", exported(foreign_record), named="conversion.json"),
    "tensor-missing": convert("", tensors(lambda weights: weights.pop("lm_head.weight")), named="lm_head.weight"),
    "tensor-unexpected": convert(
        "", tensors(lambda weights: weights.update(stranger=torch.zeros(2))), named="stranger"
    ),
    "tensor-shape-wrong": convert(
        "",
        tensors(lambda weights: weights.update({"model.norm.weight": torch.zeros(3)})),
        named="model.norm.weight",
    ),
    # memory of jobs
    "memory-in-use": Case("clean_memory", "--memory-dir . --remove --all --ended", 1, str(os.getpid()), in_use),
    "memory-of-no-run": Case("clean_memory", "--memory-dir . --remove other", 1, "other"),
    "address-invalid": Case("clean_memory", "--memory-dir . --ckpt-dir s3:/bucket", 1, "s3:/bucket"),
    "library-missing": Case("clean_memory", "--memory-dir . --ckpt-dir gs://bucket/x", 1, "gs://bucket"),
    "run-unknown": Case("clean_memory", "--memory-dir . --ckpt-dir in", 1, "in", lambda root: (root / "in").mkdir()),
    # data
    "input-missing": Case("plot_loss", "--output out.png", 1, "events.jsonl"),
    "input-empty": preprocess("", "--json-keys", writes(in__jsonl=""), TEXT.replace("in.txt", "in.jsonl")),
    "key-missing": preprocess("--json-keys body", "--json-keys", writes(in__txt="1 2\n")),
    "tokenizer-not-cached": preprocess(
        "",
        "org/name",
        writes(in__txt="1 2\n"),
        "--input in.txt --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/name "
        f"--tokenizer-revision {'0' * 40}",
    ),
    "tokenizer-incomplete": preprocess(
        "",
        "--tokenizer-model",
        writes(in__txt="1 2\n"),
        "--input in.txt --output-prefix out --tokenizer-type SentencePieceTokenizer",
    ),
    "tokenizer-missing": preprocess(
        "",
        "/no/such.model",
        writes(in__txt="1 2\n"),
        "--input in.txt --output-prefix out --tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model",
    ),
    "tokenizer-not-pinned": preprocess(
        "",
        "--tokenizer-revision",
        writes(in__txt="1 2\n"),
        "--input in.txt --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/name",
    ),
    "flag-missing": Case(
        "plan_checkpoint",
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16",
        1,
        "--vocab-size",
    ),
    "workers-not-divisible": Case("plan_checkpoint", "--model micro --world 3 --pp 2", 1, "3 ranks"),
    "text-invalid": preprocess("", "in.jsonl", writes(in__jsonl="{\n"), TEXT.replace("in.txt", "in.jsonl")),
    "tokenizer-unusable": preprocess(
        "",
        "--tokenizer-model",
        writes(in__txt="1 2\n", a__model="no model"),
        "--input in.txt --output-prefix out --tokenizer-type SentencePieceTokenizer --tokenizer-model a.model",
    ),
    "vocabulary-size-unsuitable": Case(
        "train_tokenizer",
        "--input in.txt --output out --vocab-size 30000",
        1,
        "--vocab-size",
        writes(in__txt="some words, and some more words\n" * 9),
    ),
    "text-not-trainable": Case(
        "train_tokenizer",
        "--input in.txt --output out --vocab-size 300",
        1,
        "SentencePiece",
        patched(
            "sentencepiece.SentencePieceTrainer.train",
            mock.Mock(side_effect=RuntimeError("INTERNAL")),
            writes(in__txt="some words\n" * 9),
        ),
    ),
    "output-in-use": preprocess("", "out_text_document", being_written),
    # planning
    "cluster-unknown": simulated("--cluster b200", "b200"),
    "stages-exceed-layers": simulated("--pp 16 --ep 1", "layers"),
    "limits-too-strict": simulated("--policy auto --host-memory-gb 1e-9", "memory"),
    "trace-invalid": simulated("--trace trace", "trace", writes(trace="what?\n"), ""),
    "trace-without-losses": simulated("--trace trace", "--trace", writes(trace="0,add,a\n"), ""),
    "sharding-rule-unknown": planned("--experts luck", "luck", flags=PLANNED),
    "routing-unreadable": planned("--routing /no.npz", "--routing"),
    "routing-malformed": planned("--routing loads.npz", "--routing", routing(other=numpy.zeros(1))),
    "repository-missing": simulated("--reproduce moevement-fig1", "--reproduce"),
    # reports
    "permission-denied": simulated("--csv /sys/x.csv", "/sys"),
    "system-call-failed": Case("report", "events.jsonl/x", 1, "events.jsonl", reported(START)),
    "file-missing": Case("report", "in", 1, "in"),
    "events-invalid": Case("report", "events.jsonl", 1, "events.jsonl", writes(events__jsonl="no event\n")),
    "events-newer": Case("report", "events.jsonl", 1, "events.jsonl", reported(START | {"schema": 99})),
    "run-too-short": Case("report", "events.jsonl", 1, "events.jsonl", reported(START)),
    "file-refused": Case("report", "events.jsonl", 1, "events.jsonl", lambda root: os.mkfifo(root / "events.jsonl")),
}


def other_model(root: Path) -> None:
    """Writes flags of a model with another width."""
    from tests.unit.pretraining.convert.test_hugging_face import RUN, SIZES

    (root / "run.json").write_text(json.dumps(RUN | SIZES | {"ffn_hidden_size": 41}))
