"""A tokenizer goes along only where transformers makes the same tokens of a text."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import sentencepiece

from megatron.pretraining.convert.hugging_face.tokenizer import write_tokenizer
from tests.cases import each_row
from tests.errors import raises

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
        generation, notes = write_tokenizer(recorded, tmp_path / "hf")
        return (
            tmp_path / "hf",
            generation.special,
            notes,
            sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model"),
        )

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_settings_and_ids_are_written(write, kind):
    path, ids, notes, model = write(**KINDS[kind])
    assert not notes and (path / "tokenizer.model").is_file()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == ("<eod>" if "documents" in kind else "</s>")
    assert ids == dict(bos_token_id=1, eos_token_id=model.piece_to_id(settings["eos_token"]), pad_token_id=None)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_same_tokens(write, kind):
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
def test_tokenizer_encoded_differently_is_not_written(write, options, why):
    path, ids, (note,), _ = write(**options)
    assert why in note and not any(ids.values()) and not list(path.iterdir())


@pytest.fixture
def write_theirs(tmp_path):
    """Writes the tokenizer of a directory with these files; returns generation settings and names of written files."""

    def run(**files):
        (tmp_path / "theirs").mkdir()
        (tmp_path / "hf").mkdir()
        for name in ("tokenization_mine.py", "model.safetensors"):
            (tmp_path / "theirs" / name).write_text("{}")
        for name, content in files.items():
            (tmp_path / "theirs" / f"{name}.json").write_text(json.dumps(content))
        recorded = dict(type="HuggingFaceTokenizer", model=str(tmp_path / "theirs"), revision=None)
        generation, notes = write_tokenizer(recorded, tmp_path / "hf")
        assert not notes
        return generation, {path.stem for path in (tmp_path / "hf").iterdir()}

    return run


ADDED = {"added_tokens": [{"id": 7, "content": "<end>", "special": True}, {"id": 8, "content": "<pad>"}]}
NAMED = {"eos_token": {"content": "<end>"}, "pad_token": "<pad>", "bos_token": None}


def test_tokenizer_files_and_special_tokens_are_copied(write_theirs):
    generation, files = write_theirs(tokenizer=ADDED, tokenizer_config=NAMED)
    assert files == {"tokenizer", "tokenizer_config"} and generation.settings is None
    assert generation.special == dict(bos_token_id=None, eos_token_id=7, pad_token_id=8)


def test_model_ids_precede_tokenizer_ids(write_theirs):
    config, settings = {"eos_token_id": [1, 7], "pad_token_id": None}, {"eos_token_id": 7, "top_k": 3}
    generation, files = write_theirs(tokenizer=ADDED, tokenizer_config=NAMED, config=config, generation_config=settings)
    assert files == {"tokenizer", "tokenizer_config"}
    assert (generation.special, generation.settings) == (config, settings)


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("config", {"eos_token_id": "end"}, "config-value-unsupported"),
        ("generation_config", [], "checkpoint-damaged"),
        ("tokenizer", {"added_tokens": [{"id": -1}]}, "tokenizer-unusable"),
    ],
)
def test_invalid_generation_settings_are_refused(write_theirs, file, content, code):
    with raises(code):
        write_theirs(tokenizer_config=NAMED, **{file: content})


@each_row(
    ("recorded", "words"),
    [
        (None, "does not record"),
        (dict(type="NullTokenizer", model=None, revision=None), "has no files"),
        (dict(type="HuggingFaceTokenizer", model="a/name", revision="f" * 40), f"a/name at {'f' * 40} is not on this"),
    ],
)
def test_missing_tokenizer_is_noted(recorded, words, tmp_path):
    generation, (note,) = write_tokenizer(recorded, tmp_path)
    assert not any(generation.special.values()) and words in note and not list(tmp_path.iterdir())
