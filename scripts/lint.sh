#!/usr/bin/env bash
# Checks style and types: ruff (lint, import order, docstrings, format), pyright and shellcheck.
#
# Usage: ./scripts/lint.sh [--fix] [--no-venv]
#
#   --fix      mend what ruff can mend, and format
#   --no-venv  use the active environment instead of .venv
#   --help     this text
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

fix=no
while (($#)); do
    case $1 in
        --fix) fix=yes ;;
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) die "unknown option $1; see --help." ;;
    esac
    shift
done

set_up dev
cd "$ROOT"
status=0
if [[ $fix == yes ]]; then
    "$PYTHON" -m ruff check --fix . || status=1
    "$PYTHON" -m ruff format .
else
    "$PYTHON" -m ruff check . || status=1
    "$PYTHON" -m ruff format --check . || status=1
fi
# its warnings are of newer versions, of which it would ask the network
PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$PYTHON" -m pyright --pythonpath "$PYTHON" || status=1
shellcheck --external-sources .ci/run .ci/install scripts/*.sh scripts/slurm/*.sh scripts/slurm/*.sbatch || status=1
((status == 0)) && say "Lint: nothing to say"
exit "$status"
