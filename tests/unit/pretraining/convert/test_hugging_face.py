"""Tensors of transformers are rows of ours: there and back no bit differs, and nothing is missing without a word."""

import contextlib
import json
import math
import os

import numpy
import pytest

from megatron.pretraining.entry import cpu
from tests.errors import only_code, raises

cpu.install()  # comes before megatron.core
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megatron.pretraining.convert import program  # noqa: E402
from megatron.pretraining.convert.contents import COMPUTE, ConvertedState, Facts, complete_bounds  # noqa: E402
from megatron.pretraining.convert.dense import DenseContents, write_dense  # noqa: E402
from megatron.pretraining.convert.hugging_face import conversions, tensors  # noqa: E402
from megatron.pretraining.convert.hugging_face.conversions import (  # noqa: E402
    Description,
    _describe_difference,
    write_directory,
)
from megatron.pretraining.convert.hugging_face.families import family_named  # noqa: E402
from megatron.pretraining.convert.hugging_face.files import read_directory  # noqa: E402
from megatron.pretraining.convert.hugging_face.megatron_logits import built  # noqa: E402
from megatron.pretraining.convert.hugging_face.model_record import as_options, first_state, run_configuration  # noqa: E402
from megatron.pretraining.convert.hugging_face.tensors import (  # noqa: E402
    Exported,
    Imported,
    name_map,
)
from megatron.pretraining.model.parameters import unpartitioned_buffers, unpartitioned_parameters  # noqa: E402
from moc.inspect.coverage import operator_or_other  # noqa: E402
from moc.state.operators import Region  # noqa: E402
from moc.store.shard_file import TensorBox  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.unit.pretraining.convert.test_families import MODELS, RUN, SHARED, SIZES, model_of  # noqa: E402

ROWS, PADDED = 200, 256  # of the embedding
SHAPE = dict(num_layers=3, num_experts=8, moe_layer_freq=1, ffn_hidden_size=40)  # as an earlier version recorded it
MADE_UP = {  # families that have what these models have not
    "qwen2 of shared experts without a gate": ("qwen2_moe", SHARED),
    "qwen2 without shared experts": ("qwen2_moe", {}),
    "glm4 without shared experts or biases": ("glm4_moe", dict(moe_router_score_function="sigmoid")),
}
ALL = MODELS | MADE_UP
NORM = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"


def mapped(name):
    family, flags = ALL[name]
    model = model_of(**flags)
    return model, name_map(model, family_named(family)), family_named(family)


class Drawn(ConvertedState):
    """Weights that are drawn from the normal distribution, with a padded vocabulary."""

    def __init__(self, shapes, model, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        self.values = {}
        for name, (rows, *rest) in shapes.items():
            words = rows == ROWS and len(rest) == 1 and name.startswith(("embedding", "output"))
            values = torch.randn((PADDED if words else rows, *rest), generator=generator)
            self.values[name] = values if name.endswith("expert_bias") else values.to(dtype)
        self.tensors = [
            TensorBox(name, "param", tuple(values.shape), complete_bounds(tuple(values.shape)), values.dtype)
            for name, values in self.values.items()
        ]
        self.operators = {operator_or_other(name): (COMPUTE, None) for name in shapes}
        kind, null = "fp32" if dtype == torch.float32 else "bf16", dict(tokenizer_type="NullTokenizer")
        state = first_state(model, kind, null, self.tensors)
        self.facts = Facts(0, "full", {}, state, 1)

    def read(self, name, slot, region):
        return self.values[name][region.slices()].contiguous()


def ours_of(names):
    return {name: pairs[0].our_shape for name, pairs in names.of_ours().items()}


def drawn(name, dtype=torch.float32):
    model, names, family = mapped(name)
    return Drawn(ours_of(names), model, dtype), names, family, model


def written(contents, names, family, model, output, dtype=None, size=10**9):
    about = Description(family.config_of(model), None, {})
    write_directory(Exported(contents, names, dtype), about, output, size, True, lambda count: None)
    return output


def imported(path, names):
    return Imported(read_directory(path), names, None, {})


def same(one, other):
    assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@contextlib.contextmanager
def one_worker():
    """Is the only worker of a job; yields a function that returns the shape of every tensor of a model."""

    def shapes(flags):
        config = run_configuration(model_of(**flags), 32)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = built(config, ROWS)
        pieces = (unpartitioned_parameters(model) | unpartitioned_buffers(model)).values()
        return {piece.name: tuple(piece.global_shape) for held in pieces for piece in held}

    try:
        yield shapes
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@each_row("name", ALL)
def test_name_map_covers_real_model(name):
    with one_worker() as real:
        assert ours_of(mapped(name)[1]) == real(ALL[name][1])


@each_row("name", MODELS)
@each_row("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_preserves_every_bit(name, dtype, tmp_path):
    contents, names, family, model = drawn(name, dtype)
    written(contents, names, family, model, tmp_path / "hf", size=30_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    back = imported(tmp_path / "hf", names)
    assert {entry.name for entry in back.tensors} == contents.values.keys()
    for entry in back.tensors:
        same(back.read(entry.name, "param", entry.region), contents.values[entry.name][: entry.global_shape[0]])


@each_row("name", MODELS)
def test_library_reads_same_files(name, tmp_path):
    contents, names, family, model = drawn(name)
    path = written(contents, names, family, model, tmp_path / "hf")
    theirs = load_file(path / "model.safetensors")
    ours = read_directory(path)
    assert theirs.keys() == ours.keys()
    for tensor, values in theirs.items():
        same(values, ours[tensor].rows(0, values.shape[0]))


@given(groups=st.integers(1, 4), ratio=st.integers(1, 4), width=st.sampled_from([2, 4, 6]))
def test_queries_keys_and_values_are_extracted_from_groups(groups, ratio, width):
    heads = groups * ratio
    model = model_of(num_attention_heads=heads, num_query_groups=groups, kv_channels=width, ffn_hidden_size=40)
    names = name_map(model, family_named("mixtral"))
    contents = Drawn(ours_of(names), model)
    exported = Exported(contents, names, None)
    found = {tensor.name: tensor for tensor in exported.tensors}
    grouped = contents.values["decoder.layers.0.self_attention.linear_qkv.weight"].view(groups, ratio + 2, width, -1)
    for kind, part in (("q", slice(0, ratio)), ("k", slice(ratio, ratio + 1)), ("v", slice(ratio + 1, ratio + 2))):
        tensor = found[f"model.layers.0.self_attn.{kind}_proj.weight"]
        wanted = grouped[:, part].reshape(-1, grouped.shape[-1])
        same(exported.rows(tensor, 0, tensor.shape[0]), wanted.contiguous())
        first = tensor.shape[0] // 2
        same(exported.rows(tensor, first, 1), wanted[first : first + 1].contiguous())


@given(data=st.data())
def test_any_chunk_is_read_separately(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "boxes"
    contents, names, family, model = drawn("qwen2")
    if not path.exists():
        written(contents, names, family, model, path)
    back = imported(path, names)
    entry = data.draw(st.sampled_from(back.tensors))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in entry.global_shape)
    shape = tuple(
        data.draw(st.integers(1, size - start)) for size, start in zip(entry.global_shape, offset, strict=True)
    )
    region = Region(offset, shape)
    same(back.read(entry.name, "param", region), contents.values[entry.name][region.slices()].contiguous())


def test_huge_tensor_rows_are_read_in_blocks(tmp_path, monkeypatch):
    contents, names, family, model = drawn("qwen2")
    one = written(contents, names, family, model, tmp_path / "one")
    monkeypatch.setattr(tensors, "_BLOCK", 1000)
    monkeypatch.setattr(tensors, "_MAX_CACHED_BYTES", 0)
    other = written(contents, names, family, model, tmp_path / "other")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_shared_experts_without_gate_get_zero_gate(tmp_path):
    contents, names, family, model = drawn("qwen2 of shared experts without a gate")
    theirs = load_file(written(contents, names, family, model, tmp_path / "hf") / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.shared_expert"
        ours = contents.values[f"decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight"]
        same(theirs[f"{prefix}.down_proj.weight"], 2 * ours)
        assert not theirs[f"{prefix}_gate.weight"].any() and theirs[f"{prefix}_gate.weight"].shape == (1, 64)


def test_tensors_only_in_family_are_zeros(tmp_path):
    contents, names, family, model = drawn("glm4 without shared experts or biases")
    theirs = load_file(written(contents, names, family, model, tmp_path / "hf", torch.bfloat16) / "model.safetensors")
    zeros = {name: values for name, values in theirs.items() if "shared_experts" in name or "correction" in name}
    assert len(zeros) == 3 * 4 and not any(values.any() for values in zeros.values())
    assert {values.dtype for name, values in theirs.items() if "correction" in name} == {torch.float32}
    assert {values.dtype for name, values in theirs.items() if "correction" not in name} == {torch.bfloat16}


def test_doubled_weight_out_of_range_is_refused(tmp_path):
    contents, names, family, model = drawn("qwen2 of shared experts without a gate")
    contents.values["decoder.layers.0.mlp.shared_experts.linear_fc2.weight"][0, 0] = 60_000.0
    with raises("dtype-too-narrow", "shared_expert.down_proj.weight, 2 times", "--dtype bf16"):
        written(contents, names, family, model, tmp_path / "hf", torch.float16)
    assert not list(tmp_path.iterdir())


def test_hub_cache_directory_of_links_is_read(tmp_path):
    repository = tmp_path / "models--org--name"
    blobs, directory = repository / "blobs", repository / "snapshots" / "4567"
    blobs.mkdir(parents=True), directory.mkdir(parents=True)
    save_file({"weight": torch.arange(4.0)}, blobs / "0123abcd")
    (directory / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert list(read_directory(directory)) == ["weight"]
    (tmp_path / "link").symlink_to(directory)
    assert list(read_directory(tmp_path / "link")) == ["weight"]


@each_row("name", ["mixtral", "qwen2"])
def test_norm_before_experts_may_have_two_names(name, tmp_path):
    contents, names, family, model = drawn(name)
    one = written(contents, names, family, model, tmp_path / "one")
    shapes = {
        n.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"): s for n, s in ours_of(names).items()
    }
    assert NORM not in shapes
    other = written(Drawn(shapes, model), names, family, model, tmp_path / "other")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@each_row("name", MODELS)
def test_each_missing_own_tensor_is_named(name):
    _, names, _ = mapped(name)
    shapes = ours_of(names)
    for one in shapes:
        with raises("tensor-missing", one):
            names.fitted({n: shape for n, shape in shapes.items() if n != one})


@each_row("name", MODELS)
def test_each_missing_or_misshaped_family_tensor_is_named(name):
    _, names, _ = mapped(name)
    shapes = names.their_shapes()
    for one in shapes:
        with raises("tensor-missing", one, "config.json"):
            names.check_theirs({n: shape for n, shape in shapes.items() if n != one})
        with raises("tensor-shape-wrong", one):
            names.check_theirs(shapes | {one: (*shapes[one][:-1], shapes[one][-1] + 1)})


def test_unexpected_tensors_are_named():
    _, names, _ = mapped("mixtral")
    bias = "model.layers.0.self_attn.q_proj.bias"
    with raises("tensor-unexpected", bias):
        names.check_theirs(names.their_shapes() | {bias: (64,)})
    names.check_theirs(names.their_shapes() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)})  # derived
    stranger = "decoder.layers.0.mlp.experts.experts.8.linear_fc2.weight"
    with raises("tensor-unexpected", stranger):
        names.fitted(ours_of(names) | {stranger: (64, 40)})


def test_only_vocabulary_may_be_padded():
    _, names, _ = mapped("mixtral")
    shapes = ours_of(names)
    names.fitted(shapes | {"output_layer.weight": (PADDED, 64)})
    for one in ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.router.weight"):
        for rows in (shapes[one][0] - 1, shapes[one][0] + 1)[: 1 if one.startswith("emb") else 2]:
            with raises("tensor-shape-wrong", one):
                names.fitted(shapes | {one: (rows, *shapes[one][1:])})


# the program


@pytest.fixture
def dense(tmp_path):
    """A dense checkpoint of weights."""
    contents, *_ = drawn("mixtral")
    write_dense(contents, tmp_path / "checkpoints", 1, torch.float32, 10**9, lambda count: None)
    return tmp_path / "checkpoints", contents


def convert(*argv):
    assert program.main([str(word) for word in argv]) == 0


def refused(capsys, *argv):
    capsys.readouterr()
    assert program.main([str(word) for word in argv]) == 1
    out, error = capsys.readouterr()
    assert not out and error.startswith("convert_checkpoint: ") and error.count("\n") == 1
    return error


def test_program_round_trips_checkpoint(dense, tmp_path, capsys):
    root, contents = dense
    convert(root, tmp_path / "hf", "--to", "hf", "--verify")
    convert(tmp_path / "hf", tmp_path / "back", "--verify")
    assert "--finetune" in capsys.readouterr().out
    back = DenseContents(tmp_path / "back/iter_0000000")
    for entry in back.tensors:
        values = back.read(entry.name, "param", entry.region)
        same(values, contents.values[entry.name][: len(values)].contiguous())
    assert as_options(back.facts.state["model"]) == as_options(contents.facts.state["model"])


def test_requested_dtype_is_written(dense, tmp_path):
    root, contents = dense
    convert(root, tmp_path / "hf", "--to", "hf", "--family", "mixtral", "--dtype", "bf16", "--verify")
    theirs = load_file(tmp_path / "hf/model.safetensors")
    same(theirs["model.norm.weight"], contents.values["decoder.final_layernorm.weight"].bfloat16())
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"


def test_killed_conversion_does_not_block_next_conversion(dense, tmp_path):
    left = tmp_path / ".hf.incomplete"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    convert(dense[0], tmp_path / "hf", "--to", "hf", "--max-file-size", 1)
    assert not left.exists()
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"model.safetensors", "config.json", "conversion.json"}


def of_another_user(path):
    path.mkdir()
    os.chown(path, 12345, 12345)


def for_all_users(path):
    path.mkdir()
    path.chmod(0o777)


OTHERS = {
    "a link": lambda path: path.symlink_to(path.parent / "victim"),
    "a file": lambda path: path.touch(),
    "a FIFO": os.mkfifo,
    "for all users": for_all_users,
    "of another user": pytest.param(
        of_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can change an owner")
    ),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_staging_avoids_directories_others_can_change(dense, tmp_path, make):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/precious").write_text("precious")
    left = tmp_path / ".hf.incomplete"
    make(left)
    before = left.lstat()
    with conversions._staging_directory(tmp_path / "hf") as staging:
        assert staging.parent.lstat().st_mode & 0o777 == 0o700 and staging.parent != left
    convert(dense[0], tmp_path / "hf", "--to", "hf")
    assert left.lstat() == before and (tmp_path / "victim/precious").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} - {"checkpoints"} == {".hf.incomplete", "hf", "victim"}
    assert (tmp_path / "hf").stat().st_mode == (tmp_path / "victim").stat().st_mode  # as any new directory


def test_existing_output_is_never_replaced(dense, tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/mine").write_text("mine")
    assert only_code(refused(capsys, dense[0], tmp_path / "hf", "--to", "hf")) == "output-exists"
    convert(dense[0], tmp_path / "other", "--to", "hf")
    convert(tmp_path / "other", tmp_path / "back")
    assert only_code(refused(capsys, tmp_path / "other", tmp_path / "back")) == "output-exists"


def test_conversion_in_progress_is_not_disturbed(dense, tmp_path, capsys):
    with conversions._staging_directory(tmp_path / "hf"):
        assert only_code(refused(capsys, dense[0], tmp_path / "hf", "--to", "hf")) == "directory-in-use"


def test_pickles_are_never_read(dense, tmp_path, capsys):
    convert(dense[0], tmp_path / "hf", "--to", "hf")
    for name in ("model.safetensors", "conversion.json"):
        os.remove(tmp_path / "hf" / name)
    torch.save({}, tmp_path / "hf/pytorch_model.bin")
    error = refused(capsys, tmp_path / "hf", tmp_path / "back")
    assert only_code(error) == "weights-pickled" and "pytorch_model.bin" in error
    assert not (tmp_path / "back").exists()


def test_damaged_weights_are_refused(dense, tmp_path, capsys):
    convert(dense[0], tmp_path / "hf", "--to", "hf")
    weights = tmp_path / "hf/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert only_code(refused(capsys, tmp_path / "hf", tmp_path / "back")) == "checkpoint-damaged"
    os.remove(tmp_path / "hf/conversion.json")
    weights.write_bytes(whole[:-1])
    assert only_code(refused(capsys, tmp_path / "hf", tmp_path / "back")) == "checkpoint-damaged"
    weights.write_bytes(whole[:100])
    assert only_code(refused(capsys, tmp_path / "hf", tmp_path / "back")) == "checkpoint-damaged"


def test_missing_expert_is_named_and_nothing_written(dense, tmp_path, capsys):
    convert(dense[0], tmp_path / "hf", "--to", "hf")
    os.remove(tmp_path / "hf/conversion.json")
    weights = load_file(tmp_path / "hf/model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, tmp_path / "hf/model.safetensors")
    error = refused(capsys, tmp_path / "hf", tmp_path / "back")
    assert only_code(error) == "tensor-missing" and "layers.1.block_sparse_moe.experts.3.w2.weight" in error
    assert not (tmp_path / "back").exists()


def test_wrong_weights_index_is_refused(dense, tmp_path, capsys):
    convert(dense[0], tmp_path / "hf", "--to", "hf")
    os.remove(tmp_path / "hf/conversion.json")
    index = {name: "model.safetensors" for name in load_file(tmp_path / "hf/model.safetensors")}
    path = tmp_path / "hf/model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index | {"model.more.weight": "model.safetensors"}}))
    error = refused(capsys, tmp_path / "hf", tmp_path / "back")
    assert only_code(error) == "weights-index-wrong" and "model.more.weight" in error
    index.pop("lm_head.weight")
    path.write_text(json.dumps({"weight_map": index}))
    error = refused(capsys, tmp_path / "hf", tmp_path / "back")
    assert only_code(error) == "weights-index-wrong" and "lm_head.weight" in error
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    assert only_code(refused(capsys, tmp_path / "hf", tmp_path / "back")) == "checkpoint-damaged"


def test_checkpoint_without_recorded_model_needs_flags(tmp_path, capsys):
    contents, *_ = drawn("mixtral")
    del contents.facts.state["model"], contents.facts.state["tokenizer"]
    contents.facts.state["shape"] = SHAPE
    write_dense(contents, tmp_path / "old", 1, torch.float32, 10**9, lambda count: None)
    assert only_code(refused(capsys, tmp_path / "old", tmp_path / "hf", "--to", "hf")) == "model-not-recorded"
    (tmp_path / "run.json").write_text(json.dumps(RUN | SIZES | dict(ffn_hidden_size=40)))
    convert(tmp_path / "old", tmp_path / "hf", "--to", "hf", "--verify", "--", "--config", tmp_path / "run.json")
    (tmp_path / "run.json").write_text(json.dumps(RUN | SIZES | dict(ffn_hidden_size=41)))
    said = refused(capsys, tmp_path / "old", tmp_path / "other", "--to", "hf", "--", "--config", tmp_path / "run.json")
    assert only_code(said) == "checkpoint-of-another-model" and "--ffn-hidden-size" in said


def test_incompatible_flags_and_families_are_refused(dense, tmp_path, capsys):
    root = dense[0]
    assert only_code(refused(capsys, root, tmp_path / "hf", "--to", "hf", "--", "--swiglu")) == "flag-has-no-effect"
    assert (
        only_code(refused(capsys, root, tmp_path / "hf", "--to", "hf", "--family", "qwen3_moe"))
        == "family-cannot-express"
    )
    assert (
        only_code(refused(capsys, root, tmp_path / "hf", "--to", "hf", "--family", "deepseek_v3")) == "family-unknown"
    )
    for words in (["--verify"], ["--check-logits"], ["--family", "mixtral"]):
        with pytest.raises(SystemExit):
            program.main([str(root), str(tmp_path / "new"), *words])


@each_row("apart", [1.0, 2e-3, math.nan])
def test_differing_logits_are_refused(apart):
    theirs = numpy.full((2, 3, 4), 10.0, numpy.float32)
    assert "at most" in _describe_difference(theirs + 1e-4, theirs)
    ours = theirs.copy()
    ours[1, 2, 3] += apart
    with raises("logits-differ"):
        _describe_difference(ours, theirs)
