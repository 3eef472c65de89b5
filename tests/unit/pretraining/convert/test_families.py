"""What models of transformers are in our flags, what ours are in theirs, and what neither can say."""

import json
import math

import pytest

from megatron.pretraining.convert.hugging_face.families import (
    FAMILIES,
    families_for,
    family_for,
    family_named,
    family_of,
)
from megatron.pretraining.convert.hugging_face.family import FULL_WIDTH as FULL_WIDTH_SPEC
from megatron.pretraining.convert.hugging_face.family import described_model
from megatron.pretraining.convert.hugging_face.model_record import as_options, recipe, recorded
from megatron.pretraining.entry.configuration import described as arguments_of
from megatron.pretraining.entry.offline import config_of_words
from moc.store.errors import CheckpointError
from tests.cases import each_row
from tests.errors import raises

RUN = dict(micro_batch_size=1, train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=200,
           seq_length=32, transformer_impl="local")  # fmt: skip
SIZES = dict(num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, group_query_attention=True,
             num_query_groups=2, max_position_embeddings=48, position_embedding_type="rope", normalization="RMSNorm",
             norm_epsilon=1e-6, swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True,
             num_experts=8, moe_ffn_hidden_size=40, moe_router_topk=4, moe_aux_loss_coeff=0.01)  # fmt: skip
QK_NORM, FULL_WIDTH = dict(qk_layernorm=True), dict(qk_layernorm=True, spec=list(FULL_WIDTH_SPEC))
SHARED = dict(moe_shared_expert_intermediate_size=80)
GATED = SHARED | dict(moe_shared_expert_gate=True)
SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32",
               moe_aux_loss_coeff=0.0)  # fmt: skip
MODELS = {  # name: family and flags, which come back as they are
    "mixtral": ("mixtral", dict(ffn_hidden_size=40)),
    "mixtral, wide heads, tied": (
        "mixtral",
        dict(ffn_hidden_size=40, kv_channels=32, untie_embeddings_and_output_weights=False, rotary_base=1000000),
    ),
    "qwen2": ("qwen2_moe", GATED | dict(add_qkv_bias=True, moe_router_pre_softmax=True)),
    "qwen2, no bias, a dense layer, divided": ("qwen2_moe", GATED | dict(moe_layer_freq=[1, 0, 1])),
    "qwen3": ("qwen3_moe", QK_NORM | dict(kv_channels=32)),
    "qwen3, dense layers, as many keys": (
        "qwen3_moe",
        QK_NORM | dict(group_query_attention=False, num_query_groups=4, moe_layer_freq=[0, 0, 1]),
    ),
    "olmoe": ("olmoe", FULL_WIDTH | dict(ffn_hidden_size=40, moe_router_pre_softmax=True)),
    "glm4": ("glm4_moe", SIGMOID | SHARED | dict(add_qkv_bias=True, rotary_percent=0.5, moe_layer_freq=[0, 1, 1])),
    "glm4, groups, scaled": (
        "glm4_moe",
        SIGMOID | SHARED | QK_NORM | dict(
            moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5
        ),
    ),
    "glm4, one expert for a token": ("glm4_moe", SIGMOID | SHARED | dict(moe_router_topk=1)),
}  # fmt: skip


def model_of(**flags) -> dict:
    """A model by its options."""
    return {name: value for name, value in (SIZES | {"vocab_size": 200} | flags).items() if value is not None}


def arguments(options: dict, file) -> dict:
    """Megatron-LM's arguments of a run with these options, as a checkpoint records them."""
    file.write_text(json.dumps(options))  # which is YAML, too
    return arguments_of(config_of_words(["--config", str(file)]).arguments)


@each_row("name", MODELS)
def test_model_flags_round_trip_through_family_config(name, tmp_path):
    family, flags = MODELS[name]
    model = arguments(RUN | SIZES | flags, tmp_path / "run.yaml")
    assert as_options(model) == as_options(model_of(**flags))
    assert family_for(model).name == family
    config = json.loads(json.dumps(family_for(model).config_of(model)))
    assert (config["model_type"], config["vocab_size"]) == (family, 200)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == model["rotary_base"]
    back = family_of(config).flags_of(config)
    options = recipe(back, "fp32", dict(tokenizer_type="NullTokenizer", vocab_size=back["vocab_size"]))
    again = arguments(RUN | options, tmp_path / "model.yaml")
    assert as_options(again) == as_options(model)
    assert (again["attention_dropout"], again["hidden_dropout"], again["padded_vocab_size"]) == (0, 0, 200)


def test_norm_option_of_earlier_release():
    model = model_of(ffn_hidden_size=40, qk_layernorm=True, qk_layernorm_full_width=True)
    assert family_for(model).name == "olmoe"


def test_unknown_vocabulary_size_uses_padded_size():
    model, _ = recorded({"model": {"vocab_size": None, "padded_vocab_size": 256}}, (), "it")
    assert model["vocab_size"] == 256


@each_row(
    ("option", "value"),
    [("multi_latent_attention", True), ("window_size", [16, 0]), ("mtp_num_layers", 1), ("softmax_type", "learnable")],
)
def test_option_no_family_computes_is_refused_by_name(option, value):
    assert family_for(model_of(ffn_hidden_size=40, softmax_type="vanilla", window_size=None)).name == "mixtral"
    with raises("family-cannot-express", f"--{option.replace('_', '-')}"):
        family_for(model_of(ffn_hidden_size=40, **{option: value}))


@each_row(
    "changes",
    [
        dict(num_layers=-1),
        dict(hidden_size="64"),
        dict(moe_layer_freq=[0, 1]),
        dict(ffn_hidden_size=None),
        dict(swiglu=3),
    ],
)
def test_invalid_model_description_is_refused(changes):
    with raises("model-description-invalid"):
        described_model(model_of(**changes))


def test_ungated_shared_experts_map_to_gated_family():
    model = model_of(**SHARED)
    family = family_for(model)
    assert (family.name, family.ungated_down, family.shared_width(model)) == ("qwen2_moe", 2.0, 80)
    config = family.config_of(model)
    assert config["shared_expert_intermediate_size"] == 80
    assert as_options(family.flags_of(config)) == as_options(model_of(**GATED) | dict(moe_aux_loss_coeff=0.01))


def test_shared_experts_required_by_family_are_added():
    model = model_of(add_qkv_bias=True)  # no other family has these biases without norms
    assert (family := family_for(model)).name == "qwen2_moe"
    assert family.shared_width(model) == family.config_of(model)["shared_expert_intermediate_size"] == 1
    glm = family_for(model_of(**SIGMOID))
    assert (glm.name, glm.shared_width(model)) == ("glm4_moe", 40)
    assert glm.config_of(model_of(**SIGMOID))["n_shared_experts"] == 1


@each_row("name", ["qwen-moe-14b", "deepseek-moe-16b"])
def test_presets_are_expressible_in_one_family(name, tmp_path):
    model = arguments({key: RUN[key] for key in RUN if key != "seq_length"} | dict(model=name), tmp_path / "run.yaml")
    assert [family.name for family in families_for(model)] == ["qwen2_moe"]


def test_family_without_added_experts_comes_first():
    model = model_of(ffn_hidden_size=40)
    assert [family.name for family in families_for(model)] == ["mixtral"]
    assert FAMILIES["qwen2_moe"].config_of(model)["shared_expert_intermediate_size"] == 1


def test_inexpressible_model_names_every_family():
    with raises("family-cannot-express") as error:
        family_for(model_of(normalization="LayerNorm"))
    assert all(name in str(error.value) for name in FAMILIES)


def test_unknown_family_names_are_refused():
    for name in ("deepseek_v2", "deepseek_v3"):
        with raises("family-unknown", name, "MLA", "mixtral"):
            family_of({"model_type": name})
    with raises("family-unknown", "llama", "glm4_moe, mixtral, olmoe, qwen2_moe"):
        family_named("llama")
    with raises("config-key-missing", "model_type"):
        family_of({})


PLAIN = {  # flags with which a family can say a model
    "mixtral": {}, "qwen2_moe": GATED, "qwen3_moe": QK_NORM, "olmoe": FULL_WIDTH, "glm4_moe": SIGMOID | SHARED
}  # fmt: skip
ANY = {  # flags that no family can say: what the sentence names
    "LayerNorm": (dict(normalization="LayerNorm"), "--normalization LayerNorm"),
    "GELU": (dict(swiglu=False), "--swiglu"),
    "squared": (dict(swiglu=False, squared_relu=True), "--swiglu"),
    "learned positions": (dict(position_embedding_type="learned_absolute"), "--position-embedding-type learned_abs"),
    "no positions": (dict(position_embedding_type="none"), "--position-embedding-type none"),
    "neighbours": (dict(rotary_interleaved=True), "--rotary-interleaved"),
    "dropping": (dict(moe_expert_capacity_factor=1.0), "--moe-expert-capacity-factor 1.0"),
    "sinkhorn": (
        dict(moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0),
        "--moe-router-load-balancing-type sinkhorn",
    ),
    "quantiles": (
        dict(moe_router_load_balancing_type=["aux_loss", "quantile_balancing"], moe_aux_loss_coeff=[0.0, 0.0]),
        "--moe-router-load-balancing-type quantile_balancing",
    ),
    "shifted": (dict(glu_linear_offset=1.0), "--glu-linear-offset 1.0"),
    "interleaved": (dict(moe_mlp_glu_interleave_size=2), "--moe-mlp-glu-interleave-size 2"),
    "no experts": (
        dict(num_experts=None, moe_ffn_hidden_size=None, moe_router_topk=2, moe_aux_loss_coeff=0.0),
        "--num-experts",
    ),
}
SOME = [  # family, flags that it cannot say, what the sentence names
    ("mixtral", dict(add_qkv_bias=True), "--add-qkv-bias"),
    ("mixtral", QK_NORM, "--qk-layernorm"),
    ("mixtral", SHARED, "--moe-shared-expert-intermediate-size 80"),
    ("mixtral", dict(moe_router_pre_softmax=True), "--moe-router-pre-softmax"),
    ("mixtral", dict(moe_layer_freq=[0, 1, 1]), "--moe-layer-freq"),
    ("mixtral", dict(rotary_percent=0.5), "--rotary-percent 0.5"),
    ("mixtral", SIGMOID, "--moe-router-score-function sigmoid"),
    ("mixtral", dict(moe_router_topk_scaling_factor=2.0), "--moe-router-topk-scaling-factor 2.0"),
    ("mixtral", dict(moe_router_num_groups=4, moe_router_group_topk=2), "--moe-router-num-groups 4"),
    ("qwen2_moe", QK_NORM, "--qk-layernorm"),
    ("qwen3_moe", dict(qk_layernorm=False), "--qk-layernorm"),
    ("qwen3_moe", FULL_WIDTH, "--spec megatron.pretraining.model.full_width layer_spec"),
    ("qwen3_moe", dict(add_qkv_bias=True), "--add-qkv-bias"),
    ("olmoe", dict(spec=None), "--spec None, only megatron.pretraining.model.full_width layer_spec"),
    ("olmoe", dict(kv_channels=32), "--kv-channels 32"),
    ("olmoe", dict(moe_layer_freq=[0, 1, 1]), "--moe-layer-freq"),
    ("glm4_moe", dict(moe_router_score_function="softmax", moe_router_enable_expert_bias=False), "--moe-router-score"),
    ("glm4_moe", dict(moe_shared_expert_gate=True), "--moe-shared-expert-gate"),
    ("glm4_moe", dict(moe_layer_freq=[0, 1, 0]), "--moe-layer-freq [0, 1, 0]"),
    ("glm4_moe", dict(moe_shared_expert_intermediate_size=50), "--moe-shared-expert-intermediate-size 50"),
    ("glm4_moe", dict(moe_router_num_groups=4, moe_router_group_topk=3), "--moe-router-group-topk 3 by 1"),
]


@each_row("name", FAMILIES)
@each_row("flags", ANY)
def test_option_outside_every_family_is_refused(name, flags):
    changes, words = ANY[flags]
    own = PLAIN[name] if flags != "no experts" else {}
    with raises("family-cannot-express", words):
        FAMILIES[name].config_of(model_of(**own | changes))


def test_linear_biases_are_refused():
    with raises("family-cannot-express", "mixtral", "without --disable-bias-linear"):
        FAMILIES["mixtral"].config_of(model_of(add_bias_linear=True))


@each_row(("name", "flags", "words"), SOME)
def test_option_outside_one_family_is_refused(name, flags, words):
    FAMILIES[name].config_of(model_of(**PLAIN[name]))
    with raises("family-cannot-express", words):
        FAMILIES[name].config_of(model_of(**PLAIN[name] | flags))


def test_option_without_effect_is_accepted():
    none = dict(moe_router_num_groups=2, moe_router_group_topk=2, moe_router_topk_scaling_factor=1.0)
    family = FAMILIES["mixtral"]
    assert family.config_of(model_of(**none)) == family.config_of(model_of())


SCALED = {"rope_type": "yarn", "factor": 4.0}
KEYS = [  # family (or any), keys that we cannot compute, what the sentence names
    (None, {"hidden_act": "gelu"}, "hidden_act"),
    (None, {"rope_scaling": SCALED}, "rope_scaling.*yarn"),
    (None, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.*linear"),
    (None, {"rope_parameters": SCALED | {"rope_theta": 1e4}}, "rope_parameters.*yarn"),
    (None, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.*full_attention"),
    (None, {"rope_parameters": []}, "rope_parameters"),
    (None, {"rope_theta": 5.0}, "rope_theta twice"),
    (None, {"rope_theta": 0.5, "rope_parameters": None}, "rope_theta 0.5: only integers"),
    (None, {"rope_theta": math.inf, "rope_parameters": None}, "rope_theta Infinity: it must be a number"),
    (None, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (None, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1"),
    (None, {"num_hidden_layers": None}, "no num_hidden_layers"),
    (None, {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
    (None, {"num_attention_heads": 0}, "num_attention_heads 0"),
    (None, {"hidden_size": "64"}, "hidden_size \"64\""),
    (None, {"num_local_experts": 3, "num_experts": 4}, "different numbers of experts"),
    (None, {"rms_norm_eps": "small"}, "rms_norm_eps"),
    (None, {"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
    ("mixtral", {"sliding_window": 16}, "sliding_window 16"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("mixtral", {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
    ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer with experts"),
    ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias true"),
    ("olmoe", {"attention_bias": True}, "attention_bias true"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
    ("olmoe", {"head_dim": 32}, "head_dim 32"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob false"),
    ("glm4_moe", {"n_group": 4, "topk_group": 1}, "topk_group 1"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts 0"),
]  # fmt: skip


@each_row(("name", "keys", "words"), KEYS)
def test_unsupported_config_keys_are_named(name, keys, words):
    for family in [FAMILIES[name]] if name else FAMILIES.values():
        config = family.config_of(model_of(**PLAIN[family.name]))
        family.flags_of(config)
        with pytest.raises(CheckpointError, match=words):
            family.flags_of(config | keys)


def test_both_forms_of_rotary_frequencies_are_read():
    family = FAMILIES["glm4_moe"]
    config = family.config_of(model_of(**PLAIN["glm4_moe"], rotary_percent=0.25, rotary_base=50000))
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "partial_rotary_factor")}
    assert family.flags_of(old) == family.flags_of(new) == family.flags_of(config)
    neither = {key: value for key, value in old.items() if key in new}
    assert family.flags_of(neither) | dict(rotary_base=50000, rotary_percent=0.25) == family.flags_of(config)
    assert (family.flags_of(neither)["rotary_base"], family.flags_of(neither)["rotary_percent"]) == (10000, 0.5)
    mixtral = {"rope_theta": None, "rope_parameters": None}
    assert FAMILIES["mixtral"].flags_of(FAMILIES["mixtral"].config_of(model_of()) | mixtral)["rotary_base"] == 1000000


def test_window_covering_longest_sequence_is_ignored():
    family = FAMILIES["mixtral"]
    config = family.config_of(model_of())
    assert family.flags_of(config | {"sliding_window": 48}) == family.flags_of(config)
    off = FAMILIES["qwen2_moe"].config_of(model_of(**GATED)) | {"sliding_window": 16}
    assert FAMILIES["qwen2_moe"].flags_of(off)["add_qkv_bias"] is False
