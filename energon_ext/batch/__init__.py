# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows as tensors: one batch contract for pretraining, fine-tuning and RL."""
