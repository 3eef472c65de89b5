#!/usr/bin/env bash
# QWen-MoE (MoEvement, Table 2): 24 layers of 64 experts, 8 of them per token, 14.3B parameters.
#
# The layout of MoEvement, section 5.1: 96 GPUs in 12 nodes, PP 6 and EP 8 (within a node). Its DP 2
# counts the groups of 8 expert-parallel ranks; as Megatron counts, DP is 16. Its micro batch of 32
# is that of such a group: 4 for each GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

DEFAULT_NNODES=12
MODEL_ARGS=(
    --model qwen-moe-14b
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 6
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --train-iters 10000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
launch "$@"
