"""Command lines for the tests of flags."""

import re
import shlex
from unittest import mock

import pytest
import yaml

import moc.megatron  # noqa: F401  # adapts megatron-core before others import it
from megatron.pretraining.config import ConfigError
from megatron.pretraining.entry.offline import config_of_words

DENSE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
BASE = DENSE + " --num-experts 8"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PP2 = "--pipeline-model-parallel-size 2"


def parse(flags="", base=BASE, workers=None):
    """The configuration; what depends on the number of workers is left to ``check_world`` and others."""
    words = shlex.split(f"{base} {flags}")
    with mock.patch("megatron.pretraining.entry.flags._check_workers"):
        return config_of_words(words, workers)


def refusal(flags, base=BASE, workers=None):
    """The codes of the problems, in order, and their sentences."""
    with pytest.raises(ConfigError) as found:
        parse(flags, base, workers)
    return [problem.code for problem in found.value.problems], "\n".join(map(str, found.value.problems))


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
