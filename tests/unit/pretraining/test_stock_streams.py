"""Readers of Megatron-LM's datasets."""

from types import SimpleNamespace

from megatron.pretraining.process import cpu

cpu.install()

from megatron.pretraining.entry import streams  # noqa: E402


def test_a_split_without_datasets_has_no_data(monkeypatch):
    monkeypatch.setattr(streams, "get_args", lambda: SimpleNamespace(virtual_pipeline_model_parallel_size=None))
    readers = streams.streams_of({"train": (["sample"],), "test": (None,)})
    assert {split: reader.has_data for split, reader in readers.items()} == {"train": True, "test": False}
