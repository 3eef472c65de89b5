#!/usr/bin/env bash
# Sets up an environment (see setup.sh --help), then runs the tests.
#
# Usage: ./scripts/test.sh [--quick] [--no-venv] [PYTEST_ARGUMENTS...]
#
#   --quick    leave out what bears the mark "slow": jobs and worlds of several processes
#   --no-venv  use the active environment instead of .venv
#   --help     this text
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
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

set_up dev
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE= # else every worker, and every program that tests start, compiles all files anew
say "Running the tests"
exec "$PYTHON" -m pytest "${arguments[@]}"
