"""Builds megatron-core's tokenizers from the ``--tokenizer-*`` flags."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

from megatron.pretraining.process import cpu
from moc.errors import UserError
from moc.runtime.collectives import first_line

_DATA = ["*.json", "*.model", "*.txt", "*.jinja"]  # files of a tokenizer, without code and weights
TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


class TokenizerError(UserError, ValueError):
    """The requested tokenizer is unavailable; the message gives the reason in one sentence."""

    code = "tokenizer-unusable"


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    revision: str | None = None,
) -> Any:
    """Loads a tokenizer.

    A tokenizer of the hub is read from the local cache or downloaded.  ``HF_HUB_OFFLINE``, the default in jobs, forbids
    the download.

    Args:
        tokenizer_type: One of ``TOKENIZER_TYPES``.
        tokenizer_model: The ``.model`` file of SentencePieceTokenizer; for HuggingFaceTokenizer, a local directory or
            a name on the hub.
        vocab_size: The number of token ids of NullTokenizer; as in Megatron-LM, the last one ends a document.
        revision: For a name on the hub, the commit, of 40 hexadecimal digits.

    Returns:
        megatron-core's tokenizer, for ``GPTDatasetConfig(tokenizer=...)``; typed Any, since its base class does not
        declare the common attributes. Its ``eod`` is a SentencePiece model's ``<eod>``, or the end-of-sentence piece.

    Raises:
        TokenizerError: The type is unknown, or its file is missing or unusable.
    """
    cpu.install()
    if tokenizer_type == "SentencePieceTokenizer":
        return _sentencepiece(_checked_path(tokenizer_type, tokenizer_model))
    if tokenizer_type == "HuggingFaceTokenizer":
        path = _checked_path(tokenizer_type, tokenizer_model)
        return _hugging_face(path if os.path.exists(path) else _from_hub(path, revision))
    if tokenizer_type == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise TokenizerError(
                "NullTokenizer needs --vocab-size, the number of its token ids. Fix: add it",
                code="tokenizer-incomplete",
            )
        return _from_core("null-text", None, vocab_size=vocab_size)
    raise TokenizerError(
        f"there is no tokenizer type {tokenizer_type!r}. Fix: choose one of {', '.join(TOKENIZER_TYPES)}",
        code="value-not-a-choice",
    )


@dataclass(frozen=True)
class Template:
    """Tokens around each document.

    Attributes:
        prefix: ids before the text, such as BOS.
        suffix: ids behind the text.
        special: ids of special tokens other than the unknown one.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()


def separate_template(tokenizer: Any, splits_special_tokens: bool = False) -> Template:
    """Makes a tokenizer of :func:`build_tokenizer` encode texts without its template, which it returns.

    Documents are encoded in parts, and each part would get the template.  Other types than HuggingFaceTokenizer have
    no template.

    Args:
        tokenizer: megatron-core's tokenizer; it changes.
        splits_special_tokens: encode special tokens in a text as other text.

    Raises:
        TokenizerError: the template is not a prefix and a suffix.
    """
    library: Any = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(library, "include_special_tokens"):
        return Template()
    inner: Any = library.tokenizer
    library.include_special_tokens, inner.split_special_tokens = False, splits_special_tokens
    probe = "a"
    framed, bare = inner(probe).input_ids, inner(probe, add_special_tokens=False).input_ids
    start = next((n for n in range(len(framed)) if framed[n : n + len(bare)] == bare), None)
    if start is None:
        raise TokenizerError(
            "the template of the tokenizer changes the tokens of a text. Fix: pass "
            "--tokenizer-hf-no-include-special-tokens, which omits it"
        )
    special = {number for number, token in inner.added_tokens_decoder.items() if token.special}
    special |= {*inner.all_special_ids}
    return Template((*framed[:start],), (*framed[start + len(bare) :],), frozenset(special - {inner.unk_token_id}))


def _checked_path(tokenizer_type: str, path: str | None) -> str:
    if not path:
        raise TokenizerError(f"{tokenizer_type} needs --tokenizer-model. Fix: add it", code="tokenizer-incomplete")
    wants_directory = tokenizer_type == "HuggingFaceTokenizer"
    if not os.path.exists(path):
        if wants_directory and _on_hub(path):
            return path
        raise TokenizerError(
            f"--tokenizer-model {path} does not exist. Fix: correct the path", code="tokenizer-missing"
        )
    if os.path.isdir(path) != wants_directory:
        kind = "the directory of a tokenizer" if wants_directory else "a SentencePiece .model file"
        raise TokenizerError(f"--tokenizer-model {path} is not {kind}. Fix: name one for {tokenizer_type}")
    return path


def _on_hub(model: str) -> bool:
    """Returns whether this is not a path: ``name`` and ``owner/name`` may be on the hub."""
    return not (model.startswith(("/", ".", "~")) or model.count("/") > 1)


def _sentencepiece(path: str) -> Any:
    try:
        tokenizer = _from_core("sentencepiece", path)
    except (OSError, RuntimeError) as error:
        raise TokenizerError(
            f"--tokenizer-model {path} is not a SentencePiece model, or is truncated. Fix: copy it again, or name "
            "another one"
        ) from error
    # megatron-core's `eod` reads this attribute; if it is missing, it falls back to eos, or to -1 for "none"
    tokenizer._tokenizer.eod_id = _end_of_document(tokenizer._tokenizer.tokenizer, path)
    return tokenizer


def _end_of_document(processor, path: str) -> int:
    eod = processor.piece_to_id("<eod>")
    if eod == processor.unk_id():
        eod = processor.eos_id()
    if eod < 0:
        raise TokenizerError(
            f"--tokenizer-model {path} has neither an <eod> nor an end-of-sentence piece. Fix: name another one"
        )
    return eod


def _need_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise TokenizerError(
            "HuggingFaceTokenizer needs the package transformers. Fix: pip install transformers", code="package-missing"
        )


def _from_hub(name: str, revision: str | None) -> str:
    """Returns the directory with a tokenizer of the hub: exactly this commit, without code."""
    _need_transformers()
    if not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise TokenizerError(
            f"--tokenizer-model {name} is a name on the hub, where anything may stand for it tomorrow. Fix: add "
            "--tokenizer-revision with the commit that you trust, of 40 hexadecimal digits",
            code="tokenizer-not-pinned",
        )
    from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]  # needs transformers

    try:
        return snapshot_download(name, revision=revision, allow_patterns=_DATA)
    except Exception as error:  # the HTTP library's exceptions have no common base class
        raise TokenizerError(
            f"the tokenizer {name} at {revision} is not in the hub's cache on this machine, and cannot be downloaded: "
            f"{first_line(error)}. Fix: run tools/preprocess_data.py with it on this machine, which downloads it, or "
            "set HF_HUB_OFFLINE=0",
            code="tokenizer-not-cached",
        ) from error


def _hugging_face(path: str) -> Any:
    _need_transformers()
    # the tokenizer's threads do not survive the fork of data workers, and it warns at every fork
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = _from_core("huggingface", path, use_fast=True)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"transformers finds no tokenizer in {path}: {first_line(error)}. Fix: name another directory"
        ) from error
    if tokenizer.eod is None:
        raise TokenizerError(
            f"the tokenizer in {path} names no eos_token to end documents with. Fix: add it to tokenizer_config.json"
        )
    return tokenizer


def _from_core(library: str, path: str | None, **options) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    kinds: Any = MegatronTokenizer  # its metaclass defines the method called here
    return kinds.from_pretrained(
        tokenizer_path=path, metadata_path={"library": library, "model_type": "gpt"}, **options
    )
