"""A tokenizer goes along only where transformers makes the same tokens of a text."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import sentencepiece

from megatron.pretraining.convert.hugging_face.directory import write_tokenizer

TEXT = ["one two three four five six <unk> seven", "def f(x):\n    return x\n", "  two  spaces"] * 20
SAME = dict(normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            add_dummy_prefix=False)  # fmt: skip
KINDS = {
    "as tools/train_tokenizer.py makes it": SAME,
    "with an end of documents": SAME | dict(control_symbols=["<eod>"]),
}
READ = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps([tokenizer.encode(text, add_special_tokens=False) for text in json.load(sys.stdin)]))
"""


@pytest.fixture
def write(tmp_path):
    """Trains a model and writes it for transformers."""

    def run(**options):
        settings = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2} | options
        prefix = str(tmp_path / "mine")
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_prefix=prefix, **settings)
        (tmp_path / "hf").mkdir()
        recorded = dict(type="SentencePieceTokenizer", model=f"{prefix}.model", revision=None)
        ids, notes = write_tokenizer(recorded, tmp_path / "hf")
        return tmp_path / "hf", ids, notes, sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_settings_and_ids(write, kind):
    path, ids, notes, model = write(**KINDS[kind])
    assert not notes and (path / "tokenizer.model").is_file()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == ("<eod>" if "documents" in kind else "</s>")
    assert ids == dict(bos_token_id=1, eos_token_id=model.piece_to_id(settings["eos_token"]))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_makes_the_same_tokens(write, kind):
    path, _, _, model = write(**KINDS[kind])
    texts = [*set(TEXT), "a", "\ttab \u00e9 \u6f22\u5b57", " <unk> </s> ", ""]
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, input=json.dumps(texts), env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [model.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (SAME | dict(model_type="unigram", vocab_size=285), "is no BPE model"),
        (SAME | dict(normalization_rule_name="nmt_nfkc"), "changes text"),
        (SAME | dict(remove_extra_whitespaces=True), "changes text"),
        (SAME | dict(add_dummy_prefix=True), "changes text"),
    ],
)
def test_what_transformers_would_encode_otherwise_is_not_written(write, options, why):
    path, ids, (note,), _ = write(**options)
    assert why in note and not ids and not list(path.iterdir())


def test_files_of_a_tokenizer_are_copied_and_nothing_else(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "hf").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "tokenization_mine.py", "model.safetensors"):
        (tmp_path / "theirs" / name).write_text("{}")
    recorded = dict(type="HuggingFaceTokenizer", model=str(tmp_path / "theirs"), revision=None)
    assert write_tokenizer(recorded, tmp_path / "hf") == ({}, [])
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        (None, "does not record"),
        (dict(type="NullTokenizer", model=None, revision=None), "has no files"),
        (dict(type="HuggingFaceTokenizer", model="a/name", revision="f" * 40), f"a/name at {'f' * 40} is not on this"),
    ],
)
def test_where_there_is_none_it_is_told(recorded, words, tmp_path):
    ids, (note,) = write_tokenizer(recorded, tmp_path)
    assert not ids and words in note and not list(tmp_path.iterdir())
