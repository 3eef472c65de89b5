"""Scripts of Megatron-LM under mocrun: the same losses after kills, and the same bits as Megatron-LM's own loop."""

from __future__ import annotations

import gzip
import json
from importlib.util import find_spec

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
import transformers

from moc.errors import codes_in
from moc.store.store import Store, storage_at
from tests.integration.entry_jobs import (
    BASE,
    EP2,
    FULL,
    MOE,
    OWN_PROGRAM,
    SCRIPTS,
    USER_SCRIPT,
    ZERO1,
    logged,
    needs_scripts,
    run,
    run_stock_loop,
)
from tests.shared import ALL

pytestmark = pytest.mark.recovery

MLA = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
PP2 = "--pipeline-model-parallel-size 2"
STOCK_CASES = {
    "MLA MTP bf16": (f"{EP2} {ZERO1} {MLA} --v-head-dim 16 --mtp-num-layers 1 --bf16", FULL),
    "TP2 SP": (f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel", FULL),
    "CP2": (f"{MOE} {ZERO1} --context-parallel-size 2 --calculate-per-token-loss", FULL),
    "sparse": (f"{MOE} {PP2}", "--ckpt-policy sparse --sparse-window 2 --upstream-logging"),
    "gradient": (f"{EP2} {ZERO1}", "--ckpt-policy gradient --gradient-window 2"),
}
MORE_STOCK_CASES = {
    "interleaved": (f"{MOE} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1", FULL),
    "dense ZeRO-1": (ZERO1, FULL),
    "EP2": (EP2, FULL),
    "EP2 ZeRO-1": (f"{EP2} {ZERO1}", FULL),
    "EP2 bf16": (f"{EP2} --bf16", FULL),
    "overlapped": (f"{EP2} --bf16 --micro-batch-size 1 --overlap-moe-expert-parallel-comm", FULL),
    "MLA": (f"{EP2} {ZERO1} {MLA} --v-head-dim 16", FULL),
    "MTP": (f"{EP2} {ZERO1} --mtp-num-layers 1", FULL),
    "PP2": (f"{MOE} {PP2}", FULL),
}
USER_CASES = {
    "EP2 ZeRO-1": (f"{EP2} {ZERO1} --user-gate", f"{FULL} --async-save"),
    "PP2": (f"{MOE} {PP2} --user-gate", FULL),
}


KILL_ONE = "kill rank=1 iteration=5 point=forward_backward"
KILL_ALL = "kill ranks=0,1 iteration=7"


def tensors(checkpoint) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in torch_dist format, weights and optimizer state."""
    reader = dcp.FileSystemReader(str(checkpoint))
    described = reader.read_metadata().state_dict_metadata.items()
    found = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in described if hasattr(one, "size")}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def differing(one, other) -> list[str]:
    """The names of tensors that two checkpoints do not have in the same bits."""
    mine, theirs = tensors(one), tensors(other)
    return [key for key in sorted({*mine, *theirs}) if not torch.equal(mine.get(key, NONE), theirs.get(key, NONE))]


NONE = torch.empty(0)


def recovers(directory, script, flags, policy, *more, base=BASE):
    """Compares a job that loses a worker and later all of them with Megatron-LM's loop without a fault."""
    save = "--save saved --save-interval 4"
    code, output = run_stock_loop(directory / "stock", script, 2, f"{flags} {save}", *more, base=base)
    assert code == 0, output[-4000:]
    stock = dict(logged(output))
    assert len(stock) >= 7

    snapshots = f"{policy} --ckpt-tier memory --ckpt-dir snapshots"
    faults = "--inject", KILL_ONE, KILL_ALL
    ours = run(directory / "ours", script, 2, f"{flags} {save} {snapshots}", *faults, *more, base=base)
    assert ours.code == 0, ours.output[-4000:]
    printed = logged(ours.output)
    assert {iteration for iteration, _ in printed} == stock.keys()
    for iteration, values in printed:  # means are computed in other precisions, which shows in their last digit
        assert values == pytest.approx(stock[iteration], rel=2e-6), iteration
    assert len(ours.resumed_at()) == 2 and not ours.lost_snapshots(), ours.events
    for checkpoint in sorted((directory / "stock/saved").glob("iter_*")):
        assert not differing(checkpoint, directory / "ours/saved" / checkpoint.name)


TIED = BASE.replace("--untie-embeddings-and-output-weights", "")
SAMPLES = (
    BASE.replace("--train-iters 8", "--train-samples 56")
    .replace("--lr-warmup-iters 2", "--lr-warmup-samples 16")
    .replace("--lr-decay-iters 8", "--lr-decay-samples 56")
)


def test_run_with_growing_batch_size_recovers(tmp_path):
    """The size is a function of the position: 4 samples, and 8 from 512 tokens on, where the killed iteration is."""
    batches = "--micro-batch-size 2 --step-batch-size-schedule 0:4,512:8"
    base = SAMPLES.replace("--micro-batch-size 4 --global-batch-size 8", batches)
    recovers(tmp_path, USER_SCRIPT, f"{EP2} {ZERO1}", FULL, base=base)


MUON = "--optimizer muon --bf16"
DIST_MUON = "--optimizer dist_muon --bf16"
"""Muon's parameters are each on one of the data-parallel workers; the others have Adam, with ZeRO-1."""
needs_muon = pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed")
OPTIMIZERS = {
    "dist_muon": DIST_MUON,
    "muon": MUON,
    "muon fp32": "--optimizer muon",
    "dist_muon, gathered by itself": f"{DIST_MUON} --no-use-layer-wise-param-layout",
    "lion": "--optimizer lion --bf16",
    "sgd": "--optimizer sgd",
    "fp16": f"{ZERO1} --fp16 --initial-loss-scale 65536",  # without overflows, whose scale differs: see the how-to
}


@needs_muon
@pytest.mark.parametrize("case", ["dist_muon", *ALL * [case for case in OPTIMIZERS if case != "dist_muon"]])
def test_optimizer_with_other_state_recovers(case, tmp_path):
    recovers(tmp_path, USER_SCRIPT, f"{EP2} {OPTIMIZERS[case]}", FULL)


OFFLOADED = f"{EP2} {ZERO1} --bf16 --use-precision-aware-optimizer --optimizer-cpu-offload"


def test_optimizer_in_host_memory_recovers_and_resumes(tmp_path):
    """Megatron-LM's own loop cannot run it without CUDA."""
    flags, snapshots = f"{OFFLOADED} --save saved", f"{FULL} --ckpt-tier memory --ckpt-dir snapshots"
    plain = run(tmp_path / "plain", OWN_PROGRAM, 2, f"{flags} --save-interval 4")
    assert plain.code == 0, plain.output[-4000:]
    killed = run(tmp_path / "killed", OWN_PROGRAM, 2, f"{flags} {snapshots}", "--inject", KILL_ONE, KILL_ALL)
    assert killed.code == 0 and len(killed.resumed_at()) == 2 and not killed.lost_snapshots(), killed.output[-4000:]
    assert killed.losses == plain.losses
    loads = f"{OFFLOADED} --load {tmp_path / 'plain/saved'} --ckpt-step 4"
    resumed = run(tmp_path / "resumed", OWN_PROGRAM, 2, loads)
    assert resumed.code == 0, resumed.output[-4000:]
    assert resumed.losses == {iteration: values for iteration, values in plain.losses.items() if iteration > 4}


@pytest.mark.parametrize("policy", ["gradient", "selective --selective-gradients on"])
def test_optimizer_in_host_memory_refuses_saved_gradients(policy, tmp_path):
    snapshots = f"--ckpt-policy {policy} --ckpt-tier memory --ckpt-dir snapshots"
    refused = run(tmp_path, OWN_PROGRAM, 2, f"{OFFLOADED} {snapshots}")
    assert refused.code == 2 and codes_in(refused.output) == ["gradients-need-adam"], refused.output


@pytest.mark.skipif(not ALL, reason="MOC_TESTS_ALL=1 recovers from iterations with overflows")
def test_skipped_iterations_recover(tmp_path):
    """The loss scale grows until gradients overflow."""
    flags = f"{EP2} {ZERO1} --fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2"
    whole = run(tmp_path / "whole", USER_SCRIPT, 2, flags)
    assert whole.code == 0 and 1 <= whole.output.count("skipped iterations:   1"), whole.output[-4000:]
    snapshots = f"{FULL} --ckpt-tier memory --ckpt-dir snapshots"
    killed = run(tmp_path / "killed", USER_SCRIPT, 2, f"{flags} {snapshots}", "--inject", KILL_ONE, KILL_ALL)
    assert killed.code == 0 and killed.losses == whole.losses, killed.output[-4000:]


@needs_muon
def test_optimizer_with_unpartitioned_state_is_refused(tmp_path):
    ended = run(tmp_path, USER_SCRIPT, 2, f"{EP2} --optimizer soap {FULL} --ckpt-dir snapshots")
    assert ended.code != 0 and "[optimizer-unsupported]" in ended.output, ended.output[-4000:]
    assert not ended.losses and "Traceback" not in ended.output


def hugging_face_directory(directory) -> str:
    """Writes a directory of transformers with a tokenizer; returns its option."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["to be or not to be"], vocab_size=300, special_tokens=["<|endoftext|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(str(directory))
    return f"--tokenizer-model {directory}"


@needs_scripts
def test_run_with_data_blend_and_hf_tokenizer_recovers(data, tmp_path):
    (prefix,) = data["data_path"]
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer {hugging_face_directory(tmp_path / 'files')}"
    blend = f"--data-path 0.3 {prefix} 0.7 {prefix} --split 90,5,5 {tokenizer}"
    base = BASE.replace("--mock-data", "").replace("--tokenizer-type NullTokenizer", "").replace("--vocab-size 256", "")
    recovers(tmp_path, SCRIPTS / "pretrain_gpt.py", f"{EP2} {ZERO1} {blend}", FULL, base=base)


@pytest.mark.parametrize("case", USER_CASES if ALL else ["EP2 ZeRO-1"])
def test_user_script_recovers(case, tmp_path):
    recovers(tmp_path, USER_SCRIPT, *USER_CASES[case])


def test_partial_checkpoints_lose_predicted_tokens(tmp_path):
    """Each expert is as old as its last snapshot; its tokens since then are lost (PEC, section 3.2)."""
    flags = f"{EP2} {ZERO1} --ckpt-policy pec --pec-k 1 --snapshot-interval 1 --ckpt-dir snapshots"
    whole = run(tmp_path / "whole", USER_SCRIPT, 2, f"{flags} --ckpt-keep 20")
    assert whole.code == 0, whole.output[-4000:]
    one = run(tmp_path / "one", USER_SCRIPT, 2, f"{flags} --ckpt-tier memory", "--inject", KILL_ONE)
    assert one.code == 0 and not one.lost_snapshots(), one.output[-4000:]
    (resumed,), (told,) = one.of("resume"), one.of("lost")
    newest = resumed["iteration"]
    assert [one.losses[i] for i in range(1, newest + 1)] == [whole.losses[i] for i in range(1, newest + 1)]
    assert one.losses[8] != whole.losses[8]

    store = Store(storage_at(str(tmp_path / "whole/snapshots")))
    manifests = {iteration: store.read_manifest(iteration) for iteration in range(1, newest + 1)}
    given = {iteration: manifest.state["ledger"]["given"] for iteration, manifest in manifests.items()}
    saved = {}
    for iteration, manifest in manifests.items():
        saved |= {name: iteration for name in manifest.operators if ".expert." in name}
    lost = {}
    for layer, loads in enumerate(given[newest]):
        kept = [given[saved[f"layers.{layer}.expert.{expert}"]][layer][expert] for expert in range(len(loads))]
        lost[str(layer)] = (sum(loads) - sum(kept)) / sum(loads)
    assert resumed["stale"] == sum(iteration < newest for iteration in saved.values())
    assert told["by_layer"] == pytest.approx(lost)


@needs_scripts
@pytest.mark.parametrize("case", [*STOCK_CASES, *ALL * [*MORE_STOCK_CASES]])
def test_pretrain_gpt_recovers(case, tmp_path):
    recovers(tmp_path, SCRIPTS / "pretrain_gpt.py", *(STOCK_CASES | MORE_STOCK_CASES)[case])


@needs_scripts
@pytest.mark.parametrize("flags", [f"{MOE} {PP2}", *ALL * [f"{EP2} {ZERO1}"]])
def test_tied_embeddings_recover(flags, tmp_path):
    recovers(tmp_path, SCRIPTS / "pretrain_gpt.py", flags, FULL, base=TIED)


def test_exact_initialisation_refuses_foreign_layers(tmp_path):
    ended = run(tmp_path, USER_SCRIPT, 1, f"{MOE} --user-gate --initialization exact")
    assert ended.code and "initialization-unsupported" in codes_in(ended.output) and "gate.strength" in ended.output


def test_evaluation_plot_data_is_read_beyond_batches(tmp_path):
    flags = f"{MOE} --tensorboard-dir board"
    plain = run(tmp_path / "plain", USER_SCRIPT, 1, flags)
    plots = run(tmp_path / "plots", USER_SCRIPT, 1, f"{flags} --user-plot")
    assert plots.code == 0 and plots.output.count("plotted 2 maxima") == 4, plots.output[-3000:]
    evaluated, expected = ([one["loss"] for one in ended.of("evaluation")] for ended in (plots, plain))
    assert plots.losses == plain.losses and evaluated == expected


def test_each_loop_continues_checkpoint_of_other_loop(tmp_path):
    flags = f"{EP2} --save saved --save-interval 4"
    code, output = run_stock_loop(tmp_path / "stock", USER_SCRIPT, 2, flags)
    assert code == 0, output[-4000:]
    whole = tmp_path / "stock/saved/iter_0000008"
    four = f"{flags} --exit-interval 4"

    code, output = run_stock_loop(tmp_path / "theirs", USER_SCRIPT, 2, four)
    assert code == 0, output[-4000:]
    ended = run(tmp_path / "theirs", USER_SCRIPT, 2, f"{flags} --load saved")
    assert ended.code == 0 and min(ended.losses) == 5, ended.output[-4000:]
    assert not differing(whole, tmp_path / "theirs/saved/iter_0000008")

    ended = run(tmp_path / "ours", USER_SCRIPT, 2, four)
    assert ended.code == 0, ended.output[-4000:]
    code, output = run_stock_loop(tmp_path / "ours", USER_SCRIPT, 2, f"{flags} --load saved")
    assert code == 0, output[-4000:]
    assert not differing(whole, tmp_path / "ours/saved/iter_0000008")


def test_entry_point_can_be_disabled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import megatron.training as t\nprint('loop of', t.pretrain.__module__)\n")
    ours = run(tmp_path / "ours", script, 1, "")
    assert "loop of megatron.pretraining.entry.pretrain" in ours.output and ours.code == 0
    assert "--no-megatron" in ours.output  # it never calls pretrain()
    disabled = run(tmp_path / "disabled", script, 1, "", launcher="--no-megatron", cold=True)
    assert "megatron.pretraining.entry" not in disabled.output and "--no-megatron" not in disabled.output


def test_replaced_worker_logs_in_same_iterations(tmp_path):
    """Megatron-LM's log is a collective call in iterations that it prints: the first one of a launch, and the third."""
    profile = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --tensorboard-dir board/x"
    flags = f"{EP2} {FULL} --ckpt-tier memory --ckpt-dir snapshots --log-interval 3 {profile}"
    ended = run(tmp_path, USER_SCRIPT, 2, flags, "--inject", KILL_ONE)
    assert ended.code == 0, ended.output[-4000:]
    assert [iteration for iteration, _ in logged(ended.output)] == [1, 3, 6] and len(ended.of("generation")) == 1
    with gzip.open(tmp_path / "board/torch_profile/rank-0.json.gz") as file:
        assert json.load(file)["traceEvents"]
