"""What cannot be loaded whole is not loaded at all, and the file or flag is named."""

import shutil
from pathlib import Path

import pytest

from moc.errors import codes_in
from tests.integration.tiny import FLAGS, LAYOUTS, train
from tests.worlds import run_world, start_world


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    train("EP2", data | dict(save=str(root), train_iters=1))
    return root


def refusals(layout, saved, data, changes=(), damages=()):
    """The first answer is the one without change or damage."""
    size, parallel = LAYOUTS[layout]
    flags = FLAGS | parallel | data | dict(load=str(saved), train_iters=1)
    said = run_world(size, "tests.integration.bodies:refusals", flags=flags, changes=changes, damages=damages)
    assert all(worker == said[0] for worker in said), "workers disagree"
    assert said[0][0] is None
    return said[0][1:]


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_every_damaged_file_is_named(kind, saved, data):
    files = [p for p in (saved / "iter_0000001").rglob("*") if p.is_file()]
    assert len(files) >= 8
    damages = [dict(path=str(path), kind=kind) for path in files]
    for path, said in zip(files, refusals("EP2", saved, data, damages=damages), strict=True):
        assert said and "--ckpt-step" in said, (path, said)
        # a bit flipped in the manifest's hash of a file speaks against that file
        assert path.name in said or (path.name, kind) == ("manifest.json", "flipped")


def test_the_checkpoint_of_another_program(saved, data, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for ours in ("manifest.json", "training_state.json"):
        (tmp_path / "iter_0000001" / ours).unlink()
    shutil.rmtree(tmp_path / "iter_0000001/optimizer")
    assert "--trust" in refused_by_program(data | dict(load=str(tmp_path)))
    assert "--no-load-optim" in refused_by_program(data | dict(load=str(tmp_path), trust=True))
    assert train("1", data | dict(load=str(tmp_path), load_optim=False, trust=True, train_iters=2)).start == 1


def test_a_damaged_tracker(saved, data):
    tracker = saved / "latest_checkpointed_iteration.txt"
    (said,) = refusals("1", saved, data, damages=[dict(path=str(tracker), kind="truncated")])
    assert tracker.name in said


MODELS = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "position_embedding_type": "learned_absolute",
    "normalization": "RMSNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": True,
    "num_experts": 8,
    "moe_layer_freq": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "seq_length": None,
}


def test_another_model_is_named(saved, data):
    changes = [{name: value} for name, value in MODELS.items() if value is not None]
    changes.append(dict(group_query_attention=True, num_query_groups=2))
    names = [*(name for name, value in MODELS.items() if value is not None), "num_query_groups"]
    for name, said in zip(names, refusals("1", saved, data, changes), strict=True):
        assert said and f"--{name.replace('_', '-')} is " in said, (name, said)


def refused_by_program(flags):
    (result,) = start_world(1, "tests.integration.bodies:train", flags=FLAGS | flags).wait()
    assert result.exit == 1
    assert "Traceback" not in result.output
    return result.output


def test_the_program_ends_with_one_sentence(saved, data, tmp_path):
    said = refused_by_program(data | dict(load=str(saved), ckpt_step=7))
    assert "checkpoint-missing" in codes_in(said) and "iter_0000007" in said
    said = refused_by_program(data | dict(load=str(tmp_path / "empty"), exit_on_missing_checkpoint=True))
    assert "--exit-on-missing-checkpoint" in said
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003/model.pt").write_text("something else")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    said = refused_by_program(data | dict(load=str(tmp_path)))
    assert "iter_0000003" in said


@pytest.mark.parametrize("name", ["save", "log_dir", "tensorboard_dir", "data_cache_path"])
def test_a_directory_that_cannot_be_written(name, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    flags = FLAGS | data | {name: str(tmp_path / "file/below"), "train_iters": 1}
    (result,) = start_world(1, "tests.integration.bodies:train", flags=flags).wait()
    assert result.exit == 2 and f"--{name.replace('_', '-')} " in result.output
    assert "Traceback" not in result.output and "iteration  " not in result.output


def test_a_first_start_needs_no_checkpoint(data, tmp_path):
    assert train("1", data | dict(load=str(tmp_path), train_iters=1)).start == 0


@pytest.mark.parametrize(
    "changed", [dict(lr_decay_iters=50), dict(lr_warmup_init=1e-4), dict(lr_wsd_decay_style="linear"), dict(lr=1e-3)]
)
def test_a_changed_learning_rate_schedule(changed, saved, data):
    said = refused_by_program(data | dict(load=str(saved), train_iters=1) | changed)
    assert "--use-checkpoint-opt-param-scheduler" in said and "--override-opt-param-scheduler" in said
