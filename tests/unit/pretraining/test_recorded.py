"""The implementation of the optimizer and the data, which snapshots record."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron.pretraining.process import cpu

cpu.install()

from megatron.pretraining.checkpoint import contents  # noqa: E402
from megatron.pretraining.data.identity import DataIdentity, Fingerprint, Source  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.configs import config_of  # noqa: E402
from tests.errors import raises  # noqa: E402

FLAGS = dict(
    num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=16, num_experts=4, micro_batch_size=1,
    train_iters=1, lr=1e-3, mock_data=True, tokenizer_type="NullTokenizer", vocab_size=100,
)  # fmt: skip


class Optimizer:
    """An optimizer whose updates are made by the classes of some packages."""

    def __init__(self, *packages: str):
        adams = [type("Adam", (), {"__module__": f"{package}.optimizers"})() for package in packages]
        each = [SimpleNamespace(optimizer=adam, is_stub_optimizer=False) for adam in adams]
        self.core = SimpleNamespace(chained_optimizers=each)


def test_other_optimizer_implementation_gives_warning():
    here, told = Optimizer("torch", "torch"), []
    for there in ("torch", None, "transformer_engine"):
        contents.warn_of_other_package(here, {"optimizer_package": there}, told.append)
    assert len(told) == 1 and "transformer_engine" in told[0] and "torch" in told[0]
    assert contents.package_of(Optimizer("torch", "apex").core) == "apex, torch"


def test_window_of_other_implementation_is_refused_if_exact():
    saved, exact = {"optimizer_package": "transformer_engine"}, FLAGS | dict(ckpt_policy="sparse", ckpt_dir="x")
    with pytest.raises(CheckpointError, match="--allow-nondeterministic"):
        contents.check_package(config_of(exact), Optimizer("torch"), saved, "there")
    contents.check_package(config_of(exact), Optimizer("transformer_engine"), saved, "there")
    contents.check_package(config_of(exact | dict(allow_nondeterministic=True)), Optimizer("torch"), saved, "there")
    contents.check_package(config_of(exact), Optimizer("torch"), {}, "there")


def data_of(train: str, valid: str) -> DataIdentity:
    """Data with these contents."""
    contents = {"train": train, "valid": valid}
    return DataIdentity(
        tuple(Source(split, split, Fingerprint(1, 1, name * 32, "0" * 32)) for split, name in contents.items()), None
    )


SAVED = {"data": data_of("a", "b").plain()}


def test_other_training_data_are_refused_unless_allowed():
    with raises("data-changed", "there", "--allow-changed-data"):
        contents.check_data(config_of(FLAGS), data_of("c", "b"), SAVED, "there")
    contents.check_data(config_of(FLAGS | dict(allow_changed_data=True)), data_of("c", "b"), SAVED, "there")
    for data, saved in ((data_of("a", "c"), SAVED), (None, SAVED), (data_of("a", "b"), {})):
        contents.check_data(config_of(FLAGS), data, saved, "there")


def test_other_validation_data_give_warning():
    told = []
    contents.warn_of_other_data(data_of("a", "c"), SAVED, told.append)
    assert len(told) == 1 and "valid" in told[0]


def test_only_unchanged_moved_data_keep_sample_order():
    config, told = config_of(FLAGS | dict(mock_data=False, data_path=["moved"])), []
    world = SimpleNamespace(size=1)
    before = contents.sample_order(config, world)
    data = DataIdentity((Source("train", "moved", Fingerprint(1, 1, "a" * 32, "0" * 32)),), None)
    saved = {"data": data_of("a", "b").plain(), "sample_order": before | dict(data_path=["train"])}
    contents.warn_of_other_samples(config, world, data, saved, told.append)
    assert told == []
    contents.warn_of_other_samples(config, world, None, saved, told.append)
    assert len(told) == 1 and "data path" in told[0]


ARGUMENTS = dict(
    data_sharding=True, mid_level_dataset_surplus=0.005, fim_data=False, fim_rate=0.5,
    fim_split_sample=None, fim_pad_token="<fim_pad>", reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False, num_dataset_builder_threads=1, data_cache_path=None, mmap_bin_files=True,
)  # fmt: skip


def warnings_of(before, here, size=2):
    """Warnings of a run in 2 workers that is saved with some flags and continued with others in ``size`` workers."""

    def config(flags):
        return dataclasses.replace(
            config_of(FLAGS | {name: value for name, value in flags.items() if name not in ARGUMENTS}),
            arguments=SimpleNamespace(**ARGUMENTS | flags),
        )

    told, saved = [], {"sample_order": contents.sample_order(config(before), SimpleNamespace(size=2))}
    contents.warn_of_other_samples(config(here), SimpleNamespace(size=size), None, saved, told.append)
    return told


@each_row(
    "change, is_named",
    [
        (dict(seed=7), True),
        (dict(seq_length=32), True),
        (dict(split="9,1,0"), True),
        (dict(vocab_size=101), True),
        (dict(dataloader_type="cyclic"), True),
        (dict(data_sharding=False), True),
        (dict(mid_level_dataset_surplus=0.1), True),
        (dict(fim_data=True), True),
        (dict(fim_rate=0.1), True),
        (dict(fim_split_sample="x"), True),
        (dict(fim_pad_token="x"), True),
        (dict(reset_position_ids=True), True),
        (dict(reset_attention_mask=True), True),
        (dict(eod_mask_loss=True), True),
        (dict(num_dataset_builder_threads=4), False),
        (dict(data_cache_path="elsewhere"), False),
        (dict(mmap_bin_files=False), False),
    ],
)
def test_changed_flags_of_samples_are_named(change, is_named):
    told = warnings_of({}, change)
    (name,) = change
    assert any(name.replace("_", " ") in line for line in told) if is_named else not told
    assert warnings_of(change, change) == []


def test_cyclic_loader_order_depends_on_worker_count():
    cyclic = dict(dataloader_type="cyclic", global_batch_size=4)
    assert warnings_of(cyclic, cyclic) == [] and len(warnings_of(cyclic, cyclic, size=4)) == 1
    single = dict(dataloader_type="single", global_batch_size=4)
    assert warnings_of(single, single, size=4) == []


def test_samples_in_another_order_are_named_without_another_flag():
    config, world, told = config_of(FLAGS), SimpleNamespace(size=1), []

    def data(order):
        return DataIdentity((Source("train", "text", Fingerprint(1, 1, "a" * 32, "0" * 32), order),), None)

    saved = {"data": data("1" * 32).plain(), "sample_order": contents.sample_order(config, world)}
    for order in ("1" * 32, None):
        contents.warn_of_other_samples(config, world, data(order), saved, told.append)
    assert told == []
    contents.warn_of_other_samples(config, world, data("2" * 32), saved, told.append)
    assert len(told) == 1 and "text" in told[0]
