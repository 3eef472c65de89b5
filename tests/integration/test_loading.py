"""Which checkpoint a run loads, and what it compares before it continues."""

import shutil

import pytest

from moc.errors import codes_in
from moc.store import dense_files
from tests.integration.entry_jobs import USER_SCRIPT, run
from tests.integration.snapshot_files import start, told
from tests.integration.test_masters import BF16, EIGHT
from tests.integration.tiny import train


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """The checkpoints of iterations 2 and 4, and the run that wrote them."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, train("1", data | dict(save=str(directory), save_interval=2, train_iters=4))


def copied(saved, tmp_path):
    """A directory that a run may save to."""
    return shutil.copytree(saved[0], tmp_path / "saved")


def test_other_moment_formats_are_refused(data, tmp_path):
    flags = data | BF16 | dict(train_iters=2)
    train("1", flags | EIGHT | dict(save=str(tmp_path)))
    for other in ({}, dict(exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16")):
        (result,) = start("1", flags | other | dict(load=str(tmp_path))).wait()
        assert result.exit == 1 and codes_in(result.output) == ["optimizer-format-differs"]


def test_other_optimizer_is_refused(saved, data):
    (result,) = start(
        "1", data | dict(load=str(saved[0]), optimizer="sgd", use_distributed_optimizer=False, train_iters=4)
    ).wait()
    assert result.exit == 1 and codes_in(result.output) == ["optimizer-differs"]


def test_other_sample_order_is_reported(saved, data):
    flags = data | dict(load=str(saved[0]), train_iters=4)
    for other, reported in (({}, False), (dict(seed=5), True)):
        world = start("1", flags | other)
        (result,) = world.wait()
        assert result.exit == 0 and ("WARNING: seed was 1234 and is 5" in result.output) == reported


def test_checkpoint_whose_replacement_was_killed_is_loaded(saved, data, tmp_path):
    root = copied(saved, tmp_path)
    dense_files.checkpoint_path(root, 4).rename(root / ".iter_0000004.replaced")
    flags = data | dict(load=str(root), save=str(root), train_iters=5, override_opt_param_scheduler=True)
    assert train("1", flags).start == 4
    assert dense_files.latest_iteration(root) == 5 and not [*root.glob(".iter*")]


def test_ckpt_step_takes_precedence_over_newer_checkpoint(saved, data, tmp_path):
    root = copied(saved, tmp_path)
    resumed = train("1", data | dict(load=str(root), ckpt_step=2, train_iters=4))
    assert resumed.start == 2 and resumed.records == saved[1].records[2:]


def test_skip_train_run_saves_optimizer_state(saved, data, tmp_path):
    flags = data | dict(train_iters=4)
    train("1", flags | dict(load=str(saved[0]), ckpt_step=2, save=str(tmp_path), skip_train=True))
    assert train("1", flags | dict(load=str(tmp_path))).records == saved[1].records[2:]


@pytest.mark.parametrize("damaged", [False, True])
def test_checkpoint_args_are_used_unless_damaged(damaged, saved, data, tmp_path):
    root = copied(saved, tmp_path)
    if damaged:
        (dense_files.checkpoint_path(root, 4) / "common.pt").write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    flags = data | dict(load=str(root), use_checkpoint_args=True, train_iters=4, hidden_size=None)
    (result,) = start("1", flags).wait()
    expected = (1, ["checkpoint-unloadable"]) if damaged else (0, [])
    assert (result.exit, codes_in(result.output)) == expected, result.output[-2000:]


def test_release_checkpoint_starts_at_iteration_0(saved, data, tmp_path):
    root = copied(saved, tmp_path)
    (root / dense_files.TRACKER_FILE).write_text("release")
    dense_files.checkpoint_path(root, 4).rename(root / "release")
    snapshots = dict(ckpt_policy="full", snapshot_interval=1, ckpt_dir=str(tmp_path / "snapshots"))
    assert train("1", data | snapshots | dict(load=str(root), train_iters=1)).start == 0


@pytest.mark.parametrize(
    ("content", "code"), [(None, "checkpoint-missing"), ("", "tracker-invalid"), ("none", "tracker-invalid")]
)
def test_missing_required_checkpoint_ends_job(content, code, data, tmp_path):
    if content is not None:
        (tmp_path / dense_files.TRACKER_FILE).write_text(content)
    flags = data | dict(load=str(tmp_path), exit_on_missing_checkpoint=True, train_iters=1)
    (result,) = start("1", flags).wait()
    assert result.exit == 1 and codes_in(result.output) == [code]


def test_pretrained_checkpoint_is_used_until_run_has_its_own(saved, data, tmp_path):
    flags = data | dict(load=str(tmp_path), pretrained_checkpoint=str(saved[0]), train_iters=2)
    begun = told(start("1", flags | dict(save=str(tmp_path)), body="bodies:train_and_report_finetune"))
    assert begun.start == 0 and begun.workers[0]["finetune"] is False
    assert train("1", flags).start == 2
    shutil.rmtree(dense_files.checkpoint_path(tmp_path, 2))
    (result,) = start("1", flags).wait()  # the tracker file names it
    assert result.exit == 1 and codes_in(result.output) == ["checkpoint-missing"]


def test_user_script_with_small_moments_resumes_identically(tmp_path):
    flags = "--bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    straight = run(tmp_path / "straight", USER_SCRIPT, 1, f"{flags} --save {tmp_path / 's'} --save-interval 4")
    assert straight.code == 0, straight.output[-3000:]
    resumed = run(tmp_path / "resumed", USER_SCRIPT, 1, f"{flags} --load {tmp_path / 's'} --ckpt-step 4")
    assert resumed.losses == {i: straight.losses[i] for i in range(5, 9)}, resumed.output[-3000:]
