"""The samples of an iteration follow from the consumed samples alone."""

import pytest

from tests.integration.tiny import FLAGS, LAYOUTS, train
from tests.worlds import run_world, start_world


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two datasets, of some 30 and 60 samples."""
    directory = tmp_path_factory.mktemp("small")
    for name, documents in (("a", 10), ("b", 20)):
        body = "tests.integration.bodies:write_corpus"
        run_world(1, body, prefix=str(directory / name), documents=documents, seed=documents, vocab_size=255)
    return directory


@pytest.fixture(params=["several epochs", "blend", "separate splits"])
def source(request, small):
    a, b = str(small / "a"), str(small / "b")
    return {
        "several epochs": dict(data_path=[a], split="100,0,0"),
        "blend": dict(data_path=["0.3", a, "0.7", b], split="80,10,10"),
        "separate splits": dict(train_data_path=["1", a, "2", b], valid_data_path=[b]),
    }[request.param] | dict(train_iters=6, global_batch_size=12)


def test_any_data_parallel_size_sees_the_same_samples(source):
    alone = train("1", source)
    assert sorted(alone.samples) == list(range(6))
    for layout, flags in (("DP4", {}), ("PP2", dict(micro_batch_size=3)), ("DP2", dict(micro_batch_size=2))):
        assert train(layout, source | flags).samples == alone.samples


def test_too_few_samples_are_refused(small):
    flags = FLAGS | dict(train_data_path=[str(small / "a"), str(small / "b")], train_iters=100)
    (result,) = start_world(1, "tests.integration.bodies:train", flags=flags).wait()
    assert result.exit == 2 and "give each a weight" in result.output and "Traceback" not in result.output


def test_resume_skips_without_reading(data, tmp_path):
    size, parallel = LAYOUTS["DP2"]
    flags = FLAGS | parallel | data
    body = "tests.integration.bodies:train_counting_reads"
    first = run_world(size, body, flags=flags | dict(save=str(tmp_path), exit_interval=4))
    assert [worker["reads"] for worker in first] == [4 * 4] * 2  # a data loader in the worker does not read ahead
    second = run_world(size, body, flags=flags | dict(load=str(tmp_path)))
    assert [worker["reads"] for worker in second] == [2 * 4] * 2


def test_reader_processes_change_nothing(data):
    assert train("1", data | dict(num_workers=2)).records == train("1", data).records
