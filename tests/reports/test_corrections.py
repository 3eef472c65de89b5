"""Losses, gradient norms and expert biases are the same in every layout, and exact in 16 bits (``--correct``)."""

import itertools
import random
import shutil
import subprocess
import sys

import pytest

from megatron.pretraining.convert import program
from tests.integration.entry_jobs import EP2, MOE, OWN_PROGRAM, USER_SCRIPT, run
from tests.integration.snapshot_files import node_memory
from tests.integration.test_hugging_face import needs_transformers
from tests.integration.tiny import EXPERT_BIAS, FLAGS, LAYOUTS, Trained
from tests.shared import ALL, once
from tests.worlds import WorldFailed, run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLOSE = 1e-5
ITERATIONS = 3
LOSSES = {
    "aux": dict(moe_aux_loss_coeff=1.0),
    "seq": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1.0),
    "global": dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0),
    "z": dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=1.0),
    "bias": EXPERT_BIAS | dict(moe_aux_loss_coeff=0.0),
}
MEANS = {"micro batch": {}, "token": dict(calculate_per_token_loss=True)}
PRECISIONS = {
    "fp32": ({}, CLOSE),
    "bf16": (dict(bf16=True), 0.01),
    "fp16": (dict(fp16=True, initial_loss_scale=1024), 0.002),
}
POLICIES = {
    "none": {},
    "full": dict(ckpt_policy="full", snapshot_interval=2),
    "pec": dict(ckpt_policy="pec", pec_k=1),
    "selective": dict(ckpt_policy="selective"),
    "sparse": dict(ckpt_policy="sparse", sparse_window=2),
    "gradient": dict(ckpt_policy="gradient", gradient_window=2, ckpt_tier="memory"),
}
SAMPLES = 4
BASE = dict(mock_data=True, train_iters=ITERATIONS, global_batch_size=SAMPLES)


def is_valid(case: tuple) -> bool:
    """Whether no combination is refused: ``--elastic`` needs losses that do not depend on the number of workers."""
    loss, mean, _, layout, policy = case
    return layout != "elastic" or (loss != "global" and mean == "token" and policy != "gradient")


def pairwise(cases: list[tuple]) -> list[tuple]:
    """Cases in which each pair of values of two factors occurs that occurs at all, by the greedy method."""
    cases, chosen = [*cases], []
    random.Random(0).shuffle(cases)

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


ELASTIC = dict(elastic=True, elastic_slots=3, use_distributed_optimizer=False)
GRID = {layout: LAYOUTS[layout] for layout in ("1", "DP4", "TP2", "EP2", "PP2", "TP2xEP2")} | {"elastic": (2, ELASTIC)}
VALID = [*filter(is_valid, itertools.product(LOSSES, MEANS, PRECISIONS, GRID, POLICIES))]
CASES = VALID if ALL else pairwise(VALID)


def trained(layout: str, flags: dict, copies: int = 1) -> Trained:
    """Trains with micro batches that make one round over all copies of the model."""
    if flags.get("moe_router_load_balancing_type") == "global_aux_loss":  # its mean grows with each micro batch
        flags = flags | dict(micro_batch_size=SAMPLES // copies, eval_micro_batch_size=1)
    size, parallel = GRID[layout]
    return Trained(run_world(size, "tests.integration.bodies:train", flags=FLAGS | parallel | flags))


@pytest.mark.parametrize(("loss", "mean", "precision", "layout", "policy"), CASES)
def test_results_match_one_worker(loss, mean, precision, layout, policy, tmp_path):
    bits, close = PRECISIONS[precision]
    flags = BASE | LOSSES[loss] | MEANS[mean] | bits
    workers, parallel = GRID[layout]
    copies = workers // parallel.get("tensor_model_parallel_size", parallel.get("pipeline_model_parallel_size", 1))
    one = Trained(once(["corrections", flags], lambda: trained("1", flags).workers))
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path)) if policy != "none" else {}
        places |= dict(ckpt_memory_dir=memory) if policy == "gradient" else {}
        several = trained(layout, flags | POLICIES[policy] | places, copies)
    assert len(several.losses) == ITERATIONS
    assert several.losses == pytest.approx(one.losses, abs=close)
    assert several.norms == pytest.approx(one.norms, rel=close)
    for here, there in zip(several.records, one.records, strict=True):
        assert here["auxiliary"] == pytest.approx(there["auxiliary"], abs=close)


COUNTED = {  # name: flags, tokens of an iteration
    "fp32": {},
    "bf16": dict(bf16=True),
    "fp16": dict(fp16=True, initial_loss_scale=1024),
}


@pytest.mark.parametrize("precision", COUNTED)
def test_biases_follow_exact_counts(precision):
    flags = dict(mock_data=True, train_iters=4, seq_length=128, micro_batch_size=32, global_batch_size=512)
    small = dict(hidden_size=16, num_attention_heads=2, ffn_hidden_size=16)
    flags = FLAGS | EXPERT_BIAS | small | flags | dict(moe_aux_loss_coeff=0.0) | COUNTED[precision]
    for steps in run_world(2, "tests.reports.bodies:counting_train", flags=flags):
        assert len(steps) == 8  # of two layers in four iterations
        for counts, signs in steps:
            assert sum(counts) == 2 * 512 * 128  # more than fp16 can hold
            assert signs == [(sum(counts) > n * len(counts)) - (sum(counts) < n * len(counts)) for n in counts]


PADDED = dict(mock_data=True, vocab_size=250, make_vocab_size_divisible_by=28, train_iters=40, lr=1e-2)
FULL = dict(ckpt_policy="full", snapshot_interval=10)
TP4 = dict(tensor_model_parallel_size=4, sequence_parallel=True)


def losses_of(size: int, flags: dict) -> list[tuple]:
    """Loss and gradient norm of each iteration, with 252, 280 or 336 rows of the vocabulary in TP 1, 2 or 4."""
    parallel = {1: {}, 2: LAYOUTS["TP2"][1], 4: TP4}[size]
    records = Trained(
        run_world(size, "tests.integration.bodies:train", flags=FLAGS | PADDED | parallel | flags)
    ).records
    return [(record["loss"], record["grad_norm"]) for record in records]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A directory with a checkpoint and a snapshot of TP 1, and how TP 1 continues from them."""
    root = tmp_path_factory.mktemp("padded")
    saves = dict(save=str(root / "saved"), save_interval=20, ckpt_dir=str(root / "snapshots"))
    losses_of(1, FULL | saves | dict(exit_interval=20))
    return root, losses_of(1, dict(load=str(root / "saved"), exit_interval=22))


def assert_close(losses, wanted):
    assert [*itertools.chain(*losses)] == pytest.approx([*itertools.chain(*wanted)], abs=CLOSE)


@pytest.mark.parametrize("size", [2, 4])
def test_padding_does_not_change_first_iteration(size):
    assert_close(losses_of(size, dict(exit_interval=2)), losses_of(1, dict(exit_interval=2)))


@pytest.mark.parametrize("size", [2, 4])
def test_padding_does_not_change_resumed_run(size, padded, tmp_path):
    root, wanted = padded
    assert len(wanted) == 2
    assert_close(losses_of(size, dict(load=str(root / "saved"), exit_interval=22)), wanted)
    shutil.copytree(root / "snapshots", tmp_path / "snapshots")
    assert_close(losses_of(size, FULL | dict(ckpt_dir=str(tmp_path / "snapshots"), exit_interval=22)), wanted)


def test_other_padding_is_refused_without_correction(padded):
    root, _ = padded
    uncorrected = dict(load=str(root / "saved"), exit_interval=22, correct="expert-counters,global-aux-loss")
    assert len(losses_of(1, uncorrected)) == 2
    with pytest.raises(WorldFailed, match="vocabulary-padding-differs"):
        losses_of(2, uncorrected)


TRANSFORMERS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
losses = []
for tokens, labels in json.load(open(sys.argv[2])):
    logits = model(torch.tensor(tokens)).logits
    losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten()).item())
print(sum(losses) / len(losses))
"""


@needs_transformers
def test_loss_matches_transformers(tmp_path):
    model = dict(num_layers=2, normalization="RMSNorm", max_position_embeddings=16)
    flags = FLAGS | PADDED | model | dict(save=str(tmp_path / "saved"), save_interval=2)
    run_world(1, "tests.integration.bodies:train", flags=flags | dict(exit_interval=2))
    resumed = flags | dict(load=str(tmp_path / "saved"), exit_interval=3)
    [last] = run_world(1, "tests.reports.bodies:train_with_samples", flags=resumed)
    assert program.main([str(tmp_path / "saved"), str(tmp_path / "hf"), "--to", "hf", "--iteration", "2"]) == 0
    (tmp_path / "samples.json").write_text(str(last["samples"]))
    words = [sys.executable, "-c", TRANSFORMERS, str(tmp_path / "hf"), str(tmp_path / "samples.json")]
    loss = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert last["records"][0]["loss"] == pytest.approx(loss, abs=CLOSE)


def test_script_gets_warnings_and_is_not_changed(tmp_path):
    padding = "--make-vocab-size-divisible-by 48"
    flags = f"{EP2} --moe-router-load-balancing-type global_aux_loss --bf16 --train-iters 2 {padding} --eval-interval 2"
    ended = {name: run(tmp_path / name, USER_SCRIPT, 2, f"{flags} --correct {name}") for name in ("none", "all")}
    default = run(tmp_path / "default", USER_SCRIPT, 2, flags)
    assert default.losses == ended["none"].losses != ended["all"].losses
    assert default.output.count("[result-depends-on-layout]") == 3
    for name in ("expert-counters", "global-aux-loss", "vocabulary-padding"):
        assert f"--correct {name}," in default.output
    assert "[result-depends-on-layout]" not in ended["all"].output
    splits = {name: [event["split"] for event in one.of("evaluation")] for name, one in ended.items()}
    assert splits == {"none": ["valid", "valid", "test"], "all": ["valid", "test"]}
    assert default.output.count("[loss-reported-twice]") == 1
    assert not any("[loss-reported-twice]" in one.output for one in ended.values())


def test_layout_dependent_capacity_limits_warn(tmp_path):
    """No correction exists: each tensor-parallel worker limits the tokens that it routes."""
    tp2 = f"{MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel"
    for name, flags, warnings in (("tp", tp2, 1), ("ep", EP2, 0)):
        ended = run(tmp_path / name, OWN_PROGRAM, 2, f"{flags} --moe-expert-capacity-factor 1.0 --train-iters 1")
        assert ended.code == 0 and ended.output.count("[result-depends-on-layout]") == warnings, ended.output[-3000:]


def test_unknown_corrections_are_refused(tmp_path):
    ended = run(tmp_path, OWN_PROGRAM, 1, "--correct all,magic")
    assert ended.code == 2 and "[value-unreadable]" in ended.output


def test_sign_is_exact_despite_fp32_rounding():
    counts = [2**19 - 1] * 64
    counts[0] += 1
    assert sum(counts) > 2**24
    [[exact, rounded]] = run_world(1, "tests.reports.bodies:signs_of_steps", counts=counts)
    assert exact == [-1] + [1] * 63 != rounded


def test_load_of_experts_is_reported(tmp_path):
    flags = f"{MOE} --pipeline-model-parallel-size {{}} --log-interval 2 --train-iters 4 --eval-iters 0"
    flags += " --moe-expert-capacity-factor 0.5 --tensorboard-dir board"
    one, two = (run(tmp_path / str(size), OWN_PROGRAM, size, flags.format(size)) for size in (1, 2))
    for event, other in zip(one.of("iteration"), two.of("iteration"), strict=True):
        assert ("max_violation" in event) == (event["iteration"] % 2 == 0)
        if "max_violation" not in event:
            continue
        violations, dropped = event["max_violation_by_layer"], event["dropped_share_by_layer"]
        assert violations.keys() == dropped.keys() == {"0", "1"}
        assert event["max_violation"] == max(violations.values()) >= 0
        assert min(dropped.values()) >= 0.5  # an expert receives at most half of the mean
        assert violations == pytest.approx(other["max_violation_by_layer"], abs=0.05)
        assert event["dropped_share"] == pytest.approx(other["dropped_share"], abs=0.02)
    assert two.output.count("maximum violation of experts") == 2
    boards = b"".join(path.read_bytes() for path in (tmp_path / "2/board").iterdir())
    assert b"max_violation/layer_1" in boards and b"dropped_share/layer_0" in boards


def test_load_uses_exact_counts():
    flags = dict(mock_data=True, train_iters=2, log_interval=2, global_batch_size=4)
    counts, reported = run_world(1, "tests.reports.bodies:counting_loads", flags=FLAGS | flags)[0]
    assert [sum(row) for row in counts] == [2 * 4 * 16 * 2] * 2
    assert reported == pytest.approx([max(row) * len(row) / sum(row) - 1 for row in counts])
