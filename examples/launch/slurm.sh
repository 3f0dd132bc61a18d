#!/usr/bin/env bash
# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
#
# SLURM with Pyxis containers; an image of NVIDIA NeMo or PyTorch with Megatron-LM and energon_ext:
#
#     MODEL=qwen3_30b_a3b DATA=/data/mix.yaml TOKENIZER=/data/tokenizer.json RUN=/checkpoints/run1 \
#         IMAGE=image.sqsh MOUNTS=/data,/checkpoints,$PWD MEGATRON_LM=/opt/Megatron-LM \
#         sbatch examples/launch/slurm.sh
#
# A job that is requeued goes on from the last checkpoint.
#SBATCH --job-name=energon_ext
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
: "${MODEL:?}" "${DATA:?}" "${TOKENIZER:?}" "${RUN:?}" "${IMAGE:?}" "${MOUNTS:?}" "${MEGATRON_LM:?}"

# SLURM runs a copy of this file, so the folder is that of the submission.
launch="${SLURM_SUBMIT_DIR:-$PWD}/examples/launch"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR NNODES="$SLURM_NNODES" MODEL DATA TOKENIZER RUN

srun --container-image="$IMAGE" --container-mounts="$MOUNTS" --no-container-mount-home \
    bash -c "export NODE_RANK=\$SLURM_NODEID PYTHONPATH=$MEGATRON_LM:\${PYTHONPATH:-}; \
        exec bash $launch/torchrun.sh"
