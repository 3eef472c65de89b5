"""``moc-examples`` lists and copies what a wheel has beside the program."""

import os
import subprocess
from pathlib import Path

from megatron.pretraining.examples.program import examples, main
from moc.errors import codes_in
from tests.cases import each_row

ROOT = Path(__file__).parents[3]
COPIED = {
    *(path for path in (ROOT / "scripts/slurm").iterdir()),
    *(path for path in (ROOT / "scripts/recipes").iterdir()),
    *(ROOT / "tools").glob("*.py"),
    *(path for path in (ROOT / "examples").iterdir() if path.is_file()),
    *(ROOT / "scripts" / name for name in ("common.sh", "quickstart.sh", "torchrun.py", "train.sh")),
    ROOT / "pretrain_gpt_moe.py",
}


def test_each_example_is_listed_in_one_line(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*examples()]
    assert all(len(line.split()) > 4 for line in lines)


@each_row("name", examples())
def test_copy_has_paths_contents_and_modes_of_repository(name, tmp_path, capsys):
    assert main([name, str(tmp_path)]) == 0
    copies = [Path(line).relative_to(tmp_path) for line in capsys.readouterr().out.splitlines()]
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} == {*copies} != set()
    for path in copies:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
        assert os.access(tmp_path / path, os.X_OK) == os.access(ROOT / path, os.X_OK)
        assert not (tmp_path / path).is_symlink()


def test_all_standalone_files_are_in_an_example():
    assert {ROOT / path for example in examples().values() for path in example.paths()} == COPIED


def test_existing_file_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.sh").symlink_to("nothing")
    assert main(["train", str(tmp_path)]) == 1
    assert codes_in(capsys.readouterr().err) == ["output-exists"]
    assert [path.name for path in tmp_path.rglob("*")] == ["scripts", "train.sh"]


def test_uncreatable_directory_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["pure_torch", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_copied_scripts_start_in_their_directory(tmp_path, capsys):
    assert main(["train", str(tmp_path)]) == 0
    command = ["bash", tmp_path / "scripts/train.sh", "gpt_125m_8e", "--dry-run", "a", "b.model", "c"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"{tmp_path}/pretrain_gpt_moe.py --config {tmp_path}/scripts/recipes/gpt_125m_8e.yaml " in done.stdout
    listed = subprocess.run(["bash", tmp_path / "scripts/train.sh", "--list"], capture_output=True, text=True)
    assert listed.returncode == 0 and "gpt_125m_8e" in listed.stdout
