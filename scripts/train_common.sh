# shellcheck shell=bash
# Sourced by the train_*.sh scripts, which set MODEL_ARGS, PARALLEL_ARGS and TRAINING_ARGS (and
# DEFAULT_NNODES where one node is too small): what their usage, data, logs and launch have in common.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_help() {
    help_from_header
    cat <<'TXT'

Usage: ./scripts/train_NAME.sh [--dry-run] DATA_PREFIX TOKENIZER CHECKPOINT_DIR [FLAGS...]

  DATA_PREFIX     what tools/preprocess_data.py wrote, without .bin and .idx; or a blend in one
                  argument: "0.7 /data/web 0.3 /data/code"
  TOKENIZER       a sentencepiece .model file, or the name or directory of a Hugging Face tokenizer
  CHECKPOINT_DIR  checkpoints are saved here and, when there are any, resumed from; logs and
                  TensorBoard files stand in its log/ and tensorboard/
  FLAGS           go to pretrain_gpt_moe.py after those of this script, and so override them
  --dry-run       print the command and stop
  --help          this text

Environment: GPUS_PER_NODE (8), NNODES, NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (29500);
LAUNCHER (torchrun, or mocrun, under which lost workers are replaced), and with mocrun SPARES (0) and
RDZV_ENDPOINT (HOST:PORT,HOST:PORT,...: nodes that the controller may be on, instead of MASTER_*).
Run it on every node with that node's NODE_RANK; under Slurm, scripts/slurm/pretrain.sbatch does, and
mocrun.sbatch with mocrun.

SIGTERM and SIGUSR1 make it save and exit with 75, which means: start me again with the same command.
TXT
}

launch() { # launch "$@": reads the command line, then becomes the training
    local dry_run=no
    while [[ ${1:-} == -* ]]; do
        case $1 in
            --dry-run) dry_run=yes ;;
            --help | -h) train_help && exit ;;
            *) die "unknown option $1; flags for the training come last; see --help." ;;
        esac
        shift
    done
    (($# >= 3)) || die "DATA_PREFIX, TOKENIZER and CHECKPOINT_DIR are needed; see --help."
    local data=$1 tokenizer=$2 checkpoints=$3
    shift 3

    local data_paths
    read -ra data_paths <<<"$data"
    local tokenizer_type=HuggingFaceTokenizer
    [[ $tokenizer == *.model ]] && tokenizer_type=SentencePieceTokenizer
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

    local nodes=${NNODES:-${DEFAULT_NNODES:-1}}
    local launcher=("$ROOT/scripts/torchrun.py")
    DISTRIBUTED_ARGS=(--nproc-per-node "${GPUS_PER_NODE:-8}" --nnodes "$nodes")
    if [[ ${LAUNCHER:-torchrun} == mocrun ]]; then
        launcher=(-m moc.launch)
        DISTRIBUTED_ARGS+=(--spares "${SPARES:-0}")
    fi
    if ((nodes + ${SPARES:-0} > 1)); then
        DISTRIBUTED_ARGS+=(--node-rank "${NODE_RANK:-0}")
        if [[ ${LAUNCHER:-torchrun} == mocrun && -n ${RDZV_ENDPOINT:-} ]]; then
            DISTRIBUTED_ARGS+=(--rdzv-endpoint "$RDZV_ENDPOINT")
        else
            DISTRIBUTED_ARGS+=(--master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}")
        fi
    fi

    local command=(
        python "${launcher[@]}" "${DISTRIBUTED_ARGS[@]}"
        "$ROOT/pretrain_gpt_moe.py"
        "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
        "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
    )
    quoted "${command[@]}"
    [[ $dry_run == yes ]] && exit

    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    use_existing_venv
    exec "${command[@]}"
}
