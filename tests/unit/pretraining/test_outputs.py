"""Directories that cannot be written are refused before training."""

from types import SimpleNamespace

import pytest

from megatron.pretraining.config import ConfigError
from megatron.pretraining.process.outputs import check_outputs
from tests.unit.pretraining.flags import parse

FLAGS = ("--save", "--log-dir", "--tensorboard-dir", "--data-cache-path")


def job(rank=0, others_wait=False, has_begun_before=False):
    return SimpleNamespace(rank=rank, others_wait=others_wait, has_begun_before=has_begun_before)


@pytest.mark.parametrize("flag", FLAGS)
def test_each_directory_is_checked(flag, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for wrong in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/nowhere"):
        config = parse(f"{flag} {wrong}")
        with pytest.raises(ConfigError, match=f"{flag} {wrong} "):
            check_outputs(config, job())
        for one in (job(rank=1), job(others_wait=True), job(has_begun_before=True)):
            check_outputs(config, one)


def test_directories_that_can_be_written_are_made_and_empty(tmp_path):
    check_outputs(parse(" ".join(f"{flag} {tmp_path}/new/{flag}" for flag in FLAGS)), job())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FLAGS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    check_outputs(parse(""), job())
