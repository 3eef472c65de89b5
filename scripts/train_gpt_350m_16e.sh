#!/usr/bin/env bash
# GPT-350M-16E (MoC-System, Table 1): 24 layers, every second one with 16 experts, 1.7B parameters.
#
# The layouts of MoC-System's Table 2, all without TP and PP:
#   case 1  one node of 8 GPUs   EP 8, DP 8    (the default)
#   case 2  two nodes            EP 16, DP 16  NNODES=2, and --expert-model-parallel-size 16 at the end
#   case 3  two nodes            EP 8, DP 16   NNODES=2
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

MODEL_ARGS=(
    --model gpt-350m-16e
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 256
    --train-iters 20000
    --lr 2.0e-4
    --min-lr 2.0e-6
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
launch "$@"
