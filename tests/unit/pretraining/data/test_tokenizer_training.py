"""The tokenizer gives back any text as it was, and training it is repeatable and honest."""

import re

import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.data import tokenizer_training
from tests.errors import only_code


def train(corpus, prefix, *args) -> int:
    return tokenizer_training.main(["--input", str(corpus), "--output", str(prefix), "--vocab-size", "400", *args])


_models = {}


def load(model):
    if model not in _models:
        _models[model] = sentencepiece.SentencePieceProcessor(model_file=model)
    return _models[model]


# U+2581 is SentencePiece's own sign for the space.
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=50)


@given(text=st.one_of(any_text, st.text("ab \t\n\r", max_size=30)))
def test_every_text_round_trips(model, text):
    tokenizer = load(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_source_code_round_trips(model, corpus, tmp_path):
    source = (corpus / "a.txt").read_bytes().decode()
    assert "\t" in source and "\r\n" in source and " \n" in source
    unigram = tmp_path / "u"
    assert train(__file__, unigram, "--model-type", "unigram") == 0
    for path in (model, f"{unigram}.model"):
        assert load(path).decode(load(path).encode(source)) == source


def test_newlines_tabs_and_indentation_have_pieces(model):
    tokenizer = load(model)
    for piece in ("\n", "\t", "\u2581\u2581\u2581\u2581"):
        assert not tokenizer.is_unknown(tokenizer.piece_to_id(piece)), repr(piece)
    assert any("\n" in tokenizer.id_to_piece(i)[1:] for i in range(len(tokenizer)))
    assert tokenizer.get_piece_size() == 400
    assert tokenizer.eos_id() == 2 and tokenizer.pad_id() == -1


def test_text_with_many_tabs_is_learned(tmp_path):
    source = tmp_path / "tabs.txt"
    source.write_text("func\tmain() {\n\t\tprintln(value)\n\t}\n" * 50)
    assert train(source, tmp_path / "t", "--vocab-size", "300") == 0
    pieces = load(f"{tmp_path}/t.model").encode("func\tmain() {\n\tprintln(value)\n", out_type=str)
    assert len(pieces) <= 10
    assert any(piece.endswith("\n") and len(piece) > 1 for piece in pieces)


def test_newlines_survive_without_byte_fallback(tmp_path, corpus):
    assert train(corpus, tmp_path / "t", "--no-byte-fallback", "--vocab-size", "120") == 0
    tokenizer = load(f"{tmp_path}/t.model")
    prose = (corpus / "b.txt").read_text()
    assert "\n" in prose and tokenizer.decode(tokenizer.encode(prose)) == prose


def test_same_command_and_seed_give_same_files(tmp_path, corpus):
    for name in ("a", "b", "c"):
        seed = "2" if name == "c" else "1"
        assert train(corpus, tmp_path / name, "--max-bytes", "6K", "--seed", seed) == 0
    files = {name: (tmp_path / f"{name}.model").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]


def test_sample_respects_size_and_order():
    sample = tokenizer_training.Sample(max_bytes=20_000, seed=1)
    for number in range(100):
        sample.add(f"{number:03}" * 300)
    chunks = sample.chunks()
    assert 18_000 < sum(map(len, chunks)) == sample.kept <= 20_000
    assert chunks == sorted(chunks)
    assert sample.seen == 90_000


@given(st.text("ab\n\t é", max_size=40).map(lambda s: s * 400))
def test_chunks_concatenate_to_text(text):
    chunks = list(tokenizer_training.chunked(text))
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= tokenizer_training.CHUNK_CHARACTERS for chunk in chunks)


def test_vocabulary_has_one_line_per_piece(model):
    lines = open(model.replace(".model", ".vocab"), newline="\n").read().split("\n")
    assert len(lines) == 401 and lines[-1] == ""
    assert [line.split("\t")[0] for line in lines[:3]] == ["<unk>", "<s>", "</s>"]
    assert "\\t" in {line.split("\t")[0] for line in lines[:-1]}


def test_training_summary_is_printed(corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "t") == 0
    out = capsys.readouterr().out
    assert re.search(r" 3 files", out) and re.search(r"\d\.\d\d bytes", out) and "t.model" in out


def test_unsuitable_vocabulary_size_is_refused(corpus, tmp_path, capsys):
    assert train(corpus, tmp_path / "t", "--vocab-size", "100000") == 1
    output = capsys.readouterr().err
    assert only_code(output) == "vocabulary-size-unsuitable" and "100000" in output
    assert train(corpus, tmp_path / "t", "--vocab-size", "100") == 1
    output = capsys.readouterr().err
    assert only_code(output) == "vocabulary-size-unsuitable" and " 100 " in output
    assert list(tmp_path.iterdir()) == []


def test_existing_model_is_not_replaced_without_flag(corpus, tmp_path, capsys):
    (tmp_path / "t.model").write_text("precious")
    assert train(corpus, tmp_path / "t") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "t.model").read_text() == "precious"
    assert train(corpus, tmp_path / "t", "--overwrite") == 0


def test_bad_text_ends_training_or_is_skipped(corpus, tmp_path, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    assert tokenizer_training.main(["--input", str(bad), str(corpus), "--output", str(tmp_path / "t")]) == 1
    assert "bad.txt, line 1: not UTF-8" in capsys.readouterr().err
    both = ["--input", str(bad), str(corpus), "--output", str(tmp_path / "t"), "--vocab-size", "400"]
    assert tokenizer_training.main([*both, "--skip-bad"]) == 0
    assert "skipped: " in capsys.readouterr().err


def test_tool_runs_from_any_directory(corpus, tmp_path, run_tool):
    done = run_tool("train_tokenizer", "--input", corpus, "--output", "t", "--vocab-size", 400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.model", "t.vocab"]


def test_unwritable_output_is_refused_before_reading(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("text")
    monkeypatch.setattr(tokenizer_training, "find_files", lambda *args: 1 / 0)
    assert train(tmp_path / "file", tmp_path / "file" / "below") == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
