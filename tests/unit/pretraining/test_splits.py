"""What a split has is known, and said, before megatron-core looks for samples in it."""

import ast
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from megatron.pretraining.config import ConfigError
from megatron.pretraining.process import cpu

SEQ_LENGTH = 8
SAMPLES = (100, 20, 10)


@pytest.fixture(scope="module")
def splits():
    """The module; importing megatron-core takes seconds."""
    cpu.install()
    from megatron.pretraining.data import splits

    return splits


@pytest.fixture
def write(tmp_path):
    """Writes a dataset with documents of these lengths, by megatron-core's own writer; gives its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_idx_path

    def write(name, *lengths):
        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        for length in lengths:
            builder.add_document(numpy.ones(length, dtype=numpy.uint16), [length])
        builder.finalize(get_idx_path(prefix))
        return prefix

    return write


def core_config(**sources):
    """megatron-core's, as the flags would have it made."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    plain = dict(reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False)
    tokenizer = SimpleNamespace(vocab_size=100, eod=0, unique_identifiers={})
    return GPTDatasetConfig(random_seed=1, sequence_length=SEQ_LENGTH, tokenizer=tokenizer, **plain, **sources)


def refusal(splits, config, samples=SAMPLES):
    """The sentences, or None where all splits have what it takes."""
    splits.drop_unread(config, samples)
    try:
        splits.refuse_empty(splits.splits_of(config, samples), config)
    except ConfigError as error:
        assert all(problem.code == "split-empty" for problem in error.problems)
        return str(error)
    return None


def test_empty_default_split_of_small_corpus_is_refused(splits, write):
    small = write("small", *[50] * 10)
    said = refusal(splits, core_config(blend=([small], None), split="969,30,1"))
    assert re.search(rf"valid .*\(969,30,1\) of {small} .* 10 .*--split.*--eval-iters 0", said)
    assert re.search(r"train .*\(1,998,1\)", refusal(splits, core_config(blend=([small], None), split="1,998,1")))


def test_each_remedy_is_accepted(splits, write):
    small, large = write("small", *[50] * 10), write("large", *[50] * 1000)
    default = "969,30,1"
    assert refusal(splits, core_config(blend=([large], None), split=default)) is None
    assert refusal(splits, core_config(blend=([small], None), split="80,10,10")) is None
    assert refusal(splits, core_config(blend=([small], None), split="90,10,0")) is None
    assert refusal(splits, core_config(blend=([small], None), split=default), (100, 0, 0)) is None


def test_unread_split_is_not_built(splits, write):
    config = core_config(blend=([write("small", *[50] * 10)], None), split="80,10,10")
    splits.drop_unread(config, (100, 0, 10))
    assert config.split_matrix[0] and config.split_matrix[1] is None and config.split_matrix[2]
    assert [split.name for split in splits.splits_of(config, (100, 0, 10))] == ["train", "test"]


def test_split_without_tokens_is_refused(splits, write):
    hollow = write("hollow", 0, 0, 0)
    said = refusal(splits, core_config(blend=([hollow], None), split="1,1,1"))
    train = said.splitlines()[0]
    assert re.search(r"train .*\(1,1,1\).*\(1\)", train) and "--eval-iters" not in train


def test_dataset_without_documents_is_refused(splits, write):
    said = refusal(splits, core_config(blend=([write("nothing")], None), split="1,1,1"))
    assert re.search("train .*nothing", said)


def test_every_dataset_of_blend_is_checked(splits, write):
    large, small = write("large", *[50] * 1000), write("small", *[50] * 10)
    blend = ([large, small], [0.99, 0.01])
    assert f"of {small} " in refusal(splits, core_config(blend=blend, split="969,30,1"))
    assert refusal(splits, core_config(blend=blend, split="80,10,10")) is None


def test_dataset_read_once_must_yield_a_sample(splits, write):
    large, short = write("large", *[50] * 100), write("short", SEQ_LENGTH)
    said = refusal(splits, core_config(blend=([large, short], None), split="1,0,0"))
    assert re.search(f"{short} .* 8 .*--seq-length 8", said)
    assert refusal(splits, core_config(blend=([large, short], [0.5, 0.5]), split="1,0,0")) is None
    enough = write("enough", SEQ_LENGTH + 1)
    assert refusal(splits, core_config(blend=([large, enough], None), split="1,0,0")) is None


def test_empty_split_of_separate_files_is_refused(splits, write):
    large, hollow = write("large", *[50] * 100), write("hollow", 0)
    per_split = [([large], None), ([hollow], None), None]
    said = refusal(splits, core_config(blend_per_split=per_split))
    assert re.search(rf"^--valid-data-path {hollow} .*\(1\).*--eval-iters 0", said) and "--split" not in said
    assert refusal(splits, core_config(blend_per_split=per_split), (100, 0, 0)) is None


def test_token_counts_equal_those_of_megatron_core(splits, write):
    lengths = [3, 0, 7, 50, 1, 0]
    corpus = splits.IndexedCorpus(write("mixed", *lengths))
    for start in range(len(lengths) + 1):
        for end in range(start, len(lengths) + 1):
            assert corpus.tokens(start, end) == sum(lengths[start:end])


def test_document_and_epoch_counts_equal_megatron_core(splits, write):
    """Also where shares round: what is counted is what the datasets then hold."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    prefix = write("odd", *range(10, 47))
    config = core_config(blend=([prefix], None), split="70,17,13")
    built = BlendedMegatronDatasetBuilder(GPTDataset, list(SAMPLES), lambda: True, config).build()
    for split, dataset in zip(splits.splits_of(config, SAMPLES), built, strict=True):
        (source,) = split.sources
        assert source.documents == len(dataset.indices)
        assert source.tokens == dataset._get_num_tokens_per_epoch()
        epochs = dataset._get_num_epochs(source.tokens)
        assert epochs - 1 < source.epochs(SEQ_LENGTH) <= epochs


def test_split_description_has_documents_tokens_and_epochs(splits, write):
    one, two = write("one", *[50] * 100), write("two", *[10] * 100)
    told = splits.splits_of(core_config(blend=([one], None), split="80,10,10"), SAMPLES)
    assert [split.describe(SEQ_LENGTH) for split in told] == [
        "train: 80 documents, 4,000 tokens, 0.2 epochs",
        "valid: 10 documents, 500 tokens, 0.32 epochs",
        "test: 10 documents, 500 tokens, 0.16 epochs",
    ]
    (train,) = splits.splits_of(core_config(blend=([one, two], [3, 1]), split="1,0,0"), (1000, 0, 0))
    assert train.describe(SEQ_LENGTH) == "train: 200 documents in 2 datasets, 6,000 tokens, 1.2 to 2 epochs"
    for samples, epochs in (((1, 0, 0), "under 0.01"), ((1_000_000, 0, 0), "2,000")):
        train, *_ = splits.splits_of(core_config(blend=([one], None), split="80,0,20"), samples)
        assert train.describe(SEQ_LENGTH).endswith(f" tokens, {epochs} epochs")


def test_mock_data_is_never_empty(splits):
    config = core_config()
    assert refusal(splits, config) is None
    train, *_ = splits.splits_of(config, SAMPLES)
    assert train.sources[0].documents == 33333 and train.sources[0].tokens > 33333


def test_each_setting_of_datasets_is_passed_or_refused():
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    import megatron.pretraining.entry

    (source,) = megatron.pretraining.entry.__path__
    calls = (node for node in ast.walk(ast.parse(Path(source, "gpt.py").read_text())) if isinstance(node, ast.Call))
    passed = next(call.keywords for call in calls if getattr(call.func, "id", "") == "GPTDatasetConfig")
    fields = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    of_refused_options = """
        multiple_validation_sets full_validation object_storage_cache_path fast_cache_load defer_npy_index_mmap
        sequences_per_dataset inter_document_masking hybrid_context_parallel data_parallel_size sequence_parallel_size
        context_parallel_size
    """.split()
    without_option = ["drop_last_partial_validation_sequence", "add_extra_token_to_sequence"]
    assert fields - {keyword.arg for keyword in passed} == {*of_refused_options, *without_option}
