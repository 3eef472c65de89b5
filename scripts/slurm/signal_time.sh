#!/usr/bin/env bash
# Computes when Slurm has to warn a job, so that it saves before its time limit.
#
# Usage: ./scripts/slurm/signal_time.sh STATE_GB STORAGE_GB_PER_S [ITERATION_S]
#
#   STATE_GB          the state of the whole job: 14 to 18 bytes for each parameter; the size of a checkpoint
#                     directory, or what tools/plan_checkpoint.py prints
#   STORAGE_GB_PER_S  speed at which all nodes together write to storage
#   ITERATION_S       seconds of one iteration (default: 10)
#
# It prints the flag for sbatch, which overrides that of the template: for mocrun.sbatch --signal=USR1@N, for
# pretrain.sbatch --signal=B:USR1@N. N is the end of the current iteration and two saves (--save and --ckpt-dir) at
# half of the given speed, and two minutes: Slurm sends the signal up to a minute late, and processes have to end.
set -euo pipefail
case ${1:---help} in
    --help | -h)
        awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$0"
        exit
        ;;
esac
for one in "${@:1:3}"; do
    [[ $one =~ ^[0-9]{1,9}(\.[0-9]{1,9})?$ && $one =~ [1-9] ]] || {
        echo "signal_time.sh: $(printf '%q' "$one") is not a positive number; see --help." >&2
        exit 1
    }
done
(($# == 2 || $# == 3)) || {
    echo "signal_time.sh: give STATE_GB STORAGE_GB_PER_S [ITERATION_S]; see --help." >&2
    exit 1
}
seconds=$(awk -v state="$1" -v speed="$2" -v iteration="${3:-10}" \
    'BEGIN { s = iteration + 2 * state / (speed / 2) + 120; n = int(s); print n < s ? n + 1 : n }')
echo "--signal=USR1@$seconds (mocrun.sbatch) or --signal=B:USR1@$seconds (pretrain.sbatch)"
((seconds <= 65535)) || {
    echo "signal_time.sh: Slurm takes at most 65535 s: save more often, or to faster storage." >&2
    exit 1
}
