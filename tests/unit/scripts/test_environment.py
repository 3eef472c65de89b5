"""The interpreter and the builds that the scripts choose, and the versions that ``test.sh --with`` tests."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FIND = "find_python"
TORCH = f"has_gpu() {{ false; }}; PYTHON={sys.executable}; TORCH_WITHOUT_GPU=torch==2.13.0; install_torch"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def python(path: Path, change: str = "") -> Path:
    """An interpreter that differs from ours in what ``change``, a line of Python, does to it."""
    runs = f'exec {sys.executable} -c "import sys; {change}; exec(sys.argv.pop(1))" "$2"'
    return executable(path, f"#!/bin/sh\n{runs}\n")


def of_version(path: Path, minor: int) -> Path:
    return python(path, f"sys.version_info = (3, {minor}, 1); sys.version = '3.{minor}.1 (main)'")


def shim(path: Path) -> Path:
    return executable(path, "#!/bin/sh\necho command not found >&2\nexit 127\n")


class Machine:
    """A home directory, and a PATH with what scripts call and no interpreter."""

    def __init__(self, directory: Path):
        self.path, self.home = directory / "bin", directory / "home"
        self.path.mkdir()
        for name in ("bash", "sh", "env", "dirname", "basename", "cat", "awk", "grep", "realpath"):
            (self.path / name).symlink_to(shutil.which(name))

    def run(self, *command, **environment) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.path), "HOME": str(self.home), **{k: str(v) for k, v in environment.items()}}
        return subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)

    def source(self, script: str, **environment) -> subprocess.CompletedProcess:
        return self.run("bash", "-euo", "pipefail", "-c", f". {ROOT}/scripts/common.sh; {script}", **environment)

    def found(self, **environment) -> str:
        ended = self.source(FIND, **environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("minor", [12, 13])
@pytest.mark.parametrize("name", ["python3", "python3.{}"])
def test_interpreter_on_path_is_found(machine, minor, name):
    wanted = of_version(machine.path / name.format(minor), minor)
    assert machine.found() == str(wanted)


@pytest.mark.parametrize("minor", [12, 13])
@pytest.mark.parametrize(
    "place, variable",
    [
        (".pyenv/versions/3.{0}.1/bin/python3.{0}", None),
        ("root/versions/3.{0}.1/bin/python3.{0}", "PYENV_ROOT"),
        (".local/share/uv/python/cpython-3.{0}.1-linux/bin/python3.{0}", None),
        ("root/cpython-3.{0}.1-linux/bin/python3.{0}", "UV_PYTHON_INSTALL_DIR"),
    ],
)
def test_failing_shims_and_old_interpreters_are_skipped(machine, minor, place, variable):
    of_version(machine.path / "python3", 11)
    for name in ("python3.12", "python3.13"):
        shim(machine.path / name)
    wanted = of_version(machine.home / place.format(minor), minor)
    assert machine.found(**({variable: machine.home / "root"} if variable else {})) == str(wanted)


def test_uv_locates_interpreter_without_download(machine):
    wanted = of_version(machine.home / "elsewhere" / "python3.13", 13)
    asked = '[ "$UV_PYTHON_DOWNLOADS $1 $2" = "never python find" ] && for last; do :; done'
    executable(machine.path / "uv", f"#!/bin/sh\n{asked}\n[ $last = 3.13 ] && echo {wanted}\n")
    assert machine.found() == str(wanted)


def test_second_interpreter_on_path_is_found_behind_shim(machine):
    shim(machine.path / "python3.12")
    wanted = of_version(machine.home / "python3.12", 12)
    assert machine.found(PATH=f"{machine.path}:{machine.home}") == str(wanted)


def test_unsuitable_interpreters_are_skipped(machine):
    python(machine.path / "python3.12", "import sysconfig; sysconfig.get_config_var = lambda name: 1")
    python(machine.path / "python3.13", "sys.modules['ensurepip'] = None")
    assert machine.source(FIND).returncode == 1
    wanted = of_version(machine.path / "python3", 12)
    assert machine.found() == str(wanted)


def test_requested_interpreter_is_used_or_refused(machine):
    of_version(machine.path / "python3.12", 12)
    wanted = of_version(machine.home / "python", 13)
    assert machine.found(MOC_PYTHON=wanted) == str(wanted)
    assert refusal(machine.source(FIND, MOC_PYTHON=of_version(machine.home / "old", 11)))


def refusal(ended: subprocess.CompletedProcess) -> str:
    """The one line of a script that refuses."""
    assert ended.returncode == 1 and not ended.stdout.strip().startswith("/")
    (line,) = ended.stderr.splitlines()
    assert ". Fix: " in line
    return line


@pytest.mark.parametrize("script", ["setup.sh", "quickstart.sh", "test.sh", "lint.sh"])
def test_scripts_refuse_machine_without_suitable_python(machine, script, tmp_path):
    copy = shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    (tmp_path / "clone/pyproject.toml").touch()
    (machine.path / "nproc").symlink_to(shutil.which("nproc"))
    of_version(machine.path / "python3", 11)
    line = refusal(machine.run(copy / script))
    assert f"{machine.path}/python3: 3.11.1" in line
    assert not (copy.parent / ".venv").exists()


def wheel(directory: Path, version: str) -> None:
    """A distribution named torch, with nothing in it."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("offered", [["2.13.0", "2.13.0+cpu", "2.14.0+cpu"], ["2.13.0", "2.12.0+cpu", "12.13.0+cpu"]])
def test_cpu_build_is_used_without_gpu_if_available(machine, tmp_path, offered):
    for version in offered:
        wheel(tmp_path, version)
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": tmp_path, "PIP_CONFIG_FILE": os.devnull}
    ended = machine.source(TORCH, **index, PIP_TARGET=tmp_path / "target")
    assert ended.returncode == 0, ended.stderr
    chosen = "2.13.0+cpu" if "2.13.0+cpu" in offered else "2.13.0"
    assert [path.name for path in (tmp_path / "target").iterdir()] == [f"torch-{chosen}.dist-info"]
    told = ended.stdout.find("about 3 GB")
    assert told < ended.stdout.index("Processing") and (told == -1) == chosen.endswith("+cpu")


VENV = """#!{python}
import os, runpy, sys
from pathlib import Path

words = sys.argv[1:]
if words[:2] == ["-m", "venv"]:
    (Path(words[2]) / "bin").mkdir(parents=True)
    (Path(words[2]) / "bin" / "python").symlink_to(os.path.realpath(__file__))
elif words[0] == "-m":
    with open({log!r}, "a") as file:
        print(Path(sys.argv[0]).parents[1].name, os.environ.get("MOC_UNCHECKED_VERSIONS"), *words[1:], file=file)
else:
    sys.prefix, sys.modules["torch"] = str(Path(sys.argv[0]).parents[1]), None
    code = sys.stdin.read() if words[0] == "-" else words[1]
    sys.argv = ["-", *(words[1:] if words[0] == "-" else words[2:])]
    exec(code)
"""


@pytest.fixture
def clone(tmp_path):
    """A clone whose environments record what is installed and run in them: (root, environment, log)."""
    root, log = tmp_path / "clone", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    interpreter = executable(tmp_path / "python", VENV.format(python=sys.executable, log=str(log)))
    environment = {**os.environ, "MOC_PYTHON": str(interpreter)}
    environment.pop("MOC_UNCHECKED_VERSIONS", None)
    return root, environment, log


def test_other_versions_run_in_own_environment(clone):
    root, environment, log = clone
    command = [root / "scripts" / "test.sh", "--with", "megatron-core==0.20.1", "--with", "torch==2.15.0", "-x"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (made,) = root.glob(".venv*")
    assert made.name not in (".venv", ".venv-gpu")
    lines = log.read_text().splitlines()
    assert all(line.startswith(f"{made.name} 1 ") for line in lines)
    *_, torch, package, others, tests = (line.split(" ", 2)[2] for line in lines)
    assert torch == "pip install torch==2.15.0" and "--editable" in package
    assert others == "pip install megatron-core==0.20.1 torch==2.15.0"
    assert tests.startswith("pytest ") and tests.endswith(" -x")

    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert len(log.read_text().splitlines()) == len(lines) + 1  # the tests; nothing is installed

    subprocess.run(command[:1], env=environment, check=True, capture_output=True)
    assert log.read_text().splitlines()[-1].startswith(".venv None pytest ")
    assert "0.20.1" not in "".join(line for line in log.read_text().splitlines() if line.startswith(".venv "))


@pytest.mark.parametrize("arguments", [["--with"], ["--with", "-x"], ["--with", "torch==2.15.0", "--no-venv"]])
def test_other_versions_need_name_and_environment(clone, arguments):
    root, environment, log = clone
    ended = subprocess.run([root / "scripts" / "test.sh", *arguments], env=environment, capture_output=True, text=True)
    assert refusal(ended) and not log.exists() and not list(root.glob(".venv*"))


@pytest.mark.parametrize("installed", [True, False])
def test_active_environment_is_used_outside_the_repository(machine, tmp_path, installed):
    place = tmp_path / "job" / "scripts"
    place.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "common.sh", place)
    active = python(machine.path / "python", "pass" if installed else "sys.modules['megatron'] = None")
    ended = machine.run("bash", "-euo", "pipefail", "-c", f". {place}/common.sh; set_up base; echo $PYTHON")
    assert (ended.returncode, ended.stdout) == ((0, f"{active}\n") if installed else (1, ""))
    assert installed or f"{active}: moc-megatron is not installed" in ended.stderr
