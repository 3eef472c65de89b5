"""The distribution: what is in it, and that it stands beside pip's megatron-core."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_megatron_is_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_every_package_has_an_init():
    for package in (ROOT / "megatron" / "training", ROOT / "moc"):
        folders = {source.parent for source in package.rglob("*.py")}
        assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_wheel_holds_our_packages_and_nothing_else(tmp_path):
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed; see the extra [dev]")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is older than the 77 that builds need")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("megatron", "moc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests" / "test_it.py").touch()
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)

    (wheel,) = tmp_path.glob("moc_megatron-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {
        str(path.relative_to(ROOT)) for name in ("megatron/pretraining", "moc") for path in (ROOT / name).rglob("*.py")
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_both_halves_of_megatron_import(place, tmp_path):
    installed = python("import importlib.metadata; importlib.metadata.version('moc-megatron')", cwd=tmp_path)
    if installed.returncode != 0:
        pytest.skip("the package is not installed; ./scripts/setup.sh installs it")
    result = python("import megatron.core, megatron.pretraining, moc", cwd=ROOT if place == "root" else tmp_path)
    assert result.returncode == 0, result.stderr


def python(code, cwd):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )
