#!/usr/bin/env bash
# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
#
# One node, or several when NNODES, NODE_RANK and MASTER_ADDR are set:
#
#     MODEL=llama3_8b DATA=mix.yaml TOKENIZER=tokenizer.json RUN=/checkpoints/run1 \
#         bash examples/launch/torchrun.sh [more options of Megatron-LM]
#
# With --dry-run as first option it checks options, sizes, model and data without GPUs.
# SCRIPT=pretrain_vlm.py starts that script, which has its own encoder; a dry run gets this encoder
# by --encoder vision_language:encoder.
# Run it again after an interruption: model, optimizer and data go on from the last checkpoint.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MODEL:?llama3_8b or qwen3_30b_a3b}" "${DATA:?a metadataset}" "${TOKENIZER:?}" "${RUN:?a folder}"

if [[ "${1:-}" == --dry-run ]]; then
    exec python "$here/check.py" "$here/$MODEL.args" --data "$DATA" --tokenizer "$TOKENIZER" \
        --gpus $((${NNODES:-1} * ${GPUS_PER_NODE:-8})) "${@:2}"
fi

options() { grep -hv '^#' "$here/$1.args"; }

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    "$here/${SCRIPT:-pretrain_gpt.py}" $(options "$MODEL") $(options energon) \
    --data-path "$DATA" --energon-tokenizer "$TOKENIZER" \
    --save "$RUN/model" --load "$RUN/model" --dataloader-save "$RUN/data" \
    --tensorboard-dir "$RUN/tensorboard" --energon-run-dir "$RUN" "$@"
