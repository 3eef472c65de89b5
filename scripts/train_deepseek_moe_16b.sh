#!/usr/bin/env bash
# DeepSeek-MoE (MoEvement, Table 2): 28 layers, 64 experts of which each token takes 8, and 2 shared
# ones; 16.4B parameters.
#
# The layout of MoEvement, section 5.1, as near as it goes: PP 14 and EP 8 (within a node) on 112 GPUs
# in 14 nodes. The paper's 12 stages do not divide 28 layers evenly. Its DP 1 counts the groups of 8
# expert-parallel ranks; as Megatron counts, DP is 8. Its micro batch of 32 is that of such a group:
# 4 for each GPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

DEFAULT_NNODES=14
MODEL_ARGS=(
    --model deepseek-moe-16b
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 14
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --train-iters 10000
    --lr 4.2e-4
    --min-lr 4.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
launch "$@"
