"""The tokenizers are megatron-core's, whole enough for its datasets, and mistakes are one sentence."""

import http.server
import importlib.util
import json
import threading

import pytest
import sentencepiece

from megatron.pretraining.data.tokenizer import TokenizerError, build_tokenizer
from tests.cases import each_row
from tests.errors import raises

TEXT = ["one two three four five six", "def f(x):\n    return x\n"] * 20


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains a tiny SentencePiece model."""

    def run(name, **options):
        prefix = tmp_path_factory.mktemp("tokenizer") / name
        settings = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2} | options
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_prefix=str(prefix), **settings)
        return f"{prefix}.model"

    return run


def test_sentencepiece_ends_documents_with_eos(train):
    tokenizer = build_tokenizer("SentencePieceTokenizer", train("plain"))
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod == tokenizer.eos == 2
    assert tokenizer.pad == -1
    assert tokenizer.detokenize(tokenizer.tokenize("one two")) == "one two"


def test_sentencepiece_appends_eod_if_it_exists(train):
    path = train("eod", control_symbols=["<eod>"])
    tokenizer = build_tokenizer("SentencePieceTokenizer", path)
    assert tokenizer.eod == tokenizer._tokenizer.tokenizer.piece_to_id("<eod>") == 3


def test_sentencepiece_without_end_token_is_refused(train):
    path = train("endless", eos_id=-1)
    with raises("tokenizer-unusable", "endless.model", "<eod>"):
        build_tokenizer("SentencePieceTokenizer", path)


def test_null_tokenizer_reads_numbers():
    tokenizer = build_tokenizer("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)  # as Megatron-LM builds it from the same flag
    assert tokenizer.tokenize("5 99 0") == [5, 99, 0]


@each_row("kind", ["SentencePieceTokenizer", "NullTokenizer"])
def test_tokenizer_serves_gpt_dataset(kind, train, tmp_path):
    tokenizer = build_tokenizer(kind, train("data") if kind.startswith("Sent") else None, 299)
    import numpy
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=numpy.uint16)
    for _ in range(4):
        document = numpy.array([*tokenizer.tokenize("1 2 3"), tokenizer.eod])
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "d.idx"))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(tmp_path / "d")], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=True,
        eod_mask_loss=True,
        mid_level_dataset_surplus=0.005,
    )
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [3, None, None], lambda: True, config).build()[0]
    sample = dataset[0]
    assert tokenizer.eod in sample["tokens"].tolist()
    assert (sample["loss_mask"] == 0).tolist() == (sample["tokens"] == tokenizer.eod).tolist()
    json.dumps(tokenizer.unique_identifiers)


def hugging_face_directory(path, eos="<end>", template=None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<bos>"], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[("<bos>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos).save_pretrained(path)
    return str(path)


def test_hugging_face_tokenizer_round_trips_text(tmp_path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", hugging_face_directory(tmp_path))
    assert tokenizer.eod == 0
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT[1])) == TEXT[1]


COMMIT = "0a" * 20


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache, with a tokenizer at a commit; downloads are forbidden, as in jobs."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hugging_face_directory(tmp_path / "models--owner--name" / "snapshots" / COMMIT)


def test_hub_tokenizer_is_loaded_at_commit(hub):
    assert build_tokenizer("HuggingFaceTokenizer", "owner/name", revision=COMMIT).eod == 0


@pytest.mark.parametrize("revision, sentence", [(None, "add --tokenizer-revision"), ("1b" * 20, "not in the hub's")])
def test_hub_tokenizer_without_cached_commit_is_refused(hub, revision, sentence):
    with pytest.raises(TokenizerError, match=sentence) as raised:
        build_tokenizer("HuggingFaceTokenizer", "owner/name", revision=revision)
    assert "\n" not in str(raised.value)


def test_hub_tokenizer_behind_refusing_proxy_is_refused(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self):
            self.send_error(403)

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        with raises("tokenizer-not-cached", "owner/name"):
            build_tokenizer("HuggingFaceTokenizer", "owner/name", revision=COMMIT)
        proxy.shutdown()


def test_hugging_face_without_end_token_is_refused(tmp_path):
    path = hugging_face_directory(tmp_path, eos=None)
    with pytest.raises(TokenizerError, match="names no eos_token"):
        build_tokenizer("HuggingFaceTokenizer", path)


def test_hugging_face_directory_without_tokenizer_is_refused(tmp_path):
    pytest.importorskip("transformers")
    with raises("tokenizer-unusable", str(tmp_path)):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_hugging_face_tokenizer_requires_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises("package-missing", "transformers"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


@each_row(
    ("kind", "make", "message"),
    [
        ("SentencePieceTokenizer", None, "SentencePieceTokenizer needs --tokenizer-model"),
        ("SentencePieceTokenizer", lambda path: None, "tok.model does not exist"),
        ("SentencePieceTokenizer", lambda path: path.mkdir(), "SentencePiece .model file"),
        ("SentencePieceTokenizer", lambda path: path.write_bytes(b"\x08nonsense"), "tok.model is not a Sent"),
        ("SentencePieceTokenizer", lambda path: path.touch(), "tok.model is not a Sent"),
        ("HuggingFaceTokenizer", lambda path: path.touch(), "not the directory"),
        ("NullTokenizer", None, "NullTokenizer needs --vocab-size"),
        (
            "GPT2BPETokenizer",
            None,
            "'GPT2BPETokenizer'",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, kind, make, message):
    path = tmp_path / "tok.model"
    if make:
        make(path)
    with pytest.raises(TokenizerError, match=message) as raised:
        build_tokenizer(kind, str(path) if make else None)
    assert "\n" not in str(raised.value)


def test_truncated_model_is_refused(train, tmp_path):
    path = tmp_path / "short.model"
    path.write_bytes(open(train("whole"), "rb").read()[:-1000])
    with raises("tokenizer-unusable", "short.model"):
        build_tokenizer("SentencePieceTokenizer", str(path))
