"""Data that are damaged, replaced, or different on nodes: one coded sentence before iteration 1, or the right samples.

Each worker is a node: its directory has a copy of the data and of the cache of sample indices, to which the flags refer
by relative paths.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest

from megatron.pretraining.data import identity, preprocess, tokenizer_training
from moc.errors import codes_in
from tests.integration.entry_jobs import BASE
from tests.integration.entry_jobs import run as run_script
from tests.integration.tiny import FLAGS
from tests.worlds import Result, start_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PREFIX = "data/tokens_text_document"
TEXTS = {"old": "the cat sat on the mat and {} dogs saw it\n", "new": "{} ships sail over the sea to a far land\n"}
RUN = {name: value for name, value in FLAGS.items() if name != "vocab_size"} | dict(
    tokenizer_type="SentencePieceTokenizer", tokenizer_model="tokenizer.model", data_path=[PREFIX], split="90,10,0",
    data_cache_path="cache", train_iters=4, global_batch_size=2,
)  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A run of two nodes that has saved iteration 2.

    Attributes:
        root: has the directories of the nodes, ``new`` data, a tokenizer, and what the run saved.
        samples: what all workers of an uninterrupted run have read, by iteration.
    """

    root: Path
    samples: dict[str, list[str]] = field(default_factory=dict)


def write_data(root: Path, name: str, text: str) -> None:
    """Writes a tokenizer, and data that it has tokenized, below ``root/name``."""
    (root / name / "data").mkdir(parents=True)
    (root / f"{name}.txt").write_text("".join(text.format(number) for number in range(3000)))
    words = f"--input {root}/{name}.txt --output {root}/{name}/tokenizer --vocab-size 300 --num-threads 1"
    assert tokenizer_training.main(words.split()) == 0
    preprocess_text(root / name, root / f"{name}.txt", root / name / "tokenizer.model")


def preprocess_text(node: Path, text: Path, tokenizer: Path) -> None:
    words = f"--input {text} --output-prefix {node}/data/tokens --tokenizer-model {tokenizer} --workers 1"
    assert preprocess.main(f"{words} --append-eod --split-on-regex 7 --overwrite".split()) == 0


def run(root: Path, size: int = 2, **flags) -> list[Result]:
    """Trains on nodes in ``root``, for one iteration more than the saved run unless ``flags`` differ."""
    nodes = [str(root / f"node{rank}") for rank in range(size)]
    return start_world(size, "tests.reports.identity_bodies:train_on_nodes", flags=RUN | flags, nodes=nodes).wait()


def samples_of(results: list[Result]) -> dict[str, list[str]]:
    """The samples of all workers, by iteration."""
    failed = [result.output[-3000:] for result in results if result.exit != 0]
    assert not failed, "\n\n".join(failed)  # text, which pytest does not shorten
    read = [result.value["samples"] for result in results]
    return {iteration: sorted(sum((one[iteration] for one in read), [])) for iteration in read[0]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """Case 1: each node has its own copy of the data, and its own cache, which it builds."""
    root = tmp_path_factory.mktemp("identity")
    for name, text in TEXTS.items():
        write_data(root, name, text)
    for rank in range(2):
        shutil.copytree(root / "old", root / f"node{rank}")
    whole = samples_of(run(root))
    keeps = dict(save=f"{root}/saved", ckpt_policy="full", ckpt_dir=f"{root}/snapshots", snapshot_interval=1)
    assert samples_of(run(root, exit_interval=2, **keeps)) == {number: whole[number] for number in "01"}
    caches = [sorted(path.name for path in (root / f"node{rank}/cache").glob("*.npy")) for rank in range(2)]
    assert caches[0] and caches[0] == caches[1]
    return Saved(root, whole)


@pytest.fixture
def job(saved, tmp_path) -> Saved:
    """A copy of that run, which a test may change."""
    shutil.copytree(saved.root, tmp_path / "job")
    return Saved(tmp_path / "job", saved.samples)


DENSE, SNAPSHOT = "load", "ckpt_dir"


def resumed(job: Saved, kind: str, size: int = 2, **flags) -> list[Result]:
    """Continues the run from its checkpoint or its snapshot."""
    of_kind = {
        DENSE: dict(load=f"{job.root}/saved"),
        SNAPSHOT: dict(ckpt_policy="full", ckpt_dir=f"{job.root}/snapshots"),
    }
    return run(job.root, size, **of_kind[kind], **flags)


def nodes(job: Saved, count: int = 2) -> list[Path]:
    return [job.root / f"node{rank}" for rank in range(count)]


def replace(job: Saved, *suffixes: str, count: int = 2) -> None:
    """Replaces files of the data by those of other data."""
    for node in nodes(job, count):
        for suffix in suffixes or (".bin", ".idx", identity.SUFFIX):
            shutil.copy(job.root / f"new/{PREFIX}{suffix}", node / f"{PREFIX}{suffix}")


def retokenize(job: Saved) -> None:
    """Gives the nodes another tokenizer of the same size, and no record of the tokenizer of the data."""
    for node in nodes(job):
        shutil.copy(job.root / "new/tokenizer.model", node / "tokenizer.model")
        (node / f"{PREFIX}{identity.SUFFIX}").unlink()


def refused(results: list[Result], code: str) -> None:
    """Asserts that the job ended with this code before its first iteration."""
    output = "".join(result.output for result in results)
    assert {*codes_in(output)} == {code} and "Traceback" not in output, output[-4000:]
    assert any(result.exit > 0 for result in results) and not re.search(r" iteration +\d+/", output)


@pytest.mark.parametrize("kind", [DENSE, SNAPSHOT])
def test_resume_reads_next_samples(job, kind):
    results = resumed(job, kind)
    assert samples_of(results) == {number: job.samples[number] for number in "23"}
    assert "WARNING: " not in results[0].output


def test_resume_with_moved_data_reads_next_samples(job):
    for node in nodes(job):
        (node / "data").rename(node / "elsewhere")
    results = resumed(job, DENSE, data_path=[PREFIX.replace("data", "elsewhere")])
    assert samples_of(results) == {number: job.samples[number] for number in "23"}
    assert "WARNING: " not in results[0].output


@pytest.mark.parametrize("kind", [DENSE, SNAPSHOT])
def test_resume_with_replaced_data_is_refused(job, kind):
    replace(job, ".bin", ".idx", identity.SUFFIX)
    for node in nodes(job):  # so that only the data differ
        (node / f"{PREFIX}{identity.SUFFIX}").unlink()
    refused(resumed(job, kind), "data-changed")


def test_resume_with_replaced_data_continues_if_allowed(job):
    replace(job)
    results = resumed(job, DENSE, allow_changed_data=True, tokenizer_model=f"{job.root}/new/tokenizer.model")
    read = samples_of(results)
    assert read.keys() == {"2", "3"} and read["2"] != job.samples["2"]
    assert "WARNING: the train data changed" in results[0].output


def test_resume_with_other_tokenizer_of_same_size_is_refused(job):
    retokenize(job)
    refused(resumed(job, SNAPSHOT), "data-changed")


def test_data_of_another_tokenizer_are_refused(job):
    refused(run(job.root, 1, tokenizer_model=f"{job.root}/new/tokenizer.model"), "data-of-other-tokenizer")


def test_new_run_with_replaced_data_ignores_old_cache(job):
    retokenize(job)  # paths stay the same
    replace(job)
    cached = samples_of(run(job.root))
    for node in nodes(job):
        shutil.rmtree(node / "cache")
    assert cached == samples_of(run(job.root)) != job.samples


def test_incomplete_bin_file_on_node_is_refused(job):
    with open(nodes(job)[1] / f"{PREFIX}.bin", "r+b") as file:
        file.truncate(1000)
    refused(run(job.root), "data-damaged")


def test_sparse_bin_file_of_right_size_is_refused(job):
    data = nodes(job)[1] / f"{PREFIX}.bin"
    size = data.stat().st_size
    with open(data, "r+b") as file:
        file.truncate(size // 2)
        file.truncate(size)
    refused(run(job.root), "data-changed")


def test_index_of_other_data_is_refused(job):
    replace(job, ".idx", count=1)
    refused(run(job.root, 1), "data-damaged")


@pytest.mark.parametrize("left", [0, 20, 500])
def test_truncated_index_is_refused(job, left):
    with open(nodes(job)[0] / f"{PREFIX}.idx", "r+b") as file:
        file.truncate(left)
    refused(run(job.root, 1), "data-damaged")


def test_damaged_fingerprint_file_is_refused(job):
    (nodes(job)[0] / f"{PREFIX}{identity.SUFFIX}").write_text('{"bin_bytes": 1')
    refused(run(job.root, 1), "data-damaged")


def test_other_data_on_node_are_refused(job):
    for node, seed in zip(nodes(job), (0, 1), strict=True):
        (node / f"{PREFIX}{identity.SUFFIX}").unlink()
        write_ids(node, numpy.random.default_rng(seed).integers(0, 300, 4000))
    refused(run(job.root), "data-differs-between-nodes")


def test_token_ids_outside_vocabulary_are_refused(job):
    (nodes(job)[0] / f"{PREFIX}{identity.SUFFIX}").unlink()
    write_ids(nodes(job)[0], numpy.arange(4000) % 301)
    refused(run(job.root, 1), "token-id-out-of-range")


def test_unsampled_bad_token_ids_are_refused_when_read(job):
    """A start reads a mebibyte of each file, and an iteration checks its own samples."""
    (nodes(job)[0] / f"{PREFIX}{identity.SUFFIX}").unlink()
    ids = numpy.full(8_000_000, 301)
    for start, length in identity.sampled_blocks(2 * len(ids)):
        ids[start // 2 : (start + length) // 2] = 1
    write_ids(nodes(job)[0], ids)
    refused(run(job.root, 1), "token-id-out-of-range")


def write_ids(node: Path, ids: numpy.ndarray) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{node}/{PREFIX}.bin", dtype=numpy.uint16)
    for document in numpy.split(ids, 40):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{node}/{PREFIX}.idx")


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty directory"])
def test_damaged_cache_on_node_is_rebuilt(job, damage):
    for path in sorted((nodes(job)[1] / "cache").glob("*index.npy")):
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-8])
        elif damage == "empty directory" or "shuffle" in path.name:
            path.unlink()
    assert samples_of(run(job.root)) == job.samples


def test_cache_with_other_indices_on_node_is_refused(job):
    (path,) = (nodes(job)[1] / "cache").glob("*train-shuffle_index.npy")
    numpy.save(path, numpy.load(path)[::-1].copy())
    refused(run(job.root), "data-differs-between-nodes")


def test_cache_with_other_blend_order_on_one_node_is_refused(job):
    for node in nodes(job):
        shutil.copytree(job.root / "new/data", node / "more")
    blend = dict(data_path=["0.3", PREFIX, "0.7", "more/tokens_text_document"], allow_changed_data=True)
    mixed = samples_of(run(job.root, **blend))
    assert mixed != job.samples and samples_of(run(job.root, **blend)) == mixed
    for path in (nodes(job)[1] / "cache").glob("*BlendedDataset-train-dataset_*index.npy"):
        numpy.save(path, numpy.load(path)[::-1].copy())
    refused(run(job.root, **blend), "data-differs-between-nodes")


def test_unwritable_cache_is_refused(job):
    (nodes(job)[0] / PREFIX).write_text("where megatron-core would make a directory")
    refused(run(job.root, 1, data_cache_path=None), "index-cache-unusable")


def test_user_script_with_replaced_data_is_refused(job):
    """Its checkpoints have only Megatron-LM's files, and ``data.json``."""
    base = BASE.replace("--mock-data", f"--data-path {PREFIX} --split 90,10,0")
    base = base.replace("NullTokenizer", "SentencePieceTokenizer --tokenizer-model tokenizer.model")
    (node,) = nodes(job, 1)

    def trained(flags: str):
        return run_script(node, Path(__file__).with_name("data_script.py"), 1, flags, base=base.replace("256", "300"))

    first = trained("--save stock --save-interval 2 --exit-interval 2")
    assert first.code == 0 and (node / "stock/iter_0000002/data.json").is_file(), first.output[-4000:]
    assert trained("--load stock --exit-interval 4").code == 0
    replace(job, ".bin", ".idx", count=1)
    (node / f"{PREFIX}{identity.SUFFIX}").unlink()
    changed = trained("--load stock --exit-interval 4")
    assert changed.code == 1 and codes_in(changed.output)[-1] == "data-changed", changed.output[-4000:]
    assert trained("--load stock --exit-interval 4 --allow-changed-data").code == 0
