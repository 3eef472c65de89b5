#!/usr/bin/env bash
# Sets up an environment (see setup.sh --help), then runs the tests.
#
# Usage: ./scripts/test.sh [--no-venv] [PYTEST_ARGUMENTS...]
#
#   --no-venv  use the active environment instead of .venv
#   --help     this text
#
# Everything else goes to pytest; without any, the whole suite runs, three files at a time: tests
# of worker processes wait as much as they compute. Examples:
#
#   ./scripts/test.sh tests/unit
#   ./scripts/test.sh -m "not slow" -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

arguments=()
while (($#)); do
    case $1 in
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

set_up dev
cd "$ROOT"
((${#arguments[@]})) || arguments=(-n 3 --dist loadfile)
say "Running the tests"
exec "$PYTHON" -m pytest "${arguments[@]}"
