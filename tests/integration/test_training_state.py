"""The training state: every element is held once, comes back byte by byte, and stands still when it is frozen."""

from pathlib import Path

import pytest
import torch

from moc.state.operators import Region
from moc.store.shard_file import ShardReader
from tests.cases import each_row
from tests.integration.tiny import DEEP, EXPERT_BIAS, FLAGS, LAYOUTS
from tests.worlds import run_world

BODIES = "tests.integration.state_bodies"
SMALL = DEEP | dict(train_iters=5, lr_warmup_iters=0, lr_decay_style="constant", clip_grad=0.1)
SMALL |= dict(log_num_zeros_in_grad=True)
FP16, BF16 = dict(fp16=True, loss_scale=128.0), dict(bf16=True)
REPLICATED = dict(use_distributed_optimizer=False)
ZERO2 = REPLICATED | dict(deepspeed=True, zero_stage=2)

SAVED = {
    "fp32": ("PP2xEP2", EXPERT_BIAS),
    "bf16 biases": ("PP2xEP2", BF16 | EXPERT_BIAS),
    "fp16 replicated": ("PP2xEP2", FP16 | REPLICATED),
    "fp16 tensor parallel": ("TP2xEP2", FP16),
    "bf16 interleaved": ("interleaved", BF16),
    "bf16 DeepSpeed": ("EP2", BF16 | EXPERT_BIAS | ZERO2),
}
SLOTS = {
    "FULL": {"master", "exp_avg", "exp_avg_sq"},
    "MASTER": {"master"},
    "MOMENTS": {"exp_avg", "exp_avg_sq"},
    "COMPUTE": {"param"},
    "GRAD": {"grad"},
}
ELSEWHERE = {
    "fp32": ("1", EXPERT_BIAS),
    "bf16 biases": ("TP2", BF16 | EXPERT_BIAS),
    "fp16 tensor parallel": ("DP2", FP16),
    "bf16 DeepSpeed": ("PP2", BF16 | EXPERT_BIAS),
}


def run(layout: str, body: str, data: dict, flags: dict, **arguments):
    """What each worker of the small model's world returned."""
    size, parallel = LAYOUTS[layout]
    return run_world(size, f"{BODIES}:{body}", flags=FLAGS | SMALL | parallel | data | flags, **arguments)


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Makes a world that trains, saves and loads, once for each name; where it saved, and what its workers told."""
    done = {}

    def once(name: str) -> tuple[Path, list[dict]]:
        if name not in done:
            directory = tmp_path_factory.mktemp("split")
            layout, flags = SAVED[name]
            done[name] = (
                directory,
                run(layout, "save_and_reload", data, flags, directory=str(directory), seed=len(done)),
            )
        return done[name]

    return once


@pytest.mark.parametrize("name", SAVED)
def test_saved_state_restores_every_byte_in_any_split(name, saved):
    for worker in saved(name)[1]:
        assert worker["after"] == worker["before"]
        assert worker["fresh"]["digests"].keys() == worker["before"]["digests"].keys()
        assert worker["fresh"] != worker["before"]
        assert set(worker["after"]["steps"].values()) == {2}


@each_row("name", SAVED)
@each_row("detail", SLOTS)
def test_first_copies_cover_every_tensor_once(name, detail, saved):
    counts = covered(worker["boxes"][detail] for worker in saved(name)[1])
    assert all((count == 1).all() for count in counts.values())
    biases = {tensor for _, tensor in counts if tensor.endswith("expert_bias")}
    assert {slot for slot, tensor in counts if tensor not in biases} == SLOTS[detail]
    for slot in SLOTS[detail]:
        assert {tensor for s, tensor in counts if s == slot} - biases == parameters()
    flags = SAVED[name][1]
    assert len(biases) == (4 if flags.items() >= EXPERT_BIAS.items() and detail not in ("GRAD", "MOMENTS") else 0)


def covered(workers) -> dict[tuple[str, str], torch.Tensor]:
    """How often each element of each slot of each tensor is held."""
    counts = {}
    for boxes in workers:
        for slot, name, shape, offset, box in boxes:
            count = counts.setdefault((slot, name), torch.zeros(shape, dtype=torch.int8))
            count[Region(tuple(offset), tuple(box)).slices()] += 1
    return counts


def parameters() -> set[str]:
    """The names of all tensors of the unpartitioned small model."""
    attention, experts = "self_attention.linear_", "mlp.experts.experts."
    inside = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias", "mlp.router.weight"]
    inside += [
        f"{attention}{name}" for name in ("qkv.layer_norm_weight", "qkv.layer_norm_bias", "qkv.weight", "proj.weight")
    ]
    inside += [
        f"{experts}{e}.linear_{name}" for e in range(4) for name in ("fc1.weight_w", "fc1.weight_v", "fc2.weight")
    ]
    outside = {"embedding.word_embeddings.weight", "output_layer.weight"}
    outside |= {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    return outside | {f"decoder.layers.{layer}.{name}" for layer in range(4) for name in inside}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_layout_loads_same_tensors(name, saved, data, tmp_path):
    source, workers = saved(name)
    layout, flags = ELSEWHERE[name]
    run(layout, "load_and_save", data, flags | dict(seed=4321), source=str(source), target=str(tmp_path))
    there, here = (ShardReader(sorted(d.glob("*.safetensors"))) for d in (source, tmp_path))
    tensors = {tuple(box[:2]) for w in workers for detail in ("FULL", "COMPUTE") for box in w["boxes"][detail]}
    for slot, tensor in tensors:
        assert torch.equal(whole(there, tensor, slot), whole(here, tensor, slot)), (slot, tensor)


def whole(reader: ShardReader, name: str, slot: str) -> torch.Tensor:
    """A tensor put together."""
    shape = reader.global_shape(name, slot)
    dtype = torch.float32 if slot != "param" else torch.float64  # which holds all that weights can be
    values = torch.empty(shape, dtype=dtype)
    reader.read_into(name, slot, Region((0,) * len(shape), shape), into=values)
    return values


@pytest.mark.parametrize("flags", [BF16, {}, FP16 | REPLICATED], ids=["zero", "zero in fp32", "replicated"])
def test_compute_weights_of_frozen_operators_stay_as_loaded(flags, data):
    for worker in run("DP2", "load_compute", data, flags):
        assert worker["after"] == worker["loaded"] == worker["expected"]
        assert worker["after_stock_step"] == worker["before_stock_step"]
        assert [" takes " in refused for refused in worker["refused"]] == [True, True]


EXPERTS, ATTENTION = r"layers\.\d+\.expert\.\d+", r"layers\.\d+\.attention"
FROZEN = {
    "experts": ("PP2xEP2", EXPERTS, BF16),
    "some of all": ("PP2xEP2", r"embedding|.*\.1\.(router|mlp)|.*expert\.[03]|output", FP16 | REPLICATED | EXPERT_BIAS),
    "attention": ("TP2xEP2", ATTENTION, {}),
    "embedding, recomputed": ("1", r"embedding|layers\.0\.attention", REPLICATED | dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
    "interleaved": ("interleaved", r"layers\.[02]\..*", FP16),
    "experts, DeepSpeed": ("EP4", f"{EXPERTS}|.*router", BF16 | EXPERT_BIAS | ZERO2 | dict(
        expert_model_parallel_size=2, global_batch_size=8)),
}  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_operators_do_not_change_and_others_train_equally(name, data):
    layout, pattern, flags = FROZEN[name]
    workers = run(layout, "freeze_and_activate", data, flags, pattern=pattern)
    assert any(worker["frozen"] for worker in workers)
    for worker in workers:
        frozen, start, never, frosty = (worker[key] for key in ("frozen", "start", "never", "while"))

        def of(digests: dict, is_frozen: bool, names=frozen) -> dict:
            return {key: value for key, value in digests.items() if (key.split()[0] in names) == is_frozen}

        assert of(frosty["digests"], True) == of(start["digests"], True)
        assert of(frosty["gradients"], False) == of(never["gradients"], False)
        assert all(step == 1 + 2 * (name not in frozen) for name, step in frosty["steps"].items())
        moved = {key for key, value in of(frosty["digests"], False).items() if value != start["digests"][key]}
        assert len(moved) > 0.9 * len(of(start["digests"], False))
        assert worker["again"] == never
        for way in (never, frosty):
            record, (norm, zeros) = way["record"], way["recounted"]
            assert record["grad_norm"] == pytest.approx(norm, rel=1e-6)
            assert record["zeros"] == zeros
        assert frosty["record"]["grad_norm"] < never["record"]["grad_norm"]


def test_frozen_operators_compute_no_weight_gradients(data):
    patterns = ["nothing", EXPERTS, ATTENTION, "output|embedding", ".*"]
    nothing, experts, attention, output, everything = run("1", "count_flops", data, {}, patterns=patterns)[0]
    tokens = FLAGS["global_batch_size"] * FLAGS["seq_length"]
    saved = [nothing["flops"] - frozen["flops"] for frozen in (experts, attention, output)]
    assert saved[0] == 2 * tokens * experts["matrices"] * FLAGS["moe_router_topk"] // FLAGS["num_experts"]
    assert saved[1] == 2 * tokens * attention["matrices"]
    assert saved[2] == 2 * tokens * output["matrices"] // 2  # an embedding is looked up, not multiplied
    assert nothing["flops"] - everything["flops"] == sum(saved)  # the router's few are always multiplied


def test_replay_with_frozen_operators_costs_one_third_less(data):
    larger = dict(hidden_size=128, ffn_hidden_size=256, num_experts=8, seq_length=128, num_layers=2)
    learning = ["layers.0.expert.0", "layers.1.expert.5"]
    told = run("1", "count_flops_of_replay", data, larger, learning=learning)[0]
    assert 0.66 < told["most"] / told["nothing"] <= 0.75  # forward and gradients of inputs are two of three parts


@pytest.mark.parametrize("overlap", ["overlap_grad_reduce", "overlap_param_gather"])
def test_freezing_with_overlapped_communication_is_refused(overlap, data):
    flags = {"overlap_grad_reduce": True} | {overlap: True}
    assert all("turn off --overlap-grad-reduce" in said for said in run("DP2", "freeze_refused", data, flags))
