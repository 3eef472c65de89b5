#!/usr/bin/env bash
# GPT-125M-8E (MoC-System, Table 1): 12 layers, every second one with 8 experts, 323M parameters.
#
# One node of 8 GPUs, one expert of each layer on each: EP 8, DP 8.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

MODEL_ARGS=(
    --model gpt-125m-8e
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
    --lr 4.5e-4
    --min-lr 4.5e-6
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
launch "$@"
