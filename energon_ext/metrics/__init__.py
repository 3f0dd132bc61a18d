# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The log of a run: ``metrics.jsonl``, TensorBoard and Weights & Biases."""
