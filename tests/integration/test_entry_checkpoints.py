"""``--save`` and ``--load`` of Megatron-LM's scripts: whole checkpoints, and damage that is noticed."""

from __future__ import annotations

import pytest

from moc.errors import codes_in
from moc.store import dense_files
from tests.integration.entry_jobs import EP2, USER_SCRIPT, ZERO1, run
from tests.integration.mounts import mounted
from tests.shared import ALL

SAVES = f"{EP2} {ZERO1} --save saved --save-interval 4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints of iterations 4 and 8."""
    directory = tmp_path_factory.mktemp("saved")
    ended = run(directory, USER_SCRIPT, 2, SAVES)
    assert ended.code == 0, ended.output[-4000:]
    return directory / "saved"


def test_checkpoint_has_manifest_and_no_unfinished_files(saved):
    for iteration in (4, 8):
        directory = dense_files.checkpoint_path(saved, iteration)
        manifest = dense_files.read_manifest(directory)
        assert manifest is not None and manifest["format"] == dense_files.MEGATRON_FORMAT
        there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
        assert there == {*manifest["files"], "manifest.json"}
        assert dense_files.find_damage(directory, manifest["files"]) is None
    assert not [*saved.glob(".iter*")] and dense_files.latest_iteration(saved) == 8


@pytest.mark.parametrize("damage", ["altered", "missing", *ALL * ["truncated"]])
def test_damaged_checkpoint_file_is_named_before_reading(damage, saved, tmp_path):
    victim = next(dense_files.checkpoint_path(saved, 8).glob("__1_*.distcp"))
    content = victim.read_bytes()
    try:
        if damage == "missing":
            victim.unlink()
        else:
            victim.write_bytes(content[:-1] if damage == "truncated" else bytes([content[0] ^ 1]) + content[1:])
        ended = run(tmp_path, USER_SCRIPT, 2, f"{EP2} {ZERO1} --load {saved}")
        assert ended.code == 1 and codes_in(ended.output) == ["checkpoint-damaged"] and victim.name in ended.output
        step = run(tmp_path, USER_SCRIPT, 2, f"{EP2} {ZERO1} --exit-interval 5 --load {saved} --ckpt-step 4")
        assert step.code == 0 and [*step.losses] == [5], step.output[-3000:]
    finally:
        victim.write_bytes(content)


def test_kill_during_save_keeps_previous_checkpoint(tmp_path):
    assert run(tmp_path, USER_SCRIPT, 2, f"{SAVES} --exit-interval 4").code == 0
    before = dense_files.read_manifest(dense_files.checkpoint_path(tmp_path / "saved", 4))
    kill = "--inject", "kill ranks=0,1 iteration=8 point=persisting"
    ended = run(tmp_path, USER_SCRIPT, 2, f"{SAVES} --load saved", *kill, launcher="--max-restarts 0", log="second")
    assert ended.code != 0 and 8 in ended.losses
    outputs = [(tmp_path / f"second/workers/rank_{rank:05d}.log").read_text() for rank in range(2)]  # by default
    assert outputs[0] and " iteration " in outputs[1] and " iteration " in ended.output
    (end,) = ended.of("end")
    assert end["code"] == ended.code and "signal 9" in end["reason"]
    assert dense_files.latest_iteration(tmp_path / "saved") == 4
    assert dense_files.read_manifest(dense_files.checkpoint_path(tmp_path / "saved", 4)) == before
    again = run(tmp_path, USER_SCRIPT, 2, f"{SAVES} --load saved", log="third")
    assert again.code == 0 and min(again.losses) == 5, again.output[-3000:]
    assert not [*(tmp_path / "saved").glob(".iter*")]


def test_full_disk_is_reported_and_does_not_end_training(tmp_path):
    with mounted(tmp_path / "disk", "2m") as disk:
        flags = f"{EP2} {ZERO1} --save {disk / 'saved'} --save-interval 4"
        ended = run(tmp_path, USER_SCRIPT, 2, flags)
        assert ended.code == 1 and len(ended.losses) == 8, ended.output[-3000:]
        assert {event["what"] for event in ended.of("save_failed")} == {"checkpoint"}
        assert set(codes_in(ended.output)) <= {"storage-unwritable", "disk-full"} and codes_in(ended.output)
        assert not dense_files.list_iterations(disk / "saved") and "Traceback" not in ended.output


def test_old_checkpoints_are_removed_except_retain_interval(tmp_path):
    flags = f"{EP2} {ZERO1} --save saved --save-interval 2 --save-retain-interval 4"
    assert run(tmp_path, USER_SCRIPT, 2, flags).code == 0
    assert dense_files.list_iterations(tmp_path / "saved") == [4, 8]


def test_torch_format_is_saved_and_loaded(tmp_path):
    """--ckpt-format torch, which Megatron-LM writes synchronously; files are in directories of their workers."""
    flags = f"{EP2} --ckpt-format torch"
    saved = run(tmp_path, USER_SCRIPT, 2, f"{flags} --save saved --save-interval 4")
    assert saved.code == 0, saved.output[-4000:]
    described = dense_files.read_manifest(tmp_path / "saved/iter_0000004")["files"]
    weights = [f"mp_rank_00_00{rank}/model_optim_rng.pt" for rank in range(2)]
    assert sorted(described) == [dense_files.DIGESTS_FILE, *weights]
    loaded = run(tmp_path / "again", USER_SCRIPT, 2, f"{flags} --load {tmp_path / 'saved'} --ckpt-step 4")
    assert loaded.losses == {i: saved.losses[i] for i in range(5, 9)}, loaded.output[-4000:]
