"""The process that writes a checkpoint beside training."""

import errno
import functools
import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.pretraining.process import cpu
from moc.errors import codes_in
from moc.runtime import child_processes
from moc.store import dense_files
from tests.errors import raises
from tests.unit.pretraining.test_data import descriptors_of


@pytest.fixture(scope="module")
def writer():
    """The module; importing megatron-core takes seconds."""
    cpu.install()
    from megatron.pretraining.checkpoint import writer

    return writer


def tell(device: Path, told: Path) -> None:
    """Stands for what writes weights: notes how often its process, and one that it forks, hold a device."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: told.write_text(json.dumps([held, descriptors_of(device)])))
    held = descriptors_of(device)
    child.start()
    child.join()


def test_writer_process_and_its_children_hold_no_gpu(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(child_processes, "GPU_DEVICES", str(tmp_path / "nvidia"))
    with open(tmp_path / "nvidia0", "wb"):
        arguments = (tell, tmp_path, 0, None, tmp_path / "nvidia0", tmp_path / "told")
        process = multiprocessing.get_context("fork").Process(target=writer.write_files, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode == 0 and json.loads((tmp_path / "told").read_text()) == [0, 0]
        assert descriptors_of(tmp_path / "nvidia0") == 1


def test_error_of_full_disk_is_reported(writer, tmp_path, monkeypatch):
    """The part of a file that was written takes the room of the report."""
    staging, write_durably = dense_files.begin_save(tmp_path, 1), writer.write_durably
    shard = writer.path_of(staging, 0)

    def fill_disk(path, entries):
        path.write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_if_room(path, text):
        if shard.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_durably(path, text)

    monkeypatch.setattr(writer, "write_shard_file", fill_disk)
    monkeypatch.setattr(writer, "write_durably", write_if_room)
    process = multiprocessing.get_context("fork").Process(target=writer.write_files, args=(None, staging, 0, []))
    process.start()
    process.join(60)
    with raises("storage-unwritable", "No space left on device"):
        writer.commit(tmp_path, 1, 1, None)


class LookingSaves:
    """Looks for checkpoints without a job."""

    def __init__(self, save, background):
        self._config, self._log = SimpleNamespace(checkpoint=SimpleNamespace(save=save)), SimpleNamespace(message=print)
        self.look = functools.partial(background.Saves.look, self)
        self.newest_saved = functools.partial(background.Saves.newest_saved, self)


def test_unreadable_directory_ends_no_recovery(writer, tmp_path, capsys):
    from megatron.pretraining.checkpoint import background

    saves = LookingSaves(str(tmp_path / ("x" * 300)), background)
    assert saves.newest_saved(5.0) is None and codes_in(capsys.readouterr().out) == ["storage-silent"]
    with pytest.raises(OSError):  # a start needs the directory
        saves.look(None, lambda: dense_files.latest_iteration(saves._config.checkpoint.save))
