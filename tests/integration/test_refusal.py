"""What cannot be loaded whole is not loaded at all, and the file or flag is named."""

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


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_each_damaged_file_is_named(kind, saved, data):
    files = [p for p in (saved / "iter_0000001").rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert len(files) >= 4
    damages = [dict(path=str(path), kind=kind) for path in files]
    size, parallel = LAYOUTS["EP2"]
    flags = FLAGS | parallel | data | dict(load=str(saved), train_iters=1)
    found = run_world(size, "tests.integration.bodies:refusals", flags=flags, damages=damages)
    assert all(worker == found[0] for worker in found), "workers disagree"
    assert found[0][0] is None  # without damage
    for path, refusal in zip(files, found[0][1:], strict=True):
        assert refusal and path.name in refusal and "--ckpt-step" in refusal, (path, refusal)


@pytest.mark.parametrize("other", [dict(num_layers=4), dict(hidden_size=64), dict(num_experts=8)], ids=str)
def test_checkpoint_of_another_model_is_refused(other, saved, data):
    output = refused_by_program(data | dict(load=str(saved)) | other)
    assert "checkpoint-unloadable" in codes_in(output) and str(saved) in output


def refused_by_program(flags):
    (result,) = start_world(1, "tests.integration.bodies:train", flags=FLAGS | flags).wait()
    assert result.exit == 1
    assert "Traceback" not in result.output
    return result.output


def test_missing_or_foreign_checkpoint_is_refused(saved, data, tmp_path):
    output = refused_by_program(data | dict(load=str(saved), ckpt_step=7))
    assert "checkpoint-missing" in codes_in(output) and "iter_0000007" in output
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003/model.pt").write_text("something else")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    output = refused_by_program(data | dict(load=str(tmp_path)))
    assert "checkpoint-unloadable" in codes_in(output) and "iter_0000003" in output


@pytest.mark.parametrize("name", ["save", "log_dir", "tensorboard_dir", "data_cache_path"])
def test_unwritable_directory_is_refused(name, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    flags = FLAGS | data | {name: str(tmp_path / "file/below"), "train_iters": 1}
    (result,) = start_world(1, "tests.integration.bodies:train", flags=flags).wait()
    assert result.exit == 2 and str(tmp_path / "file/below") in result.output
    assert "Traceback" not in result.output and "iteration  " not in result.output


def test_first_start_requires_no_checkpoint(data, tmp_path):
    assert train("1", data | dict(load=str(tmp_path), train_iters=1)).start == 0


@pytest.mark.parametrize("changed", [dict(lr_decay_iters=50), dict(lr=1e-3)], ids=str)
def test_changed_learning_rate_schedule_is_refused(changed, saved, data):
    output = refused_by_program(data | dict(load=str(saved), train_iters=1) | changed)
    assert "schedule-differs" in codes_in(output)
