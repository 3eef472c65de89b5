# shellcheck shell=bash
# Sourced by the scripts beside it: messages, --help, and an environment to run in.
#
# set_up EXTRA leaves in $PYTHON an interpreter that has the package installed (EXTRA: "base" or "dev"),
# and does nothing when that is already so. With VENV=no it uses the active environment, else $VENV_DIRECTORY (.venv),
# which MOC_PYTHON makes, if that is set.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH_WITHOUT_GPU="torch==2.13.0" # what the tests without a GPU are run with
TORCH_WITH_GPU="torch>=2.9"
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

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() { # prints a Python 3.10-3.12 that can make virtual environments
    local candidate without_venv=""
    if [[ -n ${MOC_PYTHON:-} ]]; then
        is_supported_python "$MOC_PYTHON" || die "MOC_PYTHON=$MOC_PYTHON is not Python 3.10, 3.11 or 3.12."
    fi
    for candidate in ${MOC_PYTHON:+"$MOC_PYTHON"} python3 python3.12 python3.11 python3.10; do
        is_supported_python "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        die "$without_venv cannot make virtual environments; install its venv module" \
            "(Debian, Ubuntu: apt install python3-venv), or activate an environment and pass --no-venv."
    fi
    die "no Python 3.10, 3.11 or 3.12 on PATH; install one, or activate an environment that has it" \
        "and pass --no-venv."
}

has_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L >/dev/null 2>&1; }

use_existing_venv() { # for the launch scripts: .venv is taken when it is there and nothing is active
    if [[ -z ${VIRTUAL_ENV:-} && -z ${CONDA_PREFIX:-} && -x $ROOT/.venv/bin/python ]]; then
        PATH="$ROOT/.venv/bin:$PATH"
    fi
}

choose_environment() { # sets PYTHON, making .venv where it is wanted and missing
    if [[ $VENV == no ]]; then
        PYTHON=$(command -v python || command -v python3) || die "--no-venv: there is no python on PATH."
        is_supported_python "$PYTHON" || die "--no-venv: $PYTHON is not Python 3.10, 3.11 or 3.12."
        return
    fi
    PYTHON=$VENV_DIRECTORY/bin/python
    if [[ ! -e $PYTHON ]]; then
        local base
        base=$(find_python)
        say "Creating $VENV_DIRECTORY with $("$base" --version)"
        "$base" -m venv "$VENV_DIRECTORY" || die "could not create $VENV_DIRECTORY."
    fi
    is_supported_python "$PYTHON" ||
        die "$VENV_DIRECTORY is broken or not Python 3.10-3.12; remove it and run this again."
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
        die "a package is not the file that $lock names (pip's words are above): find out why before you install it."
    say "Not all of them are to be had here: pip chooses the versions, and compares no hashes"
    return 1
}

set_up() {
    local extra=$1 state stamp isolation=()
    choose_environment
    # What is installed is a function of these; the stamp beside the packages holds their hash.
    state=$("$PYTHON" - "$ROOT" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = "setup.py", "pyproject.toml", "scripts/common.sh", "scripts/locked/base.txt", "scripts/locked/dev.txt"
parts = [(root / name).read_bytes() for name in names]
print(hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(root).encode()])).hexdigest())
PY
    )
    stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.moc-megatron
    [[ $(cat "$stamp.$extra" 2>/dev/null) == "$state" ]] && return

    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        die "$PYTHON has no working pip; remove $VENV_DIRECTORY, or activate another environment and pass --no-venv."
    # An environment of somebody else keeps the versions that it has; setuptools is among what is locked.
    if [[ $VENV == yes ]] && install_locked "$extra"; then isolation=(--no-build-isolation); fi
    # torch by itself: where there is no GPU, exactly the version that the tests know.
    if ! "$PYTHON" -c 'import torch; assert torch.__version__ >= torch.torch_version.TorchVersion("2.9")' \
        2>/dev/null; then
        local torch=$TORCH_WITH_GPU
        has_gpu || torch=$TORCH_WITHOUT_GPU
        say "Installing $torch"
        "$PYTHON" -m pip install "$torch" || die "pip could not install $torch (its words are above)."
    fi
    local target=$ROOT
    [[ $extra == base ]] || target="${ROOT}[$extra]"
    say "Installing $target, editable, and what it needs"
    "$PYTHON" -m pip install --quiet "${isolation[@]}" --editable "$target" ||
        die "pip could not install $target (its words are above)."
    { echo "$state" >"$stamp.base" && echo "$state" >"$stamp.$extra"; } 2>/dev/null || true
}
