"""What comes in as documents goes out as a dataset that megatron-core reads, or nothing goes out at all."""

import contextlib
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.pretraining.data import preprocess as program
from megatron.pretraining.data.documents import DocumentPiece, PairWriter
from megatron.pretraining.data.tokenizer import build_tokenizer
from megatron.pretraining.process import cpu
from tests.cases import each_row
from tests.errors import only_code
from tests.unit.pretraining.test_tokenizer import hugging_face_directory

cpu.install()  # comes before megatron.core
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402

NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--workers", "1"]
READ_WITHOUT_US = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
assert not any(name.startswith(("megatron.pretraining", "moc", "preprocess")) for name in sys.modules)
dataset = IndexedDataset(sys.argv[1])
print(json.dumps([[int(t) for t in dataset[i]] for i in range(len(dataset))]))
"""


def preprocess(*args) -> int:
    return program.main([str(arg) for arg in args])


def documents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def write_json(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def digests(prefix):
    return [hashlib.sha256(open(f"{prefix}.{s}", "rb").read()).hexdigest() for s in ("bin", "idx")]


@pytest.fixture(scope="module")
def tokenizer(model):
    return build_tokenizer("SentencePieceTokenizer", model)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=80), min_size=1, max_size=8),
    workers=st.sampled_from([1, 1, 1, 2]),
    eod=st.booleans(),
)
def test_dataset_holds_tokens_of_its_documents(texts, workers, eod, model, tokenizer, capsys):
    wanted = [tokenizer.tokenize(text) + [tokenizer.eod] * eod for text in texts if text]
    with tempfile.TemporaryDirectory() as name:
        prefix = os.path.join(name, "out")
        source = os.path.join(name, "in.jsonl")
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        args = [
            "--input",
            source,
            "--output-prefix",
            prefix,
            "--tokenizer-model",
            model,
            "--workers",
            workers,
        ]
        status = preprocess(*args, *["--append-eod"] * eod)
        if not wanted:
            assert status == 1 and only_code(capsys.readouterr().err) == "input-empty"
            assert os.listdir(name) == ["in.jsonl"]
            return
        assert status == 0
        assert documents(f"{prefix}_text_document") == wanted
        written = [f"out_text_document.{suffix}" for suffix in ("bin", "fingerprint.json", "idx")]
        assert sorted(os.listdir(name)) == ["in.jsonl", *written]


@each_row("plant", [lambda path, victim: os.link(victim, path), lambda path, victim: os.mkfifo(path)])
def test_hard_linked_file_and_fifo_are_not_written(plant, tmp_path, capsys):
    (tmp_path / "precious").write_text("precious")
    plant(tmp_path / "out_text_document.bin.partial", tmp_path / "precious")
    texts = write_json(tmp_path / "in.jsonl", ["1 2"])
    assert preprocess("--input", texts, "--output-prefix", tmp_path / "out", *NUMBERS) == 1
    assert "out_text_document.bin.partial" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"


@each_row("partial", ["bin", "idx"])
def test_planted_link_is_not_followed(partial, tmp_path, capsys):
    (tmp_path / "precious").write_text("precious")
    link = tmp_path / f"out_text_document.{partial}.partial"
    link.symlink_to(tmp_path / "precious")
    status = preprocess(
        "--input", write_json(tmp_path / "in.jsonl", ["1 2"]), "--output-prefix", tmp_path / "out", *NUMBERS
    )
    assert (tmp_path / "precious").read_text() == "precious"
    assert status == (1 if partial == "bin" else 0), (
        capsys.readouterr().err
    )  # a lock that another may hold is not removed


def test_worker_count_does_not_change_output(tmp_path, corpus, model, tokenizer, monkeypatch):
    generator = random.Random(1)
    words = (corpus / "b.txt").read_text().split()
    texts = [" ".join(generator.choices(words, k=generator.randrange(300))) for _ in range(300)]
    texts.insert(100, "\n".join(texts) * 3)  # longer than a piece
    write_json(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_text("\n".join(texts) * 2)
    monkeypatch.setattr(program, "BATCH_BYTES", 20_000)
    for workers in (1, 3):
        prefix = tmp_path / f"w{workers}"
        args = ["--output-prefix", prefix, "--tokenizer-model", model, "--workers", workers, "--append-eod"]
        assert preprocess("--input", tmp_path / "a.jsonl", tmp_path / "b.txt", *args) == 0
    assert digests(tmp_path / "w1_text_document") == digests(tmp_path / "w3_text_document")
    written = documents(tmp_path / "w3_text_document")
    assert len(written) == sum(map(bool, texts)) + 1
    assert [tokenizer.detokenize(ids[:-1]) for ids in written] == [t for t in texts if t] + ["\n".join(texts) * 2]


def test_dataset_is_readable_by_independent_program(tmp_path, corpus, model, run_tool):
    made = run_tool(
        "preprocess_data",
        "--input",
        corpus,
        "--output-prefix",
        "out",
        "--tokenizer-model",
        model,
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("3 documents, ") and "tokens/s" in made.stdout
    prefix = f"{tmp_path}/out_text_document"
    command = [sys.executable, "-W", "ignore", "-c", READ_WITHOUT_US, prefix]
    read = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert json.loads(read.stdout) == documents(prefix), read.stderr


@each_row("suffix", ["", ".gz", ".zst"])
def test_compressed_input_gives_same_dataset(tmp_path, corpus, suffix):
    data = b'{"text": "1 2 3"}\n{"text": "4"}\n'
    data = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
    (tmp_path / f"in.jsonl{suffix}").write_bytes(data)
    assert preprocess("--input", tmp_path / f"in.jsonl{suffix}", "--output-prefix", tmp_path / "o", *NUMBERS) == 0
    assert documents(tmp_path / "o_text_document") == [[1, 2, 3], [4]]


def test_json_keys_give_separate_datasets(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"q": "1 2", "a": "3"}\n{"q": "4", "a": "5 6"}\n')
    args = ["--input", tmp_path / "in.jsonl", "--json-keys", "q", "a", "--output-prefix", tmp_path / "o"]
    assert preprocess(*args, *NUMBERS) == 0
    assert documents(tmp_path / "o_q_document") == [[1, 2], [4]]
    assert documents(tmp_path / "o_a_document") == [[3], [5, 6]]


@each_row(
    ("flags", "wanted"),
    [
        ([], [[1, 10, 2, 3]]),
        (["--split-on-blank-lines"], [[1, 10], [2], [3]]),
        (["--split-on-regex", "^[23]"], [[1, 10], [2], [3]]),
        (["--split-on-regex", ""], [[1], [10], [2], [3]]),
    ],
)
def test_plain_text_is_split_on_request(tmp_path, flags, wanted):
    (tmp_path / "in.txt").write_text("1\n10\n\n2\n\n\n3\n")
    assert preprocess("--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "o", *flags, *NUMBERS) == 0
    assert documents(tmp_path / "o_text_document") == wanted


def test_long_line_is_cut_between_words(tmp_path):
    numbers = list(range(60_000))
    (tmp_path / "in.txt").write_text(" ".join(map(str, numbers)))
    write_json(tmp_path / "in.jsonl", [(tmp_path / "in.txt").read_text()])
    assert preprocess("--input", tmp_path, "--output-prefix", tmp_path / "o", *NUMBERS) == 0
    assert documents(tmp_path / "o_text_document") == [numbers, numbers]


@each_row(("size", "dtype"), [(65_499, numpy.uint16), (65_500, numpy.int32)])
def test_tokens_use_two_bytes_if_possible(tmp_path, size, dtype):
    write_json(tmp_path / "in.jsonl", [f"{size - 2} 0"])
    args = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "o", "--append-eod"]
    assert preprocess(*args, *NUMBERS, "--vocab-size", size) == 0
    assert IndexedDataset(f"{tmp_path}/o_text_document").index.dtype == dtype
    assert documents(tmp_path / "o_text_document") == [[size - 2, 0, size - 1]]


def test_ids_beyond_number_of_tokens_are_encoded():
    tokenizer = SimpleNamespace(tokenize=lambda text: [5, 0], vocab_size=3, inv_vocab={0: "a", 1: "b", 5: "c"})
    encoded = program.Encoder(tokenizer, numpy.uint16, ("text",))(DocumentPiece("in.txt", 1, b"ca"))
    assert encoded.error is None and encoded.tokens["text"].tolist() == [5, 0]


@each_row(
    ("name", "data", "message"),
    [
        ("in.jsonl", b'{"text": "1"}\n{"text": "2\n', "in.jsonl, line 2: not JSON"),
        ("in.jsonl", b'{"text": "1"}\n{"body": "2"}\n', "in.jsonl, line 2: no key 'text'"),
        ("in.jsonl", b'{"text": "1"}\n{"text": "two"}\n', "in.jsonl, line 2: the tokenizer refuses it"),
        (
            "in.jsonl",
            b'{"text": "1"}\n{"text": "70001"}\n',
            "in.jsonl, line 2: ",
        ),
        ("in.txt", b"1\n\xff\n", "in.txt, line 2: not UTF-8"),
        (
            "in.txt.gz",
            gzip.compress(b"1 " * 100_000)[:-9],
            "in.txt.gz, at or after line 1: cannot be read on",
        ),
        ("in.jsonl.zst", zstandard.compress(b'{"text": "1"}\n' * 9)[:-5], "in.jsonl.zst, at or after line"),
        ("in.txt", b"", "[input-empty]"),
    ],
)
@each_row("workers", [1, 2])
def test_bad_input_leaves_no_output(tmp_path, capsys, name, data, message, workers):
    (tmp_path / name).write_bytes(data)
    args = ["--input", tmp_path / name, "--output-prefix", tmp_path / "o", *NUMBERS, "--workers", workers]
    assert preprocess(*args) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == [name]


def test_bad_documents_are_skipped_and_counted(tmp_path, capsys):
    lines = [
        b'{"text": "1 2"}',
        b"{",
        b'{"text": "x"}',
        b'{"text": ""}',
        b'{"text": "3"}',
        b'{"text": "\xff"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"5 " * 60_000 + b"5\n\xff\n6" + b" 6" * 60_000)
    (tmp_path / "c.txt").write_text("7")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"8 " * 100_000 + b"8")[:-9])
    (tmp_path / "e.txt").write_text("9")
    assert preprocess("--input", tmp_path, "--output-prefix", tmp_path / "o", *NUMBERS, "--skip-bad") == 0
    assert documents(tmp_path / "o_text_document") == [[1, 2], [3], [7], [9]]
    out, err = capsys.readouterr()
    assert re.search("4 documents, 5 .*: 5 bad, 1 ", out.replace("\n", " ")) and "\\n" not in out
    assert err.count("skipped: ") == 5 and "b.txt, line 2: not UTF-8" in err


@each_row(
    ("args", "message"),
    [
        (["--input", "missing"], "[input-missing]"),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "no.model"],
            "no.model does not exist",
        ),
        (["--json-keys", "body"], "[key-missing]"),
        (["--workers", "0"], "--workers is 0"),
        (["--output-prefix", "in.txt/o"], "in.txt: File exists."),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("1")
    assert preprocess("--input", "in.txt", "--output-prefix", "o", *NUMBERS, *args) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.txt"]


def test_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.pretraining.data", None)
    (tmp_path / "in.txt").write_text("1")
    assert preprocess("--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "o", *NUMBERS) == 1
    output = capsys.readouterr().err
    assert only_code(output) == "package-missing" and "megatron.pretraining.data" in output


def test_dataset_is_replaced_only_on_request(tmp_path, capsys):
    args = ["--input", write_json(tmp_path / "in.jsonl", ["1"]), "--output-prefix", tmp_path / "o", *NUMBERS]
    assert preprocess(*args) == 0
    write_json(tmp_path / "in.jsonl", ["2"])
    assert preprocess(*args) == 1
    error = capsys.readouterr().err
    assert "o_text_document.bin" in error and "--overwrite" in error
    assert documents(tmp_path / "o_text_document") == [[1]]
    stale = tmp_path / "o_text_document" / "cache" / "GPTDataset_indices"
    stale.mkdir(parents=True)
    assert preprocess(*args, "--overwrite") == 0
    assert documents(tmp_path / "o_text_document") == [[2]]
    assert not stale.exists()


def test_failed_replacement_keeps_old_dataset(tmp_path):
    args = ["--input", write_json(tmp_path / "in.jsonl", ["1"]), "--output-prefix", tmp_path / "o", *NUMBERS]
    assert preprocess(*args) == 0
    (tmp_path / "in.jsonl").write_text('{"text": "2"}\n{')
    assert preprocess(*args, "--overwrite") == 1
    assert documents(tmp_path / "o_text_document") == [[1]]


def test_writer_releasing_its_lock_is_awaited(tmp_path):
    with open(tmp_path / "o_text_document.bin.partial", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        args = ["--input", write_json(tmp_path / "in.jsonl", ["1"]), "--output-prefix", tmp_path / "o"]
        assert preprocess(*args, *NUMBERS) == 0
    assert documents(tmp_path / "o_text_document") == [[1]]


def test_concurrent_writer_is_refused(tmp_path, capsys):
    with PairWriter(f"{tmp_path}/o_text_document", numpy.uint16) as other:
        other.add(numpy.array([9]))
        other.end_document()
        args = ["--input", write_json(tmp_path / "in.jsonl", ["1"]), "--output-prefix", tmp_path / "o"]
        assert preprocess(*args, *NUMBERS) == 1
        assert only_code(capsys.readouterr().err) == "output-in-use"
        other.complete()
        other.commit()
    assert documents(tmp_path / "o_text_document") == [[9]]


@each_row("renames", [0, 1])
@each_row("overwrite", [False, True])
def test_stop_between_renames_leaves_no_pair(tmp_path, monkeypatch, renames, overwrite):
    args = ["--input", write_json(tmp_path / "in.jsonl", ["1"]), "--output-prefix", tmp_path / "o", *NUMBERS]
    if overwrite:
        assert preprocess(*args) == 0
    left, replace = [None] * renames, os.replace

    def replace_or_stop(source, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_or_stop)
    assert preprocess(*args, "--overwrite") == 130
    assert not IndexedDataset.exists(f"{tmp_path}/o_text_document")
    monkeypatch.undo()
    assert preprocess(*args, "--overwrite") == 0
    assert documents(tmp_path / "o_text_document") == [[1]]


def run_from_pipe(tmp_path, workers):
    """Starts a run that waits for input; returns it and the pipe to give it some."""
    os.mkfifo(tmp_path / "in.jsonl")
    args = [
        "--input",
        tmp_path / "in.jsonl",
        "--output-prefix",
        tmp_path / "o",
        *NUMBERS,
        "--workers",
        workers,
    ]
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(preprocess(*args)))
    process.start()

    def opened():
        assert process.is_alive()
        with contextlib.suppress(OSError):  # as long as nobody reads
            return os.open(tmp_path / "in.jsonl", os.O_WRONLY | os.O_NONBLOCK)

    descriptor = wait_until(opened)
    os.set_blocking(descriptor, True)
    return process, open(descriptor, "wb")


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def children(pid) -> list[int]:
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def is_alive(pid) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_during_write_leaves_no_pair_and_no_workers(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(program, "BATCHES_AHEAD", 2)
    process, pipe = run_from_pipe(tmp_path, workers)
    pipe.write(b'{"text": "1 2 3"}\n' * 30_000)
    pipe.flush()
    partial = tmp_path / "o_text_document.bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0)
    pids = children(process.pid)
    assert len(pids) == (workers if workers > 1 else 0)
    process.kill()
    process.join()
    pipe.close()
    assert not list(tmp_path.glob("*.idx")) and not list(tmp_path.glob("*.bin"))
    wait_until(lambda: not any(map(is_alive, pids)))

    os.unlink(tmp_path / "in.jsonl")
    write_json(tmp_path / "in.jsonl", ["4 5"])
    assert preprocess("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "o", *NUMBERS) == 0
    assert documents(tmp_path / "o_text_document") == [[4, 5]]
    assert not partial.exists()


def test_kill_at_any_time_leaves_no_partial_pair(tmp_path):
    texts = ["1 2 3"] * 5_000
    args = ["--input", write_json(tmp_path / "in.jsonl", texts), "--output-prefix", tmp_path / "o", *NUMBERS]
    start = time.monotonic()
    assert preprocess(*args) == 0
    length = time.monotonic() - start
    for moment in [i / 5 for i in range(1, 7)]:
        process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(preprocess(*args, "--overwrite")))
        process.start()
        process.join(moment * length)
        process.kill()
        process.join()
        if IndexedDataset.exists(f"{tmp_path}/o_text_document"):
            assert len(documents(tmp_path / "o_text_document")) == len(texts)


def test_sigterm_removes_partial_output(tmp_path):
    process, pipe = run_from_pipe(tmp_path, 2)
    wait_until(lambda: (tmp_path / "o_text_document.bin.partial").exists() and len(children(process.pid)) == 2)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    pipe.close()
    assert process.exitcode == 130
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_interrupt_is_deferred_during_pool_calls(tmp_path, monkeypatch):
    """There it could leave a lock of the pool taken."""
    delayed = []

    class Pool(ProcessPoolExecutor):
        def submit(self, *args):
            os.kill(os.getpid(), signal.SIGTERM)
            delayed.append(args)
            return super().submit(*args)

    monkeypatch.setattr(program, "ProcessPoolExecutor", Pool)
    (tmp_path / "in.txt").write_text("1 2\n")
    args = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "o", *NUMBERS, "--workers", 2]
    assert preprocess(*args) == 130
    assert len(delayed) == 1 and not multiprocessing.active_children() and os.listdir(tmp_path) == ["in.txt"]


def test_pool_is_terminated_on_exit():
    """A thread of a pool that is still ending uses descriptors that the interpreter closes at its exit."""
    before = set(threading.enumerate())
    with program.worker_pool(len, 8):
        assert len(multiprocessing.active_children()) == 8
    assert not multiprocessing.active_children() and set(threading.enumerate()) == before


@each_row("data, code", [(b"", 1), (b"1 2\n", 0)], ids=["empty", "one line"])
def test_workers_may_outnumber_lines(tmp_path, capsys, data, code):
    (tmp_path / "in.txt").write_bytes(data)
    args = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "o", *NUMBERS, "--workers", 8]
    assert preprocess(*args) == code
    assert capsys.readouterr().err.count("\n") == code


def test_killed_worker_ends_run(tmp_path):
    process, pipe = run_from_pipe(tmp_path, 2)
    wait_until(lambda: len(children(process.pid)) == 2)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    try:
        pipe.write(b'{"text": "1 2 3"}\n' * 30_000)
        pipe.close()
    except BrokenPipeError:
        pass
    process.join(120)
    assert process.exitcode == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_progress_is_printed_in_lines_without_terminal(tmp_path, capsys):
    args = [
        "--input",
        write_json(tmp_path / "in.jsonl", ["1"] * 10),
        "--output-prefix",
        tmp_path / "o",
        *NUMBERS,
    ]
    assert preprocess(*args, "--log-interval", 4) == 0
    assert [line.split(" ")[0] for line in capsys.readouterr().err.splitlines()] == ["4", "8"]


def test_progress_bar_is_shown_on_terminal(tmp_path, corpus, monkeypatch, capsys, model):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    args = ["--input", corpus, "--output-prefix", tmp_path / "o", "--tokenizer-model", model, "--workers", 2]
    assert preprocess(*args) == 0
    assert "tokenizing" in capsys.readouterr().err


TEXTS = ["a <end> b\n" * 20_000, "<end>", "", "c"]  # the first is encoded in several parts


@each_row(
    ("flags", "begin", "end", "inside"),
    [
        (["--append-eod"], [1], [0], [20_000, 1, 0]),
        (["--append-eod", "--split-special-tokens"], [1], [0], [0, 0, 0]),
        (["--tokenizer-hf-no-include-special-tokens"], [], [], [20_000, 1, 0]),
    ],
)
def test_hugging_face_templates_and_special_tokens_are_applied(flags, begin, end, inside, tmp_path, capsys):
    path = hugging_face_directory(tmp_path / "tokenizer", template="<bos> $A")
    args = ["--output-prefix", tmp_path / "o", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
    assert preprocess("--input", write_json(tmp_path / "in.jsonl", TEXTS), *args, *flags, "--workers", "2") == 0
    found = documents(f"{tmp_path}/o_text_document")
    assert [ids[: len(begin)] for ids in found] == [begin] * 3
    assert [ids[len(ids) - len(end) :] for ids in found] == [end] * 3
    texts = [ids[len(begin) : len(ids) - len(end)] for ids in found]
    assert [ids.count(0) for ids in texts] == inside and not any(1 in ids for ids in texts)
    told = capsys.readouterr().out
    assert ("20,001 special tokens" in told) == any(inside) and ("begin with <bos>" in told) == bool(begin)
