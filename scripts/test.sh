#!/usr/bin/env bash
# Sets up an environment (see setup.sh --help), then runs the tests.
#
# Usage: ./scripts/test.sh [--quick | --all] [--with REQUIREMENT]... [--no-venv] [PYTEST_ARGUMENTS...]
#
#   --quick             leave out what bears the mark "slow": jobs and worlds of several processes
#   --all               also run what tests/left_out.txt names, and every case of a test: more than an hour on two cores
#   --with REQUIREMENT  test this version instead, such as torch==2.15.0 or megatron-core==0.20.0, in an environment of
#                       its own, .venv-with-NAME; the versions that the package supports do not limit it
#   --no-venv           use the active environment instead of .venv
#   --help              this text
#
# Everything else goes to pytest; without any, the whole suite runs. Two workers for each core, but at most 16, share
# it, since tests of worker processes wait as much as they compute: slow tests first, and what shares a fixture in one
# worker (tests/conftest.py); -n 0 runs one test after the other. Examples:
#
#   ./scripts/test.sh tests/unit
#   ./scripts/test.sh --quick -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cores=$(nproc)
arguments=(-n "$((cores < 8 ? 2 * cores : 16))" --dist loadfile)
while (($#)); do
    case $1 in
        --quick) arguments+=(-m "not slow") ;;
        --all) export MOC_TESTS_ALL=1 ;;
        --with)
            [[ ${2:--} != -* ]] || die "cannot use --with: a requirement is missing. Fix: add one, such as torch==2.15.0."
            WITH+=("$2")
            [[ $2 != torch[!A-Za-z0-9_-]* ]] || TORCH_WITH_GPU=$2 TORCH_WITHOUT_GPU=$2
            shift
            ;;
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

if ((${#WITH[@]})); then
    [[ $VENV == yes ]] || die "cannot use --with and --no-venv: --with makes an environment. Fix: drop one of them."
    printf -v name -- '-%s' "${WITH[@]//[!A-Za-z0-9.]/-}"
    VENV_DIRECTORY=$ROOT/.venv-with$name
    export MOC_UNCHECKED_VERSIONS=1 # let the program start with versions that it does not support
fi
set_up dev
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE= # else every worker, and every program that tests start, compiles all files anew
say "Running the tests"
exec "$PYTHON" -m pytest "${arguments[@]}"
