"""Paths that flags name are checked before training."""

import re
from types import SimpleNamespace

import pytest

import moc.megatron  # noqa: F401  # adapts megatron-core before others import it
from megatron.pretraining.config import ConfigError
from megatron.pretraining.process.paths import check_load, check_outputs, check_paths
from moc.store import dense_files
from tests.cases import each_row
from tests.errors import raises
from tests.unit.pretraining.flags import BASE, parse

FLAGS = ("--save", "--log-dir", "--tensorboard-dir", "--data-cache-path")


def job(rank=0, joins_running_job=False, is_restart=False):
    return SimpleNamespace(rank=rank, joins_running_job=joins_running_job, is_restart=is_restart)


@each_row("flag", FLAGS)
def test_each_output_directory_is_checked(flag, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for wrong in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/nowhere"):
        config = parse(f"{flag} {wrong}")
        with pytest.raises(ConfigError, match=f"{flag} {wrong} "):
            check_outputs(config, job())
        for one in (job(rank=1), job(joins_running_job=True), job(is_restart=True)):
            check_outputs(config, one)


def test_writable_directories_are_created_empty(tmp_path):
    check_outputs(parse(" ".join(f"{flag} {tmp_path}/new/{flag}" for flag in FLAGS)), job())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FLAGS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    check_outputs(parse(""), job())


@pytest.fixture
def problems_of(monkeypatch):
    """Returns the codes of the problems of the paths in flags, each with the first flag that its sentence names."""

    def problems(flags, base=BASE, nodes=1, reads_tokens=True):
        config = parse(flags, base)
        try:
            check_paths(config.arguments, config.snapshot, config.logging.log_dir, reads_tokens, nodes)
        except ConfigError as error:
            return [(problem.code, re.findall(r"--[\w-]+", str(problem))[0]) for problem in error.problems]
        return []

    return problems


@each_row(
    "flags",
    [
        "--vocab-file {}/nowhere",
        "--merge-file {}",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {}/nowhere",
        "--load {}/file",
        "--pretrained-checkpoint {}/file",
        "--exit-on-missing-checkpoint --load {}/nowhere",
        "--ckpt-policy full --ckpt-dir {0}/new --ckpt-tier memory --ckpt-memory-dir {0}/nowhere",
    ],
)
def test_missing_input_is_refused(flags, tmp_path, problems_of):
    (tmp_path / "file").write_text("in the way")
    flags = flags.format(tmp_path)
    assert problems_of(flags) == problems_of(flags, nodes=2) == [("input-missing", flags.split()[-2])]


def test_paths_not_on_this_machine_are_not_checked(tmp_path, problems_of):
    for flags in ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model of/hub", f"--load {tmp_path}/new"):
        assert not problems_of(flags)
    assert not problems_of("", BASE.replace("--mock-data", "--data-path s3://bucket/a"))


@each_row("flag", ["--data-path", "--train-data-path"])
def test_each_prefix_of_blend_is_checked(flag, tmp_path, problems_of):
    for name in ("a.idx", "a.bin", "b.idx"):
        (tmp_path / name).touch()
    base = BASE.replace("--mock-data", f"{flag} 0.5 {tmp_path}/a 0.5 {tmp_path}/b")
    assert problems_of("", base) == [("input-missing", flag)]
    wrong_weights = (f"{weight} {tmp_path}/a 1 {tmp_path}/a" for weight in ("0", "nan", "-1"))
    for wrong in (f"0.5 {tmp_path}/a 0.5", f"{tmp_path}/a.bin", *wrong_weights):
        assert problems_of("", BASE.replace("--mock-data", f"{flag} {wrong}")) == [("input-missing", flag)]
    assert not problems_of("", base, reads_tokens=False)
    (tmp_path / "b.bin").touch()
    assert not problems_of("", base)


WORDS, SPLITS = "--data-args-path", "--per-split-data-args-path"


@each_row(
    ("flag", "content", "is_refused"),
    [
        (WORDS, "1 {0}/a 2 {0}/a", False),
        (WORDS, "1 {0}/a 2 {0}/b", True),
        (WORDS, "0 {0}/a 2 {0}/a", True),
        (WORDS, "", True),
        (WORDS, "\udc80", True),
        (SPLITS, '{{"train": "{0}/a", "valid": [1, "{0}/a"], "test": null}}', False),
        (SPLITS, '{{"train": "{0}/a", "valid": "{0}/a", "test": ["{0}/b"]}}', True),
        (SPLITS, '{{"train": "{0}/a", "valid": "{0}/a"}}', True),
        (SPLITS, '{{"train": 1, "valid": 1, "test": 1}}', True),
        (SPLITS, "[]", True),
        (SPLITS, "{0}/a", True),
    ],
)
def test_files_with_blends_are_read_before_start(flag, content, is_refused, tmp_path, problems_of):
    for name in ("a.idx", "a.bin"):
        (tmp_path / name).touch()
    (tmp_path / "list").write_bytes(content.format(tmp_path).encode("utf-8", "surrogateescape"))
    base = BASE.replace("--mock-data", f"{flag} {tmp_path}/list")
    assert problems_of("", base) == [("input-missing", flag)] * is_refused
    assert not problems_of("", base, reads_tokens=False)


@each_row("flag", [*FLAGS, "--ckpt-policy full --ckpt-dir"])
def test_unwritable_output_is_refused_and_not_created(flag, tmp_path, problems_of):
    (tmp_path / "file").write_text("in the way")
    for wrong in (f"{tmp_path}/file", f"{tmp_path}/file/below", "/proc/nowhere"):
        assert problems_of(f"{flag} {wrong}") == [("output-not-writable", flag.split()[-1])]
        assert not problems_of(f"{flag} {wrong}", nodes=2)
    assert not problems_of(f"{flag} {tmp_path}/new/below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unreadable_checkpoint_directory_is_refused(tmp_path, monkeypatch):
    def refuse(root):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(dense_files, "list_iterations", refuse)
    with raises("input-missing", str(tmp_path)):
        check_load(parse(f"--load {tmp_path}").arguments, False)
