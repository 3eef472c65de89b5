"""Readers of Megatron-LM's datasets."""

import os
import signal
import time
from multiprocessing import Process, active_children
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron.pretraining.process import cpu
from moc.errors import codes_in
from moc.runtime import child_processes

cpu.install()

from megatron.core import num_microbatches_calculator as calculators  # noqa: E402

from megatron.pretraining.entry import schedule, streams  # noqa: E402
from tests.errors import raises  # noqa: E402


def test_split_without_datasets_has_no_data(monkeypatch):
    monkeypatch.setattr(streams, "get_args", lambda: SimpleNamespace(virtual_pipeline_model_parallel_size=None))
    readers = streams.streams_of({"train": (["sample"],), "test": (None,)}, {"train": None, "test": None})
    assert {split: reader.has_data for split, reader in readers.items()} == {"train": True, "test": False}


class _Held:
    """A sample is the number of descriptors of a file in the process that reads it."""

    def __init__(self, file: Path):
        self.file = file

    def __len__(self):
        return 8

    def __getitem__(self, index):
        names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.path.lexists(name) and os.readlink(name) == str(self.file) for name in names)


def _read(file: Path) -> tuple[streams.StockStream, int]:
    stream = streams.StockStream([_Held(file)], interleaved=False, evaluates=False)
    reader = stream._reader_at(0, 0)
    stream._readers = [reader]
    return stream, int(next(reader))


def _patch(monkeypatch, tmp_path, begun):
    monkeypatch.setattr(streams, "get_args", lambda: SimpleNamespace(dataloader_type="external"))
    monkeypatch.setattr(child_processes, "GPU_DEVICES", str(tmp_path / "nvidia"))
    monkeypatch.setattr(
        streams,
        "build_pretraining_data_loader",
        lambda dataset, _: torch.utils.data.DataLoader(
            dataset, num_workers=1, worker_init_fn=lambda number: begun.touch()
        ),
    )


def test_readers_hold_no_gpu_and_run_loader_init(monkeypatch, tmp_path):
    _patch(monkeypatch, tmp_path, tmp_path / "begun")
    with open(tmp_path / "nvidia0", "wb"):
        stream, held = _read(tmp_path / "nvidia0")
        assert held == 0 and (tmp_path / "begun").exists()
        stream.close()


def test_readers_end_with_their_worker(monkeypatch, tmp_path):
    _patch(monkeypatch, tmp_path, tmp_path / "begun")
    monkeypatch.setattr(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 1e6)  # torch itself never looks

    def work():
        stream, _ = _read(tmp_path / "nvidia0")
        (tmp_path / "pid.new").write_text(str(active_children()[0].pid))
        os.rename(tmp_path / "pid.new", tmp_path / "pid")
        signal.pause()
        stream.close()

    worker = Process(target=work)
    worker.start()
    while not (tmp_path / "pid").exists():
        assert worker.is_alive()
        time.sleep(0.01)
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    worker.kill()
    worker.join()
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_forward_step_receives_options_of_schedule():
    """With --overlap-moe-expert-parallel-comm, schedules ask for a plan of the layers."""
    step = schedule.reporting(lambda batches, chunk, return_schedule_plan=False: (return_schedule_plan, None), None)
    one = object.__new__(schedule.StockSchedule)
    one._forward_step, one._hooks = step, SimpleNamespace(run_micro_batch=lambda compute: compute())
    assert one._one_micro_batch(None, None, return_schedule_plan=True)[0] and not one._one_micro_batch(None, None)[0]


def test_loss_function_must_report_a_value():
    with raises("loss-report-invalid"):
        schedule.Reports.add(object.__new__(schedule.Reports), {})


def test_data_for_growing_batches_must_last(monkeypatch):
    args = SimpleNamespace(
        step_batch_size_schedule="0:4,4:8", train_iters=3, train_samples=None, dataloader_type="single"
    )
    monkeypatch.setattr(schedule, "get_args", lambda: args)
    calculators.unset_num_microbatches_calculator()
    calculators.init_num_microbatches_calculator(0, None, None, 1, 1, False, args.step_batch_size_schedule)
    try:
        assert codes_in(schedule.problem_of_length([range(19)])) == ["samples-too-few"]  # of 4 + 8 + 8
        assert schedule.problem_of_length([range(20)]) is None and schedule.problem_of_length([None]) is None
        assert calculators.get_current_global_batch_size() == 4
    finally:
        calculators.unset_num_microbatches_calculator()
