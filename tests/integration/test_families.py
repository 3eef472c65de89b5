"""transformers understands the configurations that we write, we those that it writes, and both compute the same."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.pretraining.entry import cpu

cpu.install()  # comes before megatron.core
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron.pretraining.convert.hugging_face.families import FAMILIES, family_of  # noqa: E402
from megatron.pretraining.convert.hugging_face.family import (  # noqa: E402
    FULL_WIDTH,
    Family,
    described_model,
)
from megatron.pretraining.convert.hugging_face.megatron_logits import built  # noqa: E402
from megatron.pretraining.convert.hugging_face.model_record import as_options, recipe, run_configuration  # noqa: E402
from megatron.pretraining.entry.offline import config_of_words  # noqa: E402
from megatron.pretraining.model.parameters import unpartitioned_buffers, unpartitioned_parameters  # noqa: E402
from tests.cases import each_row  # noqa: E402

# not importorskip: transformers is imported by a process of its own
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed; see the extra [hf]"
)

RUN = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=200,
           seq_length=32)  # fmt: skip
SIZES = dict(num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, group_query_attention=True,
             num_query_groups=2, max_position_embeddings=48, position_embedding_type="rope", normalization="RMSNorm",
             norm_epsilon=1e-6, swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True,
             num_experts=8, moe_ffn_hidden_size=48, moe_router_topk=4)  # fmt: skip
SHARED = dict(moe_shared_expert_intermediate_size=96)
GATED = SHARED | dict(moe_shared_expert_gate=True)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")
CASES = {  # family, flags, and weights that are zeros since only the family has them
    "mixtral": ("mixtral", dict(ffn_hidden_size=48, rotary_base=1000000), ()),
    "tied": ("mixtral", dict(ffn_hidden_size=48, kv_channels=32, untie_embeddings_and_output_weights=False), ()),
    "qwen2_moe": (
        "qwen2_moe", GATED | dict(add_qkv_bias=True, moe_router_pre_softmax=True, moe_layer_freq=[0, 1, 1]), ()
    ),
    "no gate": ("qwen2_moe", SHARED, ("shared_expert_gate",)),
    "no shared experts": ("qwen2_moe", dict(add_qkv_bias=True), ("shared_expert",)),
    "qwen3_moe": ("qwen3_moe", dict(qk_layernorm=True, kv_channels=32, moe_layer_freq=[1, 0, 1]), ()),
    "olmoe": (
        "olmoe",
        dict(ffn_hidden_size=48, qk_layernorm=True, spec=FULL_WIDTH, moe_router_pre_softmax=True),
        (),
    ),
    "glm4_moe": (
        "glm4_moe",
        SIGMOID | SHARED | dict(
            add_qkv_bias=True, qk_layernorm=True, rotary_percent=0.5, moe_layer_freq=[0, 1, 1],
            moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
        ),
        (),
    ),
    "one sigmoid": ("glm4_moe", SIGMOID | SHARED | dict(moe_router_topk=1), ()),
    "no bias": (
        "glm4_moe", SIGMOID | dict(moe_router_enable_expert_bias=False), ("shared_experts", "e_score_correction_bias")
    ),
}  # fmt: skip


def model_of(name: str) -> dict:
    return SIZES | {"vocab_size": 200} | CASES[name][1]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A directory with what transformers makes of each case."""
    root = tmp_path_factory.mktemp("theirs")
    torch.save(torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(3)), root / "tokens.pt")
    for name, (family, _, zeros) in CASES.items():
        (root / name).mkdir()
        config = FAMILIES[family].config_of(model_of(name))
        (root / name / "config.json").write_text(json.dumps(config))
        (root / name / "zeros.json").write_text(json.dumps(zeros))
    program = Path(__file__).with_name("models_of_transformers.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program, root], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return root


@each_row("name", CASES)
def test_transformers_reads_our_configuration(name, theirs):
    written, understood = (json.loads((theirs / name / file).read_text()) for file in ("config.json", "read.json"))
    understood.setdefault("num_experts", understood.get("num_local_experts"))  # it renames that of Qwen3-MoE
    for key in written.keys() - {"rope_theta", "partial_rotary_factor"}:  # it has them in rope_parameters alone
        assert understood[key] == written[key], key


@each_row("name", CASES)
def test_configuration_of_transformers_is_read(name, theirs):
    saved = json.loads((theirs / name / "saved/config.json").read_text())
    ours = json.loads((theirs / name / "config.json").read_text())
    family = family_of(saved)
    assert family.name == CASES[name][0] and saved["architectures"] == [family.architecture]
    assert family.flags_of(saved) == family.flags_of(ours)


@each_row("name", FAMILIES)
def test_default_configuration_survives_round_trip(name, theirs, tmp_path):
    config = json.loads((theirs / name / "default/config.json").read_text())
    flags = FAMILIES[name].flags_of(config)
    file = tmp_path / "model.yaml"
    options = recipe(flags, "fp32", dict(tokenizer_type="NullTokenizer", vocab_size=flags["vocab_size"]))
    file.write_text(json.dumps(RUN | options))
    args = config_of_words(["--config", str(file)]).arguments
    assert (args.num_layers, args.moe_router_topk, args.attention_dropout) == (2, 2, 0)
    assert as_options(vars(args)) == as_options(flags)
    assert FAMILIES[name].flags_of(FAMILIES[name].config_of(vars(args))) == flags


@pytest.fixture
def build():
    """Builds a real model as its only worker would."""

    def build(model):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return built(run_configuration(model, 32), 256).eval()

    yield build
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_logits_match_transformers(name, theirs, build):
    config, family = described_model(model_of(name)), FAMILIES[CASES[name][0]]
    model, there = build(model_of(name)), _Taken(load_file(theirs / name / "saved/model.safetensors"))
    with torch.no_grad():
        for pieces in (unpartitioned_parameters(model) | unpartitioned_buffers(model)).values():
            for piece in pieces:
                values = weight(piece.name, there, family, config)
                piece.view.view(piece.region.shape)[: len(values)].copy_(values)
        tokens, wanted = torch.load(theirs / "tokens.pt"), torch.load(theirs / name / "logits.pt")
        positions, later = torch.arange(32)[None].expand(2, -1), torch.ones(32, 32, dtype=torch.bool).triu(1)
        found = model(tokens, positions, later[None, None])[..., :200]
    left = {one for one in there if one not in there.taken and not any(part in one for part in CASES[name][2])}
    assert not left
    assert wanted.abs().max() > 0.5  # far more than what may differ
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


class _Taken(dict):
    """Tensors, and the names of those that were asked for."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.taken = set()

    def __getitem__(self, name):
        self.taken.add(name)
        return super().__getitem__(name)


def weight(name: str, there: _Taken, family: Family, config) -> torch.Tensor:
    """The value of one of our tensors: the names of transformers written down once more, not those of the converter."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in whole:
        return there[whole[name]]
    numbers = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    assert numbers, name
    layer, rest = f"model.layers.{numbers[1]}", numbers[2]
    if kind := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
        return _together(there, f"{layer}.self_attn", kind[1], config)
    mixtral = family.name == "mixtral"
    halves = dict(w="w1", v="w3", down="w2") if mixtral else dict(w="gate_proj", v="up_proj", down="down_proj")
    moe = "block_sparse_moe" if mixtral else "mlp"
    shared = "shared_expert" if family.name == "qwen2_moe" else "shared_experts"
    for pattern, into in (
        (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
        (r"(?:mlp\.linear_fc1\.layer_norm_weight|pre_mlp_layernorm\.weight)", "post_attention_layernorm.weight"),
        (r"self_attention\.linear_proj\.weight", "self_attn.o_proj.weight"),
        (r"self_attention\.([qk])_layernorm\.weight", r"self_attn.\1_norm.weight"),
        (r"mlp\.router\.weight", f"{moe}.gate.weight"),
        (r"mlp\.router\.expert_bias", "mlp.gate.e_score_correction_bias"),
        (r"mlp\.shared_experts\.gate_weight", "mlp.shared_expert_gate.weight"),
        (r"mlp\.shared_experts\.linear_fc1\.weight_([wv])", rf"mlp.{shared}.{{\1}}.weight"),
        (r"mlp\.shared_experts\.linear_fc2\.weight", rf"mlp.{shared}.{{down}}.weight"),
        (r"mlp\.experts\.experts\.(\d+)\.linear_fc1\.weight_([wv])", rf"{moe}.experts.\1.{{\2}}.weight"),
        (r"mlp\.experts\.experts\.(\d+)\.linear_fc2\.weight", rf"{moe}.experts.\1.{{down}}.weight"),
        (r"mlp\.linear_fc1\.weight_([wv])", r"mlp.{\1}.weight"),
        (r"mlp\.linear_fc2\.weight", r"mlp.{down}.weight"),
    ):
        if found := re.fullmatch(pattern, rest):
            values = there[f"{layer}.{found.expand(into).format(**halves)}"]
            ungated = "shared_experts.linear_fc2" in rest and not config.moe_shared_expert_gate
            return values / family.ungated_down if ungated else values
    raise AssertionError(name)


def _together(there: _Taken, attention: str, kind: str, config) -> torch.Tensor:
    """Queries, keys and values, by group of heads."""
    groups, width = config.num_query_groups, config.kv_channels
    parts = [there[f"{attention}.{one}_proj.{kind}"] for one in "qkv"]
    return torch.cat([part.view(groups, -1, width, *part.shape[1:]) for part in parts], 1).flatten(0, 2)
