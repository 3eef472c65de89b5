# shellcheck shell=bash
# Sourced by the templates and node.sh: the settings of a job, what checks them, and what each node does first.
#
# A setting is a variable of the submitting shell, or a word NAME=VALUE before the other arguments, which also
# works where Slurm passes no variables on (SBATCH_EXPORT=NONE). docs/how-to/slurm.md lists all of them.

NUMBERS=(SPARES GPUS_PER_NODE MAX_REQUEUES MASTER_PORT BEAT_S LOST_S START_S)
SETTINGS=("${NUMBERS[@]}" LOOK_S CONTAINER CONTAINER_FLAGS KEEP_MEMORY LAUNCHER NODE_SETUP NCCL_SOCKET_IFNAME
    GLOO_SOCKET_IFNAME)

stop() {
    echo "${TEMPLATE:-$(basename "$0")}: $*" >&2
    exit 1
}

settings_of() { # WORDS...: exports leading words NAME=VALUE that name settings; $taken is their number
    taken=0
    local name
    while (($#)) && [[ $1 =~ ^([A-Z_]+)=(.*)$ ]]; do
        name=${BASH_REMATCH[1]}
        [[ " ${SETTINGS[*]} " == *" $name "* ]] || stop "$name is no setting; the settings are: ${SETTINGS[*]}."
        export "$name=${BASH_REMATCH[2]}"
        taken=$((taken + 1))
        shift
    done
    if [[ -n ${SLURM_EXPORT_ENV:-} && $SLURM_EXPORT_ENV != ALL* && $taken == 0 ]]; then
        echo "${TEMPLATE:-$(basename "$0")}: WARNING: Slurm passed on no variables of the submitting shell" \
            "(--export, SBATCH_EXPORT): give settings as words, such as SPARES=1, before the other arguments." >&2
    fi
    export SLURM_EXPORT_ENV=ALL # tasks need the variables of this script
}

check_settings() { # refuses what no setting can be; the shell might even run a number that is none
    local name
    for name in "${NUMBERS[@]}"; do
        [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,5})$ ]] ||
            stop "$(printf '%s=%q' "$name" "${!name}") is not a number."
    done
    [[ ${LOOK_S:-1} =~ ^[0-9]{1,4}(\.[0-9]{1,3})?$ ]] || stop "$(printf 'LOOK_S=%q' "$LOOK_S") is not a number."
    ((${BEAT_S:-10} > 0 && ${LOST_S:-60} > 2 * ${BEAT_S:-10})) ||
        stop "LOST_S=${LOST_S:-60} is at most twice BEAT_S=${BEAT_S:-10}: raise LOST_S."
    ((${MASTER_PORT:-20000} >= 1024 && ${MASTER_PORT:-20000} <= 65535)) ||
        stop "MASTER_PORT=$MASTER_PORT is not a port from 1024 to 65535."
    case ${CONTAINER:-none} in
        none | apptainer:?* | pyxis:?*) ;;
        *) stop "CONTAINER=$CONTAINER is not understood; say apptainer:IMAGE or pyxis:IMAGE." ;;
    esac
    case ${KEEP_MEMORY:-yes} in yes | no) ;; *) stop "KEEP_MEMORY=$KEEP_MEMORY is neither yes nor no." ;; esac
    case ${LAUNCHER:-mocrun} in
        mocrun | torchrun) ;;
        *) stop "LAUNCHER=$LAUNCHER is neither mocrun nor torchrun." ;;
    esac
    [[ -z ${NODE_SETUP:-} || -r $NODE_SETUP ]] || stop "NODE_SETUP=$NODE_SETUP cannot be read on $(hostname)."
}

show_settings() { # one line with what is in force
    local name line=''
    for name in "${SETTINGS[@]}"; do [[ -z ${!name:-} ]] || line+=" $name=${!name}"; done
    echo "$(date '+%F %T') ${TEMPLATE:-$(basename "$0")}:$line"
}

listens() { # whether a program of this machine listens on PORT
    local port
    printf -v port '%04X' "$1"
    awk -v port=":$port" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }' \
        /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

choose_port() { # sets MASTER_PORT: as given, or by the job's number, but none on which this node listens
    local from=$((20000 + SLURM_JOB_ID % 10000)) tries
    if [[ -n ${MASTER_PORT:-} ]]; then
        ! listens "$MASTER_PORT" || stop "MASTER_PORT=$MASTER_PORT is in use on $(hostname): give another one."
        return
    fi
    for ((tries = 0; tries < 100; tries++)); do
        MASTER_PORT=$((20000 + (from - 20000 + tries) % 10000))
        listens "$MASTER_PORT" || return 0
    done
    stop "ports from $from on are in use on $(hostname): give MASTER_PORT."
}

cpus_of_task() { # flags of srun by which the task of a node has all its cores: workers are not bound to one
    local cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-}} # srun does not inherit it since Slurm 22.05
    # shellcheck disable=SC2034 # the templates use it
    cpu_flags=(--cpu-bind=none ${cpus:+--cpus-per-task="$cpus"})
}

prepare_node() { # sources NODE_SETUP, and sees to TMPDIR, which may name a directory of the submitting machine
    if [[ -n ${NODE_SETUP:-} ]]; then
        [[ -r $NODE_SETUP ]] || stop "NODE_SETUP=$NODE_SETUP cannot be read on $(hostname)."
        set +u # files of sites use variables that are not set
        # shellcheck source=/dev/null
        . "$NODE_SETUP" || stop "NODE_SETUP=$NODE_SETUP failed on $(hostname)."
        set -u
    fi
    if [[ ! -d ${TMPDIR:-/tmp} || ! -w ${TMPDIR:-/tmp} ]]; then
        echo "${TEMPLATE:-$(basename "$0")}: TMPDIR=$TMPDIR cannot be used on $(hostname): it is /tmp there." >&2
        TMPDIR=/tmp
    fi
    export TMPDIR=${TMPDIR:-/tmp}
}
