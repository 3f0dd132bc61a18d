#!/usr/bin/env bash
# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Prepares a corpus on a Ray cluster, and waits until it is prepared:
#
#     INPUT=/data/web OUTPUT=/data/tokens/web TOKENIZER=/data/tokenizer.json RAY_ADDRESS=auto \
#         bash examples/prepare/ray.sh --val 0.001
#
# Call it where Ray runs, or by `ray job submit`. INPUT, OUTPUT and the working folder are on a file
# system that all nodes share. Further arguments go to `energon-ext prepare`. Call it again after a
# failure: only what is missing is made.
set -euo pipefail
: "${INPUT:?a folder of JSON Lines}" "${OUTPUT:?a folder}" "${TOKENIZER:?}"

exec energon-ext prepare "$OUTPUT" --jsonl "$INPUT" --tokenizer "$TOKENIZER" \
    --executor ray --tasks "${TASKS:-500}" \
    --ray cpus_per_task="${CPUS_PER_TASK:-1}" --ray mem_per_cpu_gb="${MEMORY_GB:-4}" "$@"
