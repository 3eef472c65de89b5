# shellcheck shell=bash
# Sourced by the scripts beside it: messages, --help, and an environment to run in.
#
# set_up EXTRA leaves in $PYTHON an interpreter that has the package installed (EXTRA: "base" or "dev"),
# and does nothing when that is already so. With VENV=no it uses the active environment, else $VENV_DIRECTORY (.venv),
# which MOC_PYTHON makes, if that is set. The requirements in WITH replace the versions that pyproject.toml asks for.
# Outside of the repository (moc-examples), the active environment has to have the package.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH_WITHOUT_GPU="torch==2.13.0" # what the tests without a GPU are run with
TORCH_WITH_GPU="torch>=2.11"
WITH=()
VENV=yes
VENV_DIRECTORY=$ROOT/.venv

say() { printf '\n==> %s\n' "$*"; }
die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}
help_from_header() { # the comment at the top of the script is its --help
    awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$0"
}
number() { # refuses the value of a variable that is no number, which the shell might even run
    [[ $2 =~ ^[0-9]{1,6}$ ]] || die "$1 is a number, and not '$(printf '%q' "$2")'."
}
quoted() { # a command, as one line that a shell reads back
    local words
    printf -v words '%q ' "$@"
    printf '%s\n' "${words% }"
}

is_supported_python() { # 3.12 or newer; torch has no build for free-threaded ones
    "$1" -c 'import sys, sysconfig
sys.exit(sys.version_info < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1
}

list_pythons() { # of PATH, pyenv and uv, tested versions first; some may be too old, or shims that fail
    local version directory
    for version in 3.12 3.13; do
        type -aP "python$version"
        for directory in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions" \
            "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}"; do
            compgen -G "$directory/*/bin/python$version"
        done
        UV_PYTHON_DOWNLOADS=never uv python find --no-project --system "$version" 2>/dev/null
    done
    type -aP python3
}

find_python() { # prints a Python 3.12 or newer that can make virtual environments
    local candidate version found="" without_venv=""
    if [[ -n ${MOC_PYTHON:-} ]]; then
        is_supported_python "$MOC_PYTHON" || die "cannot use MOC_PYTHON=$MOC_PYTHON: it does not run, or is older than" \
            "Python 3.12. Fix: set MOC_PYTHON to a Python 3.12 or 3.13, or unset it."
    fi
    while read -r candidate <&3; do
        if ! is_supported_python "$candidate"; then
            version=$("$candidate" -c 'import sys; print(sys.version.split(" (")[0])' 2>/dev/null) || version="does not run"
            found+="${found:+, }$candidate: $version"
        elif "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        else
            without_venv=$candidate
        fi
    done 3< <(set +e && printf '%s' "${MOC_PYTHON:+$MOC_PYTHON$'\n'}" && list_pythons)
    if [[ -n $without_venv ]]; then
        die "cannot create an environment: $without_venv has no module venv. Fix: install it (Debian, Ubuntu:" \
            "apt install python3-venv), or activate an environment and pass --no-venv."
    fi
    die "cannot create an environment: PATH, pyenv and uv have no Python 3.12 or newer that runs" \
        "(${found:-none at all}). Fix: install Python 3.12 or 3.13 (for example: uv python install 3.12)," \
        "or set MOC_PYTHON to the path of one."
}

has_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L >/dev/null 2>&1; }

use_existing_venv() { # for the launch scripts: .venv is taken when it is there and nothing is active
    if [[ -z ${VIRTUAL_ENV:-} && -z ${CONDA_PREFIX:-} && -x $ROOT/.venv/bin/python ]]; then
        PATH="$ROOT/.venv/bin:$PATH"
    fi
}

choose_environment() { # sets PYTHON, making .venv where it is wanted and missing
    if [[ $VENV == no ]]; then
        PYTHON=$(command -v python || command -v python3) ||
            die "cannot use --no-venv: there is no python on PATH. Fix: activate an environment."
        is_supported_python "$PYTHON" ||
            die "cannot use the active environment: $PYTHON is older than Python 3.12. Fix: activate a newer one."
        return
    fi
    PYTHON=$VENV_DIRECTORY/bin/python
    if [[ ! -e $PYTHON ]]; then
        local base
        base=$(find_python)
        say "Creating $VENV_DIRECTORY with $("$base" --version)"
        "$base" -m venv "$VENV_DIRECTORY" || die "cannot create $VENV_DIRECTORY: see the output above. Fix: correct it, and run this again."
    fi
    is_supported_python "$PYTHON" ||
        die "cannot use $VENV_DIRECTORY: it is broken, or older than Python 3.12. Fix: remove it and run this again."
    PATH="$VENV_DIRECTORY/bin:$PATH"
}

# Installs what scripts/lock.sh has chosen, if it is all to be had; fails if not, and ends at a file that is not the one
# that was chosen.
install_locked() {
    local lock=$ROOT/scripts/locked/$1.txt said
    say "Installing what ${lock#"$ROOT/"} names, compared by hash"
    said=$("$PYTHON" -m pip install --quiet --no-deps --require-hashes --requirement "$lock" 2>&1) && return
    printf '%s\n' "$said" >&2
    [[ $said != *"DO NOT MATCH THE HASHES"* ]] ||
        die "cannot install $lock: a file has another hash (see pip's output above). Fix: find out why it changed."
    say "The package index lacks some of them: pip chooses the versions, and compares no hashes"
    return 1
}

install_torch() { # without a GPU the CPU build, where the package index has one
    local torch=$TORCH_WITH_GPU offered
    if ! has_gpu; then
        torch=$TORCH_WITHOUT_GPU
        offered=$("$PYTHON" -m pip index versions torch 2>/dev/null) || offered=""
        if grep -qwF "${torch#torch==}+cpu" <<<"$offered"; then
            torch+=+cpu
        elif [[ $torch != *+cpu ]]; then
            say "The package index has no CPU build of $torch: pip downloads about 3 GB, CUDA's libraries included"
        fi
    fi
    say "Installing $torch"
    "$PYTHON" -m pip install "$torch" ||
        die "cannot install $torch: see pip's output above. Fix: correct pip's settings, and run this again."
}

set_up() {
    local extra=$1 state stamp isolation=()
    if [[ ! -e $ROOT/pyproject.toml ]]; then
        VENV=no
        choose_environment
        "$PYTHON" -c 'import megatron.pretraining' 2>/dev/null ||
            die "cannot use $PYTHON: moc-megatron is not installed there. Fix: activate the environment that has it."
        return
    fi
    choose_environment
    # What is installed is a function of these; the stamp beside the packages holds their hash.
    state=$("$PYTHON" - "$ROOT" "${WITH[@]}" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = "setup.py", "pyproject.toml", "scripts/common.sh", "scripts/locked/base.txt", "scripts/locked/dev.txt"
parts = [(root / name).read_bytes() for name in names]
parts += [word.encode() for word in (sys.version, *sys.argv[1:])]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
    )
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.moc-megatron
    [[ $(cat "$stamp.$extra" 2>/dev/null) == "$state" ]] && return

    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        die "cannot install packages: $PYTHON has no pip that works. Fix: remove $VENV_DIRECTORY, or activate another" \
            "environment and pass --no-venv."
    # An environment of somebody else keeps the versions that it has; setuptools is among what is locked.
    if [[ $VENV == yes ]] && install_locked "$extra"; then isolation=(--no-build-isolation); fi
    # torch first: without a GPU, exactly the version that the tests know.
    "$PYTHON" -c 'import torch; assert torch.__version__ >= torch.torch_version.TorchVersion("2.11")' 2>/dev/null ||
        install_torch
    local target=$ROOT
    [[ $extra == base ]] || target="${ROOT}[$extra]"
    say "Installing $target, editable, and what it needs"
    "$PYTHON" -m pip install --quiet "${isolation[@]}" --editable "$target" ||
        die "cannot install $target: see pip's output above. Fix: correct pip's settings, and run this again."
    if ((${#WITH[@]})); then # after the package, whose own bounds would undo it
        say "Installing ${WITH[*]}"
        "$PYTHON" -m pip install "${WITH[@]}" || die "cannot install ${WITH[*]}: see pip's output above."
    fi
    { echo "$state" >"$stamp.base" && echo "$state" >"$stamp.$extra"; } 2>/dev/null || true
}
