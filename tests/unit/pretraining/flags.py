"""Command lines for the tests of flags."""

import re
import shlex

import pytest
import yaml

from megatron.pretraining.arguments import parse_config
from moc.errors import codes_in

DENSE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
BASE = DENSE + " --num-experts 8"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PP2 = "--pipeline-model-parallel-size 2"


def parse(flags="", base=BASE):
    return parse_config(shlex.split(f"{base} {flags}"))


def refusal(capsys, flags, base=BASE):
    """The codes of the problems, in order, and their sentences; the process exits with code 2."""
    with pytest.raises(SystemExit) as exit:
        parse(flags, base)
    assert exit.value.code == 2
    output = capsys.readouterr().err
    sentences = [line.split("error: ", 1)[1] for line in output.splitlines() if not line.startswith("usage: ")]
    return codes_in("\n".join(sentences)), "\n".join(sentences)


def assert_refused(refused, expected):
    """Asserts the codes of :func:`refusal`, and words that its sentences name: ``expected`` lists both."""
    codes, sentences = refused
    words = expected.split()
    assert codes == [word for word in words if not word.startswith("-")], sentences
    for named in (word for word in words if word.startswith("-")):
        assert re.search(rf"{named}\b", sentences), sentences


def without(flag, base=BASE):
    """The base flags less one, with its value."""
    return re.sub(rf"{flag}( (?!--)\S+)?( |$)", "", base)


def write(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path
