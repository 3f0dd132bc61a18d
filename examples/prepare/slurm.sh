#!/usr/bin/env bash
# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Prepares a corpus on SLURM. Call it on a login node; it submits an array of tasks and ends:
#
#     INPUT=/data/web OUTPUT=/data/tokens/web TOKENIZER=/data/tokenizer.json PARTITION=cpu \
#         bash examples/prepare/slurm.sh --val 0.001
#
# Further arguments go to `energon-ext prepare`; --render prints the script of the tasks. Call it
# again after a failure: only what is missing is made.
set -euo pipefail
: "${INPUT:?a folder of JSON Lines}" "${OUTPUT:?a folder}" "${TOKENIZER:?}" "${PARTITION:?}"

exec energon-ext prepare "$OUTPUT" --jsonl "$INPUT" --tokenizer "$TOKENIZER" \
    --executor slurm --tasks "${TASKS:-500}" \
    --slurm partition="$PARTITION" --slurm time="${TIME:-4:00:00}" \
    --slurm cpus_per_task="${CPUS_PER_TASK:-1}" --slurm mem_per_cpu_gb="${MEMORY_GB:-4}" \
    ${ACCOUNT:+--slurm account="$ACCOUNT"} "$@"
