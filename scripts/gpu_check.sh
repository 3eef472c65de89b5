#!/usr/bin/env bash
# What works on this machine's GPU, in some eight minutes: copies beside training, kills and generations of many NCCL
# workers on one GPU, a broken device, a full one, precisions, Transformer Engine where it is installed, and what copies
# cost. Prints a table, and writes docs/results/gpu_*.json and docs/results/gpu-check.md.
#
# Usage: ./scripts/gpu_check.sh [--wheels DIR] [--no-venv] [CHECK_ARGUMENTS...]
#
#   --wheels DIR  install from the wheels in this directory alone, without the network
#   --no-venv     use the active environment, as it is
#   --help        this text
#
# Everything else goes to `python -m tests.gpu.check`:
#   --minutes N   for all steps, in the order of what is worth most (default: 8)
#   --only NAME.. these steps alone: capture kills groups dispatch stages assert memory precisions launch copies
#                 generations training fp8 attention saving
#   --results DIR for the JSON and the page (default: docs/results)
#   --logs DIR    for the output of each step (default: runs/gpu_check)
#
# MOC_PYTHON=python3.12 chooses the interpreter of the environment, which is then .venv-gpu beside .venv.
# The exit code is 0 if all that was run has passed, 1 if something has not, 2 where there is no NVIDIA GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

arguments=()
while (($#)); do
    case $1 in
        --wheels)
            (($# > 1)) || die "$1 needs a value; see --help."
            [[ -d $2 ]] || die "--wheels $2: there is no such directory."
            PIP_NO_INDEX=1 PIP_FIND_LINKS=$(realpath "$2")
            export PIP_NO_INDEX PIP_FIND_LINKS
            shift
            ;;
        --no-venv) VENV=no ;;
        --help | -h) help_from_header && exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

has_gpu || {
    printf '%s\n' "There is no NVIDIA GPU on this machine: run this where there is one." >&2
    exit 2
}
if [[ $VENV == yes && -n ${MOC_PYTHON:-} ]]; then
    VENV_DIRECTORY=$ROOT/.venv-gpu
fi
if [[ $VENV == yes ]]; then
    set_up dev
else
    choose_environment
fi
cd "$ROOT"
say "Checking"
exec "$PYTHON" -m tests.gpu.check "${arguments[@]}"
