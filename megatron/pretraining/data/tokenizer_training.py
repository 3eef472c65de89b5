"""Trains a SentencePiece tokenizer without normalization, which keeps all whitespace, for text and source code."""

from __future__ import annotations

import argparse
import heapq
import io
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.pretraining.data.documents import BadText, Reader, add_input_arguments, find_files, sync
from moc.cli_output import (
    Parser,
    ToolError,
    check_output,
    counted,
    escapes_output,
    number,
    print_lines,
    refused,
    replacing,
)

CHUNK_CHARACTERS = 4096
CHECKED_CHARACTERS = 1_000_000

EPILOG = """\
example:
  python tools/train_tokenizer.py --input corpus/ --glob '*.py' '*.md' --output data/tokenizer \\
      --vocab-size 8192
then give --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model

Nothing is normalized: spaces, tabs and ends of lines are kept, and with byte fallback so is every character
but U+2581, which SentencePiece itself uses for the space. Documents end with the piece </s>."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Train a SentencePiece tokenizer on text files, directories and JSON lines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.model and PREFIX.vocab")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    parser.add_argument("--vocab-size", type=number(int, 4, 2**31 - 1), default=32000, help="(default: %(default)s)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
    parser.add_argument(
        "--character-coverage",
        type=number(float, 0.98, 1),
        default=0.9995,
        help="share of the text's characters with a piece of their own (default: %(default)s)",
    )
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="spell other characters as bytes, at the cost of 256 pieces (default: on)",
    )
    parser.add_argument(
        "--max-bytes", type=_size, default="64M", metavar="SIZE", help="train on a random sample (default: %(default)s)"
    )
    parser.add_argument(
        "--num-threads",
        type=number(int, 1, 1024),
        default=min(1024, len(os.sched_getaffinity(0))),
        help="(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the sample (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="show what SentencePiece logs")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64M")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2].upper()]


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, 1 on an error, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        train_tokenizer(args)
        return 0
    except (ToolError, OSError) as error:
        return refused("train_tokenizer", error, args.output)
    except KeyboardInterrupt:
        print_lines("train_tokenizer: interrupted; no tokenizer was written.", error=True)
        return 130


def train_tokenizer(args: argparse.Namespace) -> None:
    """Reads the text, trains, checks and writes the tokenizer, and reports each step."""
    for path in (f"{args.output}.model", f"{args.output}.vocab"):
        if os.path.exists(path) and not args.overwrite:
            raise ToolError(f"{path} exists. Fix: add --overwrite to replace it", code="output-exists")
    check_output(f"{args.output}.model")
    files = find_files(args.input, args.glob)
    sample = Sample(args.max_bytes, args.seed)
    for text in _texts(files, tuple(args.json_keys), args.skip_bad):
        sample.add(text)
    chunks = sample.chunks()
    if not chunks:
        raise ToolError("the input has no text. Fix: give other files, or other --json-keys", code="input-empty")
    print_lines(f"read {sample.seen:,} bytes of text from {counted(len(files), 'file')}; training on {sample.kept:,}")
    start = time.monotonic()
    model = train_model(chunks, args)
    print_lines(f"trained a {args.model_type} model in {time.monotonic() - start:.1f} s; {_check(model, chunks)}")
    _write(args.output, model)
    print_lines(f"wrote {args.output}.model and .vocab ({args.vocab_size:,} pieces)")


def _texts(files: list[str], keys: tuple[str, ...], skip_bad: bool) -> Iterator[str]:
    for piece in Reader(files):
        try:
            yield from piece.texts(keys).values()
        except BadText as error:
            if not skip_bad:
                raise
            print_lines(f"skipped: {error}", error=True)


@dataclass
class Sample:
    """Random sample of text chunks, at most ``max_bytes``; the same seed and text give the same sample."""

    max_bytes: int
    seed: int
    seen: int = 0
    kept: int = 0
    _heap: list[tuple[float, int, str, int]] = field(default_factory=list)

    def __post_init__(self):
        self._random = random.Random(self.seed)
        self._count = 0

    def add(self, text: str) -> None:
        """Adds a text's chunks to the sampling."""
        for chunk in chunked(text):
            size = len(chunk.encode("utf-8"))
            self.seen += size
            self.kept += size
            self._count += 1
            # the heap's first entry has the highest random key, and is dropped first
            heapq.heappush(self._heap, (-self._random.random(), self._count, chunk, size))
            while self.kept > self.max_bytes and len(self._heap) > 1:
                self.kept -= heapq.heappop(self._heap)[-1]

    def chunks(self) -> list[str]:
        """Returns the sampled chunks, in the order of the text."""
        return [chunk for _, _, chunk, _ in sorted(self._heap, key=lambda entry: entry[1])]


def chunked(text: str) -> Iterator[str]:
    """Cuts a text at line ends into chunks of at most ``CHUNK_CHARACTERS`` characters."""
    start = 0
    while start < len(text):
        end = start + CHUNK_CHARACTERS
        if end < len(text):
            end = (text.rfind("\n", start, end) + 1) or end
        yield text[start:end]
        start = end


def train_model(chunks: list[str], args: argparse.Namespace) -> bytes:
    """Trains on chunks of text, and returns the serialized model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            model_type=args.model_type,
            vocab_size=args.vocab_size,
            character_coverage=args.character_coverage,
            byte_fallback=args.byte_fallback,
            num_threads=args.num_threads,
            minloglevel=0 if args.verbose else 2,
            user_defined_symbols=["\t"],
            required_chars="\n",
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=8 * CHUNK_CHARACTERS,
        )
    except RuntimeError as error:
        raise _explain(str(error), args.vocab_size) from None
    return model.getvalue()


def _explain(error: str, vocab_size: int) -> ToolError:
    if maximum := re.search(r"too high \(\d+\).*<= (\d+)", error):
        return ToolError(
            f"--vocab-size {vocab_size} is too high for so little text. Fix: give at most {maximum[1]}, or more text",
            code="vocabulary-size-unsuitable",
        )
    if minimum := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return ToolError(
            f"--vocab-size {vocab_size} is too low for the single characters. Fix: give at least {minimum[1]}",
            code="vocabulary-size-unsuitable",
        )
    return ToolError(
        f"SentencePiece cannot train on this text: {error}. Fix: give other text", code="text-not-trainable"
    )


def _check(model: bytes, chunks: list[str]) -> str:
    """Tests the model on the start of the sample: bytes per token, and how many chunks decode to themselves."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    characters = size = tokens = changed = tried = 0
    for chunk in chunks:
        ids = processor.encode(chunk)
        tokens, size, tried = tokens + len(ids), size + len(chunk.encode("utf-8")), tried + 1
        changed += processor.decode(ids) != chunk
        characters += len(chunk)
        if characters >= CHECKED_CHARACTERS:
            break
    kept = "all" if not changed else f"ATTENTION: only {tried - changed:,}"
    return f"{size / tokens:.2f} bytes per token, {kept} of {tried:,} chunks decode to themselves"


def _write(prefix: str, model: bytes) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = ((processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size()))
    vocab = "".join(f"{_escaped(piece)}\t{score:g}\n" for piece, score in pieces)
    for path, data in ((f"{prefix}.vocab", vocab.encode("utf-8")), (f"{prefix}.model", model)):
        with replacing(path) as partial:
            with open(partial, "wb") as file:
                file.write(data)
            sync(partial)
    sync(os.path.dirname(os.path.abspath(prefix)))


def _escaped(piece: str) -> str:
    """Escapes line ends and tabs within a piece, so that it fits one line."""
    return piece.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
