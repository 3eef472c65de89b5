"""The samples of an iteration follow from the consumed samples alone."""

from pathlib import Path

import pytest

from moc.errors import codes_in
from tests.integration.tiny import FLAGS, FOUR, LAYOUTS, known, train
from tests.worlds import run_world, start_world

BODY = "tests.integration.bodies:train"


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
    files = {
        "several epochs": dict(data_path=[a], split="100,0,0"),
        "blend": dict(data_path=["0.3", a, "0.7", b], split="80,10,10"),
        "separate splits": dict(train_data_path=["1", a, "2", b], valid_data_path=[b]),
    }
    return files[request.param] | dict(train_iters=6, global_batch_size=12)


def test_every_data_parallel_size_reads_same_samples(source):
    alone = train("1", source)
    assert sorted(alone.samples) == list(range(6))
    for layout, flags in (("DP4", {}), ("PP2", dict(micro_batch_size=3)), ("DP2", dict(micro_batch_size=2))):
        assert train(layout, source | flags).samples == alone.samples


def test_too_few_samples_are_refused(small):
    flags = FLAGS | dict(train_data_path=[str(small / "a"), str(small / "b")], train_iters=200)
    (result,) = start_world(1, BODY, flags=flags).wait()
    assert result.exit == 2 and codes_in(result.output) == ["samples-too-few"] and "Traceback" not in result.output


def test_cyclic_order_continues_only_at_whole_micro_batches(small, tmp_path):
    flags = FLAGS | dict(data_path=[str(small / "a")], split="100,0,0", eval_iters=0, dataloader_type="cyclic")
    flags |= dict(save=str(tmp_path), load=str(tmp_path), train_iters=6, override_opt_param_scheduler=True)
    (saved,) = start_world(1, BODY, flags=flags | dict(global_batch_size=4, exit_interval=1)).wait()
    assert not saved.exit, saved.output[-4000:]
    (result,) = start_world(1, BODY, flags=flags | dict(global_batch_size=6, micro_batch_size=3)).wait()
    assert result.exit == 2 and codes_in(result.output) == ["batch-not-divisible"] and "Traceback" not in result.output


def test_empty_split_is_refused_by_all_workers(small):
    """Also by those of the stages in the middle, which read no data: nobody waits for the others."""
    size, parallel = LAYOUTS["PP4"]
    flags = FLAGS | parallel | dict(data_path=[str(small / "a")], train_iters=1, eval_iters=1)
    results = start_world(size, BODY, timeout=120, flags=flags).wait()
    for result in results:
        assert result.exit == 2 and {*codes_in(result.output)} == {"split-empty"}, result.output
        assert "Traceback" not in result.output


@pytest.mark.recovery
def test_resume_skips_samples_without_reading_them(data, tmp_path):
    """Going on from a checkpoint, or after a kill: nothing is read of what was before, nor worked out anew."""
    size, parallel = LAYOUTS["DP2"]
    body, flags = "tests.integration.bodies:train_counting_reads", FLAGS | parallel | data | FOUR
    first = run_world(size, body, flags=flags | dict(save=str(tmp_path / "dense"), exit_interval=4))
    built = indices_of(data)
    second = run_world(size, body, flags=flags | dict(load=str(tmp_path / "dense")))
    snapshots = dict(ckpt_policy="pec", ckpt_dir=str(tmp_path / "c"), snapshot_interval=1, ckpt_blocking=True)
    start_world(size, "tests.integration.pec_bodies:die_after", flags=flags | snapshots, iteration=5).wait()
    third = run_world(size, body, flags=flags | snapshots)
    for told, start, end in ((first, 0, 4), (second, 4, 6), (third, 5, 6)):  # and nobody reads ahead
        assert sorted(sample for worker in told for sample in worker["reads"]) == list(range(4 * start, 4 * end))
    for earlier, later in zip(second, third, strict=True):
        assert 0 < len(later["pieces"]) < len(earlier["pieces"])
        assert earlier["pieces"][-len(later["pieces"]) :] == later["pieces"]
    assert built and indices_of(data) == built


def indices_of(data: dict) -> dict[str, tuple[int, int]]:
    """When the files were written that say where samples are, and which these are."""
    files = Path(data["data_path"][0]).parent.rglob("cache/**/*")
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files if path.is_file()}


def test_reader_processes_do_not_change_training(data):
    assert train("1", data | dict(num_workers=2)).records == known("1", data).records
