"""The distribution: what is in it, and that it stands beside pip's megatron-core."""

import configparser
import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moc
from megatron.pretraining.examples.program import examples
from tests.cases import each_row

ROOT = Path(__file__).parents[3]
TOOLS = sorted((ROOT / "tools").glob("*.py"))


def test_megatron_is_namespace_package():
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_every_package_has_init_file():
    for package in (ROOT / "megatron" / "pretraining", ROOT / "moc"):
        folders = {source.parent for source in package.rglob("*.py") if not source.is_symlink()}
        assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The distribution, as it is built without a network."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed; see the extra [dev]")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is older than the 77 that builds need")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", "pretrain_gpt_moe.py"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron", "moc", "scripts", "tools", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests" / "test_it.py").touch()
    for command in (["init"], ["remote", "add", "origin", "https://token@example.org/owner/name.git"]):
        subprocess.run(["git", *command], cwd=source, check=True, capture_output=True)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)

    (wheel,) = tmp_path.glob("moc_megatron-*.whl")
    return zipfile.ZipFile(wheel)


def test_wheel_contains_only_own_packages(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    packages = [ROOT / "megatron" / "pretraining", ROOT / "moc"]
    ours = {str(path.relative_to(ROOT)) for package in packages for path in package.rglob("*.py")}
    copied = {path for example in examples().values() for path in example.paths()}
    ours |= {f"megatron/pretraining/examples/files/{path}" for path in copied}
    presets = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron/pretraining/presets").glob("*.yaml")}
    assert "megatron/pretraining/presets/tiny.yaml" in presets
    data = {"moc/py.typed", "megatron/pretraining/py.typed", "megatron/pretraining/entry/options.json"}
    assert files == ours | presets | data
    assert {name.partition("/")[0] for name in files} == {"megatron", "moc"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_every_program_is_wheel_command(wheel, tmp_path):
    commands = configparser.ConfigParser()
    commands.read_string(of(wheel, "entry_points.txt"))
    modules = {name: target.removesuffix(":main") for name, target in commands["console_scripts"].items()}
    tools = {path: path.read_text().split("\nfrom ")[-1].split(" import main")[0] for path in TOOLS}
    assert sorted(modules.values()) == sorted([*tools.values(), "moc.launch", "megatron.pretraining.pretrain_gpt_moe"])
    wheel.extractall(tmp_path)
    for name, module in modules.items():
        code = f"import sys; sys.argv = ['{name}', '--help']; from {module} import main; sys.exit(main())"
        help_of = python(code, cwd=tmp_path)
        assert help_of.returncode == 0 and help_of.stdout.startswith(f"usage: {name} "), help_of.stderr


@each_row("tool", TOOLS, ids=lambda path: path.stem)
def test_tools_are_thin_and_public(tool):
    assert not tool.name.startswith("_") and len(tool.read_text().splitlines()) < 15


def test_wheel_metadata_matches_package(wheel):
    said = email.message_from_string(of(wheel, "METADATA"))
    assert said["Version"] == moc.__version__ and said["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert said.get_all("Project-URL") == ["Repository, https://example.org/owner/name"]


def of(wheel, name):
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


@pytest.mark.slow
def test_both_megatron_packages_are_importable(tmp_path):
    installed = python("import importlib.metadata; importlib.metadata.version('moc-megatron')", cwd=tmp_path)
    if installed.returncode != 0:
        pytest.skip("the package is not installed; ./scripts/setup.sh installs it")
    result = python("import megatron.core, megatron.pretraining, moc", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = "from importlib.util import find_spec as of; assert of('megatron.core') and of('megatron.pretraining')"
    result = python(found, cwd=ROOT)  # all other tests import them there
    assert result.returncode == 0, result.stderr


def python(code, cwd):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )
