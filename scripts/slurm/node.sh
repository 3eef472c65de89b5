#!/usr/bin/env bash
# One task of mocrun.sbatch: runs the launcher of a node, and sees to the job if the batch script is gone.
#
#   srun ... scripts/slurm/node.sh COMMAND...
#
# When the launcher has ended, the task waits until those of all other nodes have, or are lost. If the batch
# script lives, that is for it to decide. If its node is lost, nobody else would end the job, which has
# --no-kill: then the task of the lowest number requeues it, or cancels it where nothing is left to do.
set -uo pipefail
case ${1:---help} in
    --help | -h)
        awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$0"
        exit
        ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
. "$(dirname "${BASH_SOURCE[0]}")/job_end.sh"
prepare_node
cpus_of_task

me=$SLURM_NODEID
export NODE_RANK=$me
[[ -n ${VIRTUAL_ENV:-}${CONDA_PREFIX:-}$CONTAINER || ! -x .venv/bin/python ]] || PATH=$PWD/.venv/bin:$PATH
TMPDIR=$(mktemp -d "$TMPDIR/mocrun-$SLURM_JOB_ID-XXXXXX") && export TMPDIR
! ((me < 3)) || ! listens "$MASTER_PORT" ||
    say "port $MASTER_PORT is in use on this node, which the controller may need: give another MASTER_PORT"

contained() { # runs a command where the job's container is, if it has one; see mocrun.sbatch
    local image=${CONTAINER#*:} flags
    read -ra flags <<<"${CONTAINER_FLAGS:-}"
    case ${CONTAINER:-} in
        apptainer:*) # /dev/shm is the node's, unless it is contained
            exec apptainer exec --nv --bind "$PWD" --bind "$TMPDIR" --pwd "$PWD" "${flags[@]}" "$image" "$@"
            ;;
        pyxis:*) # a step of its own, since srun starts all of a step in the container
            exec srun --overlap --nodes=1 --ntasks=1 "${cpu_flags[@]}" --nodelist="$SLURMD_NODENAME" --container-image="$image" \
                --container-workdir="$PWD" --container-mounts="$PWD:$PWD,$TMPDIR:$TMPDIR,/dev/shm:/dev/shm" \
                "${flags[@]}" "$@"
            ;;
        *) exec "$@" ;;
    esac
}

# shellcheck disable=SC2329 # traps call it
clean() { # what this node's part of the job leaves; memory is kept for a job that goes on
    kill -KILL "$beats" 2>/dev/null
    case $KEEP_MEMORY:${status:-} in
        yes:75 | yes:70 | yes:137 | yes:) ;;
        *)
            [[ ! -e tools/clean_memory.py || $SNAPSHOTS == /snapshots ]] ||
                (contained python tools/clean_memory.py --memory-dir "$MEMORY" --remove --ended --ckpt-dir "$SNAPSHOTS")
            ;;
    esac
    rm -rf "$TMPDIR"
}
trap clean EXIT

# shellcheck disable=SC2329
pass_on() { # SIGNAL: TERM asks this node to leave, USR1 all to stop; also if the launcher is not there yet
    asked=$1
    [[ -z $launcher ]] || kill -"$asked" "$launcher" 2>/dev/null
}
asked=no launcher='' beats=''
trap 'pass_on TERM' TERM
trap 'touch "$PRIVATE/interrupted"; pass_on USR1' USR1 # the time is nearly over

beat "$me" # from now on its loss is noticed
(contained "$@") &
launcher=$!
keep_beating "$me" &
beats=$!
[[ $asked == no ]] || pass_on "$asked"

while true; do # a trapped signal ends `wait`, not the launcher
    status=0
    wait "$launcher" || status=$?
    kill -0 "$launcher" 2>/dev/null || break
done
echo "$status" >"$PRIVATE/code.$me.part" && mv "$PRIVATE/code.$me.part" "$PRIVATE/code.$me"
trap 'exit "$status"' TERM

is_first_left() { # whether no task of a lower number is there to decide
    local node
    for ((node = 0; node < me; node++)); do is_gone "$node" || return 1; done
}

while [[ -d $PRIVATE && ! -e $PRIVATE/over ]]; do
    look "$me"
    if is_gone batch && all_have_ended && is_first_left && mkdir "$PRIVATE/decided" 2>/dev/null; then
        say "the batch script is gone with its node; node $me ends the job"
        conclude
        scontrol update JobId="$SLURM_JOB_ID" Comment="training ended with $code"
        scancel "$SLURM_JOB_ID"
        exit "$code"
    fi
    sleep "$LOOK_S"
done
exit "$status"
