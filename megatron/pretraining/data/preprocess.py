"""Turns text into Megatron's indexed datasets: PREFIX_KEY_document.bin and .idx, with a file of their fingerprint.

This process reads files in order, worker processes tokenize, and this process writes the result in order. The output
does not depend on the number of workers. It has temporary names until the end; the .idx is renamed last, since
Megatron finds no dataset without it (see `pairs`).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from megatron.pretraining.data.documents import (
    CORRECT,
    BadText,
    DocumentPiece,
    PairWriter,
    Reader,
    add_input_arguments,
    cut_text,
    find_files,
    is_json,
    on_blank_lines,
    on_regex,
)
from megatron.pretraining.data.identity import size_of_vocabulary, vocabulary_of
from moc.cli_output import Parser, ToolError, console, counted, escapes_output, print_lines, refused

BATCH_BYTES = 256 * 1024
BATCH_PIECES = 1024
_WAITS_S = 0.2  # interval of checks for interrupts while waiting for a batch
BATCHES_AHEAD = 64  # batches in flight ahead of the writer, to bound memory
SHOWN_BAD = 20

EPILOG = """\
examples:
  python tools/preprocess_data.py --input corpus.jsonl.zst --output-prefix data/corpus \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8
  python tools/preprocess_data.py --input wiki.train.tokens --split-on-regex '^ = [^=]+ = $' ...
then train with --data-path data/corpus_text_document

A plain text file is one document unless a --split-on flag is given. Documents beyond 64 KiB are tokenized in
parts cut at ends of lines. Documents without any token are left out."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Tokenize text files, directories and JSON lines into a Megatron dataset.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser)
    group = parser.add_argument_group("documents in plain text").add_mutually_exclusive_group()
    group.add_argument("--split-on-blank-lines", action="store_true", help="blank lines part documents")
    group.add_argument("--split-on-regex", metavar="REGEX", help="each line with a match begins a document")
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        default="SentencePieceTokenizer",
        metavar="TYPE",
        help="%(default)s (default), HuggingFaceTokenizer or NullTokenizer",
    )
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help=".model file; directory or name of a HuggingFace tokenizer"
    )
    group.add_argument(
        "--tokenizer-revision", metavar="COMMIT", help="of a tokenizer on the hub: 40 hexadecimal digits"
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="omit the tokens that the template of a HuggingFaceTokenizer adds to each document, such as BOS",
    )
    group.add_argument(
        "--split-special-tokens",
        action="store_true",
        help="encode special tokens of a HuggingFaceTokenizer inside a text, such as <|endoftext|>, as other text",
    )
    group.add_argument("--vocab-size", type=int, help="ids of a NullTokenizer; the last ends a document")
    group.add_argument("--append-eod", action="store_true", help="end documents with the end-of-document token")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path without _KEY_document")
    group.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    group = parser.add_argument_group("running")
    group.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: %(default)s)"
    )
    group.add_argument(
        "--log-interval", type=int, default=1000, help="documents between progress lines, off a terminal"
    )
    return parser


_delays = _interrupted = False


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, 1 on an error, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    for signum, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    try:
        print_lines(*preprocess(args))
        return 0
    except (ToolError, OSError) as error:
        return refused("preprocess_data", error, args.output_prefix)
    except BrokenProcessPool:
        killed = "a worker was killed, maybe for want of memory. Fix: give fewer --workers"
        return refused("preprocess_data", ToolError(killed, code="worker-killed"))
    except KeyboardInterrupt:
        print_lines("preprocess_data: interrupted; no dataset was written.", error=True)
        return 130
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _interrupt(signum, frame):
    global _interrupted
    if not _delays:
        raise KeyboardInterrupt
    _interrupted = True


def preprocess(args: argparse.Namespace) -> list[str]:
    """Writes the datasets, and returns the lines of the summary."""
    if args.workers < 1:
        raise ToolError(
            f"--workers is {args.workers}. Fix: give a number that is at least 1", code="value-out-of-range"
        )
    split = on_blank_lines if args.split_on_blank_lines else None
    split = on_regex(args.split_on_regex) if args.split_on_regex is not None else split
    reader = Reader(_files(args), split)
    tokenizer, template, dtype = _load_tokenizer(args)
    numbers = args.tokenizer_type == "NullTokenizer"
    encode = Encoder(tokenizer, dtype, tuple(args.json_keys), numbers, template.special)
    begin, end = ((), ()) if args.tokenizer_hf_no_include_special_tokens else (template.prefix, template.suffix)
    end += (tokenizer.eod,) * (args.append_eod and end[-1:] != (tokenizer.eod,))
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        options = dtype, args.overwrite, vocabulary_of(tokenizer), begin, end
        pairs = {
            key: stack.enter_context(PairWriter(f"{args.output_prefix}_{key}_document", *options))
            for key in args.json_keys
        }
        pool = stack.enter_context(worker_pool(encode, args.workers))
        progress = stack.enter_context(_progress(reader, args.log_interval))
        counts = _write(encoded(reader, encode, pool), pairs, args.skip_bad, progress)
        if not counts["documents"]:
            raise ToolError(
                "the input has no document with text. Fix: give other files, or other --json-keys", code="input-empty"
            )
        for pair in pairs.values():
            pair.complete()
        for pair in pairs.values():
            pair.commit()
    added = {"begin": begin, "end": end} if template.special else {}
    notes = [] if end else ["documents run into each other: no end-of-document token was asked for (--append-eod)"]
    notes += [f"documents {position} with {_names(tokenizer, ids)}" for position, ids in added.items() if ids]
    if counts["special"]:
        notes.append(
            f"{counts['special']:,} special tokens were in texts, and remain (--split-special-tokens: as text)"
        )
    return _summary(pairs, counts, time.monotonic() - start, notes)


def _names(tokenizer, ids: Sequence[int]) -> str:
    return " ".join(tokenizer._tokenizer.ids_to_tokens(list(ids)))


def _files(args: argparse.Namespace) -> list[str]:
    files = find_files(args.input, args.glob)
    plain = [f for f in files if not is_json(f)]
    if plain and "text" not in args.json_keys:
        raise ToolError(
            f"{plain[0]} is plain text, whose key is 'text'. Fix: add text to --json-keys", code="key-missing"
        )
    return files


def _load_tokenizer(args: argparse.Namespace):
    try:
        from megatron.pretraining.data import tokenizer
        from megatron.pretraining.process import cpu
    except ModuleNotFoundError as error:
        raise ToolError(
            f"{error.name} is not installed. Fix: install the dependencies of this project", code="package-missing"
        ) from None
    cpu.install()
    try:
        built = tokenizer.build_tokenizer(
            args.tokenizer_type, args.tokenizer_model, args.vocab_size, args.tokenizer_revision
        )
        template = tokenizer.separate_template(built, args.split_special_tokens)
    except tokenizer.TokenizerError as error:
        raise ToolError(str(error), code=error.code) from None
    from megatron.core.datasets.indexed_dataset import DType

    return built, template, DType.optimal_dtype(size_of_vocabulary(built))


@dataclass(frozen=True)
class Encoded:
    """Token ids of one piece by key, or the error in it; ``special`` counts special tokens among them."""

    tokens: dict
    size: int
    ends_document: bool
    error: str | None = None
    special: int = 0


class Encoder:
    """Tokenizes pieces; ``numbers`` is for a NullTokenizer, which requires numbers separated by single spaces."""

    def __init__(
        self,
        tokenizer,
        dtype,
        keys: tuple[str, ...],
        numbers: bool = False,
        special: frozenset[int] = frozenset(),
    ):
        self._tokenizer, self._dtype, self._keys, self._numbers = tokenizer, dtype, keys, numbers
        self._special, self._size = sorted(special), size_of_vocabulary(tokenizer)

    def __call__(self, piece: DocumentPiece) -> Encoded:
        """Tokenizes one piece; returns an error in it instead of raising."""
        try:
            tokens = {key: self._encode(piece, text) for key, text in piece.texts(self._keys).items()}
        except BadText as error:
            return Encoded({}, len(piece.data), piece.ends_document, str(error))
        special = sum(self._count_special(ids) for ids in tokens.values())
        return Encoded(tokens, len(piece.data), piece.ends_document, special=special)

    def _count_special(self, ids) -> int:
        import numpy

        return int(numpy.isin(ids, self._special).sum()) if self._special else 0

    def _parts(self, piece: DocumentPiece, text: str) -> Iterable[str]:
        if self._numbers:
            return [" ".join(text.split())]
        return cut_text(text) if piece.is_json else [text]

    def _encode(self, piece: DocumentPiece, text: str):
        import numpy

        try:
            ids = [i for part in self._parts(piece, text) if part for i in self._tokenizer.tokenize(part)]
        except ValueError as error:
            raise BadText(
                f"{piece.path}, line {piece.line}: the tokenizer refuses it ({error}). Fix: {CORRECT}"
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self._size:
            raise BadText(
                f"{piece.path}, line {piece.line}: token ids are beyond --vocab-size. Fix: raise it, or {CORRECT}"
            )
        return numpy.array(ids, dtype=self._dtype)


@contextlib.contextmanager
def worker_pool(encode: Encoder, workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Starts the worker processes; yields None with one worker, since this process then does the work."""
    if workers == 1:
        yield None
        return
    # fork: workers inherit the loaded tokenizer instead of spending seconds on imports
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (encode,))
    try:
        with _uninterrupted():
            pool.submit(int).result()  # forks all workers now, before a progress bar starts a thread
        yield pool
    finally:
        with _uninterrupted():
            # once, and with wait: a later call would not wait for the pool's thread, which fails at exit
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays interrupts: inside a method of the pool, an interrupt could leave a lock taken."""
    global _delays, _interrupted
    _delays = True
    try:
        yield
    finally:
        _delays = False
        if _interrupted:
            _interrupted = False
            raise KeyboardInterrupt


def _result_of(future: Future[list[Encoded]]) -> list[Encoded]:
    is_done = False
    while not is_done:  # interrupts are handled between waits
        with _uninterrupted():
            is_done = bool(wait([future], timeout=_WAITS_S).done)
    return future.result()


def encoded(reader: Reader, encode: Encoder, pool: ProcessPoolExecutor | None) -> Iterator[Encoded]:
    """Tokenizes all pieces of the reader, in order, in the pool or in this process."""
    if pool is None:
        yield from map(encode, reader)
        return
    waiting = deque()
    for batch in _batches(reader):
        with _uninterrupted():
            waiting.append(pool.submit(_encode_batch, batch))
        if len(waiting) > BATCHES_AHEAD:
            yield from _result_of(waiting.popleft())
    while waiting:
        yield from _result_of(waiting.popleft())


def _batches(reader: Reader) -> Iterator[list[DocumentPiece]]:
    batch, size = [], 0
    for piece in reader:
        batch.append(piece)
        size += len(piece.data)
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start_worker(encode: Encoder) -> None:
    global _encode
    _encode = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _die_with(parent) -> None:
    parent.join()  # otherwise workers of a killed parent would wait forever
    os._exit(1)


def _encode_batch(batch: list[DocumentPiece]) -> list[Encoded]:
    return [_encode(piece) for piece in batch]


def _write(results: Iterator[Encoded], pairs: dict[str, PairWriter], skip_bad: bool, progress) -> Counter:
    """Writes the tokens document by document, and counts documents and bytes."""
    counts, bad = Counter(), None
    for result in results:
        counts["bytes"] += result.size
        counts["special"] += result.special
        for key, tokens in result.tokens.items():
            pairs[key].add(tokens)
        bad = bad or result.error
        if bad and not skip_bad:
            raise BadText(bad)
        progress(counts)
        if not result.ends_document:
            continue
        if bad:
            _report_bad(bad, counts, pairs)
        else:
            written = [pair.end_document() for pair in pairs.values()]
            counts["documents" if any(written) else "empty"] += 1
        bad = None
    progress(counts)
    return counts


def _report_bad(reason: str, counts: Counter, pairs: dict[str, PairWriter]) -> None:
    for pair in pairs.values():
        pair.drop_document()
    counts["bad"] += 1
    if counts["bad"] <= SHOWN_BAD:
        print_lines(f"skipped: {reason}", error=True)
    elif counts["bad"] == SHOWN_BAD + 1:
        print_lines("skipped: further ones are only counted", error=True)


@contextlib.contextmanager
def _progress(reader: Reader, interval: int):
    """Yields a callback for the counts so far: a progress bar on a terminal, periodic lines elsewhere."""
    if sys.stderr.isatty():
        from rich import progress as rich

        columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        with rich.Progress("tokenizing", *columns, console=console(error=True)) as bar:
            task = bar.add_task("", total=reader.bytes_total or None)
            yield lambda counts: bar.update(task, completed=reader.bytes_done)
        return
    start, shown = time.monotonic(), 0

    def line(counts: Counter) -> None:
        nonlocal shown
        if interval > 0 and counts["documents"] >= shown + interval:
            shown = counts["documents"]
            speed = counts["bytes"] / 1e6 / max(time.monotonic() - start, 1e-9)
            print_lines(f"{shown:,} documents, {speed:.1f} MB/s", error=True)

    yield line


def _summary(pairs: dict[str, PairWriter], counts: Counter, seconds: float, notes: list[str]) -> list[str]:
    tokens = sum(pair.tokens for pair in pairs.values())
    size = counts["bytes"]
    documents = counted(counts["documents"], "document")
    lines = [
        f"{documents}, {tokens:,} tokens from {size:,} bytes of text in {seconds:.1f} s",
        f"{tokens / seconds:,.0f} tokens/s, {size / 1e6 / seconds:.1f} MB/s, {size / tokens:.2f} bytes/token",
    ]
    if counts["bad"] or counts["empty"]:
        lines.append(f"left out: {counts['bad']:,} bad, {counts['empty']:,} without text")
    lines += notes
    lines += [
        f"wrote {prefix}.bin and .idx ({pair.tokens:,} tokens as {pair.dtype.__name__})"
        for prefix, pair in ((p.prefix, p) for p in pairs.values())
    ]
    return lines
