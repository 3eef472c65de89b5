#!/usr/bin/env bash
# Pre-trains by a recipe: the flags of a model and its layout, in scripts/recipes/NAME.yaml.
#
# Usage: ./scripts/train.sh NAME [--launcher torchrun|mocrun] [LAUNCHER_FLAG=VALUE...] [--dry-run]
#                           DATA_PREFIX TOKENIZER CHECKPOINT_DIR [FLAGS...]
#        ./scripts/train.sh --list
#
#   NAME            a recipe, or the path of one of your own: a .yaml file of flags, where a comment
#                   "Nodes: N" says how many nodes it is for
#   --launcher L    mocrun, which replaces lost workers and lets nobody in without the job's token, or torchrun;
#                   by default mocrun, but for several nodes without MOC_TOKEN_FILE
#                   (docs/how-to/several-machines.md), where only torchrun starts
#   LAUNCHER_FLAG=VALUE
#                   goes to the launcher and overrides what the environment says, as --nproc-per-node=4
#   --dry-run       print the command and stop
#   DATA_PREFIX     what tools/preprocess_data.py wrote, without .bin and .idx; or a blend in one
#                   argument: "0.7 /data/web 0.3 /data/code"
#   TOKENIZER       a sentencepiece .model file, or a Hugging Face tokenizer: its directory, or its name in the hub, whose
#                   cache on each machine then has to hold it
#   CHECKPOINT_DIR  checkpoints are saved here and, when there are any, resumed from; logs and
#                   TensorBoard files stand in its log/ and tensorboard/
#   FLAGS           go to pretrain_gpt_moe.py and override the recipe; so does a --config FILE.yaml
#   --list          print the recipes and stop
#   --help          this text
#
# Environment: GPUS_PER_NODE (8), NNODES (the recipe's), NODE_RANK (0), MASTER_ADDR (localhost),
# MASTER_PORT (29500); LAUNCHER (as --launcher), and with mocrun SPARES (0) and RDZV_ENDPOINT
# (HOST:PORT,HOST:PORT,...: nodes that the controller may be on, instead of MASTER_*).
# Run it on every node with that node's NODE_RANK; under Slurm, scripts/slurm/pretrain.sbatch does, and
# mocrun.sbatch with mocrun.
#
# SIGTERM and SIGUSR1 make it save and exit with 75, which means: start me again with the same command.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

list_recipes() { # name, and what the first line of the file says of it
    local recipe
    for recipe in "$ROOT"/scripts/recipes/*.yaml; do
        printf '%-18s %s\n' "$(basename "$recipe" .yaml)" "$(sed -n '1s/^# *//p' "$recipe")"
    done
}

recipe="" launcher=${LAUNCHER:-} launcher_flags=() dry_run=no
while (($#)); do
    case $1 in
        --list) list_recipes && exit ;;
        --help | -h) help_from_header && exit ;;
        --dry-run) dry_run=yes ;;
        --launcher)
            (($# > 1)) || die "--launcher needs a value: torchrun or mocrun."
            launcher=$2
            shift
            ;;
        --launcher=*) launcher=${1#*=} ;;
        --*=* | --standalone | --no-controller) launcher_flags+=("$1") ;;
        -*) die "unknown option $1; flags of the training come last; see --help." ;;
        *)
            [[ -z $recipe ]] || break
            recipe=$1
            [[ $recipe == *.yaml ]] || recipe=$ROOT/scripts/recipes/${recipe//-/_}.yaml
            [[ -e $recipe ]] ||
                die "there is no recipe $1; give a .yaml file, or one of:" \
                    "$(basename -s .yaml "$ROOT"/scripts/recipes/* | paste -sd' ')."
            ;;
    esac
    shift
done
[[ -n $recipe ]] || die "NAME of a recipe is needed; see --list and --help."
(($# >= 3)) || die "DATA_PREFIX, TOKENIZER and CHECKPOINT_DIR are needed; see --help."
if [[ -e $1.bin ]]; then
    data_paths=("$1") # one prefix, perhaps with spaces
else
    read -rd '' -a data_paths <<<"$1" || true # a blend, perhaps of several lines
fi
tokenizer=$2 checkpoints=$3
shift 3
tokenizer_type=HuggingFaceTokenizer
[[ $tokenizer == *.model ]] && tokenizer_type=SentencePieceTokenizer

nodes=${NNODES:-$(sed -n 's/^# Nodes: *\([0-9]*\).*/\1/p' "$recipe")}
nodes=${nodes:-1}
number NNODES "$nodes"
number GPUS_PER_NODE "${GPUS_PER_NODE:-8}"
number NODE_RANK "${NODE_RANK:-0}"
number SPARES "${SPARES:-0}"
number MASTER_PORT "${MASTER_PORT:-29500}"
DISTRIBUTED_ARGS=(--nproc-per-node "${GPUS_PER_NODE:-8}" --nnodes "$nodes")
if [[ -z $launcher ]]; then # without a token, several nodes cannot know one another
    launcher=mocrun
    if ((nodes + ${SPARES:-0} > 1)) && [[ -z ${MOC_TOKEN_FILE:-}${MOC_TOKEN:-} ]]; then launcher=torchrun; fi
fi
if [[ $launcher == torchrun ]]; then
    say "torchrun's store answers whoever reaches this machine: use a network of the job's own, or --launcher mocrun" >&2
fi
case $launcher in
    torchrun) program=("$ROOT/scripts/torchrun.py") ;;
    mocrun) program=(-m moc.launch) && DISTRIBUTED_ARGS+=(--spares "${SPARES:-0}") ;;
    *) die "--launcher $launcher: give torchrun or mocrun." ;;
esac
if ((nodes + ${SPARES:-0} > 1)); then
    DISTRIBUTED_ARGS+=(--node-rank "${NODE_RANK:-0}")
    if [[ $launcher == mocrun && -n ${RDZV_ENDPOINT:-} ]]; then
        DISTRIBUTED_ARGS+=(--rdzv-endpoint "$RDZV_ENDPOINT")
    else
        DISTRIBUTED_ARGS+=(--master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}")
    fi
fi
DATA_ARGS=(
    --data-path "${data_paths[@]}"
    --split "990,8,2"
    --tokenizer-type "$tokenizer_type"
    --tokenizer-model "$tokenizer"
)
LOGGING_ARGS=(
    --save "$checkpoints"
    --load "$checkpoints"
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 10
    --log-throughput
    --log-dir "$checkpoints/log"
    --tensorboard-dir "$checkpoints/tensorboard"
    --exit-signal-handler
)
command=(
    python "${program[@]}" "${DISTRIBUTED_ARGS[@]}" "${launcher_flags[@]}"
    "$ROOT/pretrain_gpt_moe.py" --config "$recipe" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
)
quoted "${command[@]}"
[[ $dry_run == no ]] || exit 0

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
use_existing_venv
exec "${command[@]}"
