# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tokenized documents by number, in any format that a metadataset may name."""
