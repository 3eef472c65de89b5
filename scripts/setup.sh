#!/usr/bin/env bash
# Sets up an environment: .venv when there is none, torch, and this package with what it needs.
#
# Usage: ./scripts/setup.sh [--dev] [--no-venv]
#
#   --dev      also what the tests and lint need
#   --no-venv  install into the active environment instead of .venv
#   --help     this text
#
# Needs Python 3.12 or newer (3.12 and 3.13 are tested), which it finds on PATH, in pyenv and in uv; MOC_PYTHON=PATH
# chooses one. A second run notices that nothing changed and is quick. pip's own settings (PIP_INDEX_URL,
# PIP_FIND_LINKS, ...) apply. Without an NVIDIA GPU, it installs PyTorch's CPU build where the package index has one,
# which is a tenth of the download. To add the index that has it:
#
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./scripts/setup.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

extra=base
while (($#)); do
    case $1 in
        --dev) extra=dev ;;
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) die "unknown option $1; see --help." ;;
    esac
    shift
done

set_up "$extra"
say "Ready: $PYTHON"
